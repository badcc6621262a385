"""Trackers: the same figures under the same names over the same steps, a resumed run under its first id, and a tracker
that fails is left out.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from spectrain.config.schema import LoggerConfig, RunConfig, SpectrainConfig
from spectrain.training import trackers as module
from spectrain.training.trackers import open_trackers, scalars

LINE = {"loss": 0.5, "epoch": 1, "accuracy_per_step": [0.25, 0.75], "by_n": {"2": 1.5}, "interval": None, "ok": True}
FLAT = {"loss": 0.5, "epoch": 1, "accuracy_per_step/1": 0.25, "accuracy_per_step/2": 0.75, "by_n/2": 1.5}


def config(*names: str, **logger: Any) -> SpectrainConfig:
    PartialState()
    return SpectrainConfig(run=RunConfig(name="mine"), logger=LoggerConfig(trackers=names, **logger))


class Memory(GeneralTracker):
    """Remembers what it is told; fails where ``fails`` says so."""

    name = "trackio"
    requires_logging_directory = False
    fails = ""
    told: list[tuple[Any, ...]] = []

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.told.append(("made", run_name, kwargs))

    tracker = property(lambda self: self)

    def _do(self, what: str, *values: Any) -> None:
        if what == self.fails:
            raise ConnectionError(f"no {what}")
        self.told.append((what, *values))

    def start(self) -> None:
        self._do("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._do("configuration", values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self._do("log", values, step)

    def finish(self) -> None:
        self._do("finish")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "trackio", Memory)
    monkeypatch.setattr(Memory, "told", [])
    return Memory


def test_what_is_no_figure_is_left_out():
    assert dict(scalars(LINE)) == FLAT
    assert math.isnan(dict(scalars({"loss": float("nan")}))["loss"])


def test_a_tracker_is_told_everything(memory: type[Memory], tmp_path: Path):
    trackers = open_trackers(config("trackio", project="p"), tmp_path)
    trackers.log(LINE, 3)
    trackers.summarise({"fit": {"step": 2}}, 4)
    trackers.finish()
    run_id = json.loads((tmp_path / "trackers.json").read_text())["id"]
    made, started, (_, known), *logged, finished = memory.told
    assert made == ("made", "p", {"name": f"mine-{run_id}", "resume": "allow"})
    assert (started, finished) == (("start",), ("finish",))
    assert known["run"] == "mine" and known["trainer.epochs"] == 3
    assert logged == [("log", FLAT, 3), ("log", {"fit/step": 2}, 4)]


def test_a_resumed_run_keeps_its_id(memory: type[Memory], tmp_path: Path):
    for step in (0, 5):
        open_trackers(config("trackio"), tmp_path, step).finish()
    open_trackers(config("trackio"), tmp_path / "other").finish()
    first, again, other = [told[2]["name"] for told in memory.told if told[0] == "made"]
    assert first == again != other


@pytest.mark.parametrize("where", ["start", "configuration", "log", "finish"])
def test_a_tracker_that_fails_is_said_once_and_stops_nothing(
    memory: type[Memory],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
):
    monkeypatch.setattr(memory, "fails", where)
    trackers = open_trackers(config("trackio"), tmp_path)
    for step in range(3):
        trackers.log(LINE, step)
    trackers.summarise(LINE, 3)
    trackers.finish()
    said = [line for line in capsys.readouterr().err.splitlines() if "trackio" in line]
    assert len(said) == 1 and f"no {where}" in said[0]
    assert sum(told[0] == "log" for told in memory.told) == (4 if where == "finish" else 0)


def test_no_tracker_no_file(tmp_path: Path):
    open_trackers(config(), tmp_path).log(LINE, 1)
    assert not list(tmp_path.iterdir())


def read_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_over_a_resume(tmp_path: Path):
    """Steps that a resume makes again are there once, with their later values."""
    pytest.importorskip("tensorboard")
    trackers = open_trackers(config("tensorboard", project="p"), tmp_path)
    for step in (1, 2, 3):
        trackers.log({**LINE, "loss": step}, step)
    trackers.finish()
    trackers = open_trackers(config("tensorboard", project="p"), tmp_path, 2)
    trackers.log({**LINE, "loss": 30}, 3)
    trackers.summarise({"fit": {"step": 2}}, 3)
    trackers.finish()
    found = read_tensorboard(tmp_path / "p")
    assert found["loss"] == {1: 1, 2: 2, 3: 30}
    assert found["accuracy_per_step/2"] == {1: 0.75, 2: 0.75, 3: 0.75} and found["fit/step"] == {3: 2}


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What it has on disk."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for step in (0, 2):
        trackers = open_trackers(config("wandb", project="p", offline=True), tmp_path, step)
        assert trackers.open
        trackers.log(LINE, step + 1)
        trackers.log(LINE, step + 2)
        trackers.summarise({"fit": {"step": 2}}, step + 2)
        trackers.finish()
    run_id = json.loads((tmp_path / "trackers.json").read_text())["id"]
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and all(file.name == f"run-{run_id}.wandb" for file in files)
    for file, steps in zip(files, ([1, 2], [3, 4]), strict=True):
        end_s = time.monotonic() + 20  # another process writes it
        while len(read_wandb(file)[0]) < 2 and time.monotonic() < end_s:
            time.sleep(0.2)
        history, summary = read_wandb(file)
        assert [line["_step"] for line in history] == steps
        assert all({name: line[name] for name in FLAT} == FLAT for line in history)
        assert summary["fit/step"] == 2


def read_wandb(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    history, summary = [], {}
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            history.append(_items(record.history.item) | {"_step": record.history.step.num})
        elif record.WhichOneof("record_type") == "summary":
            summary |= _items(record.summary.update)
    return history, summary


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, which wandb keeps behind seven bytes of its own: in blocks of 32 KiB,
    each piece with a checksum, its length and whether it is whole (1), or the first, a middle or the last one (2-4).
    """
    position, block, parts = 7, 1 << 15, b""
    while position + 7 <= len(content):
        if block - position % block < 7:
            position += block - position % block
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_the_id_belongs_to_the_training(tmp_path: Path):
    from spectrain.stages.run_dir import STAGES

    assert module.TRACKERS_FILE in next(stage.outputs for stage in STAGES if stage.name == "fit")
