"""What is watched from elsewhere: wandb, tensorboard, trackio and the other trackers of accelerate, beside
``metrics.jsonl``.

All of them get the same: every figure of a line of metrics under the name it has there, the entries of a list under the
name and a number (``accuracy_per_step/1``), over optimiser steps; at the end the figures of what was chosen, and those
of the evaluation records. A run that is resumed goes on under the id that it began with, which is kept beside the
metrics and goes when the training starts anew. A tracker is never worth a training: one that fails is left out from
then on, and said once.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from spectrain.config.overrides import flatten
from spectrain.config.schema import SpectrainConfig
from spectrain.console import say
from spectrain.files import plain, write_atomically

TRACKERS_FILE = "trackers.json"  # of a run directory: the id


@dataclass
class Trackers:
    """Trackers at work, by their names; those that have failed are gone."""

    open: dict[str, GeneralTracker] = field(default_factory=dict)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Figures of a step. What is no figure is left out."""
        figures = dict(scalars(values))
        for name, tracker in list(self.open.items()):
            self._attempt(name, lambda tracker=tracker: tracker.log(figures, step=step))  # type: ignore[misc]

    def summarise(self, values: Mapping[str, Any], step: int) -> None:
        """Figures of the whole run, after its last step. wandb has a place of its own for them, and would drop what
        comes for a step that it has seen.
        """
        figures = dict(scalars(values))
        for name, tracker in list(self.open.items()):
            if name == "wandb":
                self._attempt(name, lambda tracker=tracker: tracker.tracker.summary.update(figures))  # type: ignore[misc]
            else:
                self._attempt(name, lambda tracker=tracker: tracker.log(figures, step=step))  # type: ignore[misc]

    def flush(self) -> None:
        """Let nothing wait in memory: TensorBoard's writer would for two minutes."""
        for name, tracker in list(self.open.items()):
            flush = getattr(tracker.tracker, "flush", None)
            if flush is not None:
                self._attempt(name, flush)

    def finish(self) -> None:
        for name, tracker in list(self.open.items()):
            self._attempt(name, tracker.finish)
        self.open.clear()

    def start(self, name: str, make: Callable[[], GeneralTracker], configuration: Mapping[str, Any] | None) -> None:
        """Begin with a tracker. ``configuration``: what the run is; None where the tracker has it already."""

        def begin() -> None:
            tracker = self.open[name] = make()
            tracker.start()
            if configuration is not None:
                tracker.store_init_configuration(dict(configuration))

        self._attempt(name, begin)

    def _attempt(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # whatever a tracker, its network or its disk raises
            self.open.pop(name, None)
            reason = " ".join(str(error).split())[:200]
            say(f"note: logger: {name} fails and is left out ({type(error).__name__}: {reason}); metrics.jsonl has all")


def open_trackers(config: SpectrainConfig, folder: Path, step: int = 0) -> Trackers:
    """The configured trackers of the run in ``folder``.

    step: the last one that was made; what a tracker has of later ones is made again.
    """
    trackers, logger = Trackers(), config.logger
    if not logger.trackers:
        return trackers
    run_id = _run_id(folder)
    settings: dict[str, dict[str, Any]] = {
        "wandb": {"id": run_id, "name": config.run.name, "resume": "allow", "dir": str(folder)}
        | ({"mode": "offline"} if logger.offline else {}),
        "trackio": {"name": f"{config.run.name}-{run_id}", "resume": "allow"},
        "tensorboard": {"purge_step": step + 1} if step else {},
    }
    sections = (("trainer", config.trainer), ("drafter", config.drafter), ("decoding", config.decoding))
    found = {key: value for name, section in sections for key, value in flatten(section, f"{name}.").items()}
    configuration = {"run": config.run.name, **{key: _shown(value) for key, value in plain(found).items()}}
    for name in logger.trackers:
        kind = LOGGER_TYPE_TO_CLASS[name]
        place = (str(folder),) if kind.requires_logging_directory else ()

        def make(kind: Any = kind, place: tuple[str, ...] = place, name: str = name) -> GeneralTracker:
            return kind(logger.project, *place, **settings.get(name, {}))

        trackers.start(name, make, None if step and name == "tensorboard" else configuration)
    return trackers


def scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, figure) of everything that is a number, in lists and mappings, too."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from scalars({f"{name}/{key}": entry for key, entry in value.items()})
        elif isinstance(value, list | tuple):
            yield from scalars({f"{name}/{number}": entry for number, entry in enumerate(value, start=1)})
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _shown(value: Any) -> Any:
    """What every tracker takes as a setting."""
    return value if isinstance(value, int | float | str | bool) else json.dumps(value)


def _run_id(folder: Path) -> str:
    """That of the run in ``folder``, made the first time."""
    path = folder / TRACKERS_FILE
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        run_id = secrets.token_hex(4)
        write_atomically(path, json.dumps({"id": run_id}) + "\n", "the id of the trackers' run")
        return run_id
