"""Copies ahead of the device's work. There is no GPU here, so a device is played by a list of what its streams were
told: what runs on which stream, who waits for whom, and who says that it reads a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from drafter_tools import MemoryStore, make_trainer, random_document, random_drafter, trainer_config
from loader_sources import BROKEN, Breaking
from test_loader import CPU, OPTIONS, assert_same, requests, store_in

from spectrain.data.device_copies import DeviceBatches
from spectrain.data.loader import BatchLoader, BatchRequest
from spectrain.data.packing import PackedBatch
from spectrain.errors import RunError
from spectrain.training.step_sums import SumsOverRanks

GPU = torch.device("cuda", 0)


class Streams:
    """``told``: what the device was told, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.running = "computing"
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, "copying"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, self.running))
        monkeypatch.setattr(torch.cuda, "stream", self.inside)
        monkeypatch.setattr(PackedBatch, "to", lambda batch, device: self.copied(batch, device))
        monkeypatch.setattr(PackedBatch, "used_on", lambda batch, stream: self.used(stream))
        self.batches = 0

    @contextmanager
    def inside(self, stream: Stream) -> Iterator[None]:
        self.running, before = stream.name, self.running
        try:
            yield
        finally:
            self.running = before

    def copied(self, batch: PackedBatch, device: torch.device) -> PackedBatch:
        assert device == GPU
        self.told.append(f"{self.running}: copy {self.batches}")
        self.batches += 1
        return batch

    def used(self, stream: Stream) -> None:
        self.told.append(f"{stream.name} uses")


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: Stream) -> None:
        self.streams.told.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def loader_of(folder: Path, asked: list[BatchRequest]) -> BatchLoader:
    return BatchLoader(store_in(folder), iter(asked), CPU)


def test_the_next_batch_is_copied_while_this_one_is_worked_on(tmp_path: Path, streams: Streams) -> None:
    with DeviceBatches(loader_of(tmp_path, requests(3)), GPU) as batches:
        for number, _ in enumerate(batches):
            streams.told.append(f"computing: step {number}")
            batches.copy_next()
            batches.copy_next()  # it has begun
    waits = ["computing waits for copying", "computing uses"]
    assert streams.told == [
        *("copying: copy 0", *waits, "computing: step 0", "copying: copy 1"),
        *(*waits, "computing: step 1", "copying: copy 2"),
        *(*waits, "computing: step 2"),
    ]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("device", [GPU, CPU])
def test_batches_are_the_loaders(
    tmp_path: Path, streams: Streams, device: torch.device, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == CPU:
        monkeypatch.undo()  # nothing is played
    expected = list(loader_of(tmp_path / "expected", requests()))
    found = []
    with DeviceBatches(loader_of(tmp_path / "found", requests()), device) as batches:
        for batch in batches:
            found.append(batch)
            if ahead:
                batches.copy_next()
    assert len(found) == len(expected) == 9
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


def test_a_document_that_cannot_be_read_is_an_error_in_its_turn(tmp_path: Path, streams: Streams) -> None:
    """What was made before it is trained on first, as without copies ahead."""
    store_in(tmp_path)
    source = Breaking(tmp_path)
    source.error = OSError("the disk is gone")
    asked = [BatchRequest((number,), 7) for number in (0, BROKEN)]
    with DeviceBatches(BatchLoader(source, iter(asked), CPU), GPU) as batches:
        next(batches)
        batches.copy_next()
        with pytest.raises(RunError, match="the disk is gone"):
            next(batches)


def test_the_trainer_lets_the_next_batch_come_before_it_reads_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which waits for the device."""
    events: list[str] = []
    drafter = random_drafter(OPTIONS)
    texts = [random_document("0001111", 3, i, drafter.head) for i in range(4)]
    config = trainer_config(packed_length=7, gradient_accumulation=2)
    trainer = make_trainer(tmp_path, drafter, MemoryStore(texts), config)
    read, backward = SumsOverRanks.read, trainer.strategy.backward
    monkeypatch.setattr(DeviceBatches, "copy_next", lambda batches: events.append("copy"))
    monkeypatch.setattr(trainer.strategy, "backward", lambda *given: (events.append("backward"), backward(*given)))
    monkeypatch.setattr(SumsOverRanks, "read", lambda sums, *given: (events.append("read"), read(sums, *given))[1])
    with trainer._batches(0) as batches:
        trainer._step(0, batches)
    assert events == ["backward", "copy", "backward", "copy", "read"]
