"""The thread, inside a vLLM worker, that turns copied hidden states into whole shard files.

It never waits for the engine and the engine hardly ever for it: documents are queued, and only when more than a shard's
worth is waiting for the disk does ``put`` block, so that memory stays bounded. A shard is written when it is full, and
when it is asked for: the capturing process raises the number in the file ``flush`` of the incoming folder, which every
writer looks at several times a second, whether vLLM is working or idle. So the protocol is the same for any number of
workers, and needs none of them to be known.

If writing fails, the reason is left in a file ``<writer>.error`` for the capturing process to find; what comes after is
dropped.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from spectrain.data.hidden_states import StoreMeta, TargetStates
from spectrain.data.hidden_states_shard import ShardBuffer
from spectrain.engines.vllm.adopt_states import ERROR_SUFFIX, META, flush_number
from spectrain.errors import SpectrainError
from spectrain.files import write_atomically

_POLL_S = 0.1


class _Event(Protocol):
    """What is needed of a CUDA event."""

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class CopiedDocument:
    """A document with the hidden states of all its captured layers, [S, I, H] in ascending order; valid once ``event``
    has happened.
    """

    key: str
    split: str
    input_ids: Tensor  # [S] int32
    loss_mask: Tensor  # [S] uint8
    states: Tensor
    event: _Event | None
    file: str | None = None  # a file for it alone, by its name without ending; None: in a shard among others

    @property
    def bytes(self) -> int:
        return self.states.numel() * self.states.element_size()


class ShardWriter:
    """Takes documents by ``put`` and writes shards into ``folder``, which must exist, under names no other
    writer uses.
    """

    def __init__(self, folder: Path, meta: StoreMeta, shard_bytes: int) -> None:
        self._folder = folder
        self._meta = meta
        self._buffer = ShardBuffer(meta, shard_bytes)
        self._name = uuid.uuid4().hex[:12]
        self._written = 0
        self._flushed = flush_number(folder)
        self._queue: deque[CopiedDocument] = deque()
        self._queued_bytes = 0
        self._queue_limit = max(shard_bytes, 1 << 26)
        self._changed = threading.Condition()
        self._closing = self._failed = False
        self._thread = threading.Thread(target=self._run, name="spectrain-shards", daemon=True)
        self._thread.start()

    def put(self, document: CopiedDocument) -> None:
        """Queue a document; waits while more than a shard's worth is queued."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued_bytes < self._queue_limit or self._failed)
            self._queue.append(document)
            self._queued_bytes += document.bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Write everything and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._step():
                pass
            self._write()
        except Exception as error:  # whatever it is: the capturing process must hear of it
            with self._changed:
                self._failed = True
                self._changed.notify_all()
            self._tell(str(error) if isinstance(error, SpectrainError) else f"{type(error).__name__}: {error}")
            self._drop_all()

    def _step(self) -> bool:
        """Store one document, or look at the flush file; False when there will be no more."""
        wanted = flush_number(self._folder)  # before the queue is looked at: what was put before the call is written
        with self._changed:
            if not self._queue:
                if self._closing:
                    return False
                if wanted <= self._flushed:
                    self._changed.wait(_POLL_S)
            document = self._queue.popleft() if self._queue else None
        if document is not None:
            self._store(document)
            with self._changed:
                self._queued_bytes -= document.bytes
                self._changed.notify_all()
        elif wanted > self._flushed:
            self._write()
            self._flushed = wanted
        return True

    def _store(self, document: CopiedDocument) -> None:
        if document.event is not None:
            document.event.synchronize()
        taps, last = document.states[:, : len(self._meta.tap_ids)], document.states[:, -1]
        states = TargetStates(document.input_ids, document.loss_mask, taps, last, None, document.key, document.split)
        if document.file is not None:
            alone = ShardBuffer(self._meta, 0)
            alone.add(states)
            alone.write(self._folder / f"{document.file}.safetensors", self._described())
            return
        if not self._buffer.fits(len(document.input_ids)):
            self._write()
        self._buffer.add(states)
        if self._buffer.full:
            self._write()

    def _write(self) -> None:
        """The shard appears under its name only when it is whole and on disk."""
        if not self._buffer.keys:
            return
        path = self._folder / f"{self._name}-{self._written:05d}.safetensors"
        self._buffer.write(path, self._described())
        self._written += 1

    def _described(self) -> dict[str, str]:
        return {META: json.dumps(dataclasses.asdict(self._meta))}

    def _tell(self, reason: str) -> None:
        """Leave the reason for the capturing process. A full disk has room for an empty file at least, and its name
        says enough.
        """
        file = self._folder / f"{self._name}{ERROR_SUFFIX}"
        try:
            write_atomically(file, reason)
        except SpectrainError:
            with suppress(OSError):
                file.touch()

    def _drop_all(self) -> None:
        """After a failure: keep the engine from waiting for a writer that is no more."""
        with self._changed:
            while not self._closing:
                self._queue.clear()
                self._queued_bytes = 0
                self._changed.notify_all()
                self._changed.wait()
