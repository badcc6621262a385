"""Which checkpoints a training keeps, and a thread that writes them while training goes on.

What is written are copies on the host, taken after a whole step; the file system sees a checkpoint when it is whole.
One is written at a time: the next waits for it, and so do the end of training and a signal that ends the command. An
error of the thread (a full disk) is raised by whoever waits for it.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from spectrain.training.checkpointing import TrainingState, checkpoint_name, prune_checkpoints, save_checkpoint


class CheckpointWriter:
    """Of one training, on the rank that writes."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._running: Future[None] | None = None
        self._extra: Path | None = None  # a checkpoint that a signal brought about, beside those that are due

    def goes_on_from(self, step: int, is_extra: bool) -> None:
        """The training resumed from the checkpoint of ``step``; 0: from none."""
        self._extra = self._folder / checkpoint_name(step) if is_extra else None
        # Of a kill while older ones were removed there may be one too many.
        prune_checkpoints(self._folder, step, self._keep + (self._extra is not None))

    def start(self, tensors: TrainingState, state: dict[str, Any]) -> None:
        """Write the state of ``state["step"]`` steps. ``state["extra"]``: not because it is due; then the next one
        takes its place, and none that is due has to go for it. Waits for the one before, and raises what became of it.
        """
        self.finish()
        name, old, extra = checkpoint_name(state["step"]), self._extra, bool(state["extra"])
        replaced = old if old is not None and old.name != name else None
        keep = self._keep + extra + (replaced is not None)
        self._extra = self._folder / name if extra else None
        self._running = self._thread.submit(self._write, tensors, state, keep, replaced)

    def _write(self, tensors: TrainingState, state: dict[str, Any], keep: int, replaced: Path | None) -> None:
        save_checkpoint(self._folder, tensors, state, keep)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def settle(self) -> None:
        """Until what was started is on disk, or could not be written, which ``finish`` says."""
        if self._running is not None:
            wait([self._running])

    def finish(self) -> None:
        """Until what was started is on disk. Raises RunError where it could not be written."""
        running = self._running
        if running is None:
            return
        try:
            running.result()
        finally:  # not before: a signal may come while the main thread waits, and waits, too
            if self._running is running:
                self._running = None
