"""The loader: the same batches and weights whoever makes them, and every failure as one of our errors."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from drafter_tools import (
    MemoryStore,
    Options,
    fit,
    make_trainer,
    random_document,
    random_drafter,
    tensors_of,
    trainer_config,
    write_store,
)
from loader_sources import BROKEN, Breaking, Dying
from torch import Tensor

from spectrain.data.hidden_states import StoredHiddenStates, TargetStates
from spectrain.data.loader import BatchLoader, BatchRequest
from spectrain.data.packing import Draw, PackedBatch, pack_batch
from spectrain.data.state_types import STATE_DTYPES
from spectrain.errors import InputError, RunError

OPTIONS = Options(reduced=True)
CPU = torch.device("cpu")


def documents(count: int = 12) -> list[TargetStates]:
    masks = ["0" * (1 + i % 4) + "1" * (3 + (5 * i) % 8) for i in range(count)]
    head = random_drafter(OPTIONS).head
    return [random_document(m, 3, i, head, split="heldout" if i % 6 == 5 else "train") for i, m in enumerate(masks)]


def store_in(folder: Path) -> StoredHiddenStates:
    return write_store(folder, documents(), OPTIONS.taps)


def requests(count: int = 9) -> list[BatchRequest]:
    numbers = [tuple((3 * i + j) % 12 for j in range(1 + i % 3)) for i in range(count)]
    return [BatchRequest(documents, 7, Draw(0, step, documents, 7)) for step, documents in enumerate(numbers)]


def assert_same(found: PackedBatch, expected: PackedBatch) -> None:
    for field in fields(PackedBatch):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, Tensor):
            assert ours.dtype == theirs.dtype, field.name
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert ours == theirs, field.name


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_are_those_of_their_requests_in_order(tmp_path: Path, workers: int) -> None:
    store = store_in(tmp_path)
    store[0]  # its map is open, and must not travel
    expected = [pack_batch([store[d] for d in r.documents], r.max_tokens, r.draw) for r in requests()]
    with BatchLoader(store, iter(requests()), CPU, workers, prefetch=1) as loader:
        found = list(loader)
    assert loader.waited_s > 0
    assert len(found) == len(expected) == 9
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", ["int8", "int8_grouped", "float8_e4m3"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.slow
def test_8_bits_travel_as_they_are_and_become_what_a_reader_sees(tmp_path: Path, workers: int, dtype: str) -> None:
    store = write_store(tmp_path, documents(), OPTIONS.taps, dtype)
    expected = [pack_batch([store[d] for d in r.documents], r.max_tokens, r.draw) for r in requests()]
    with BatchLoader(store, iter(requests()), CPU, workers) as loader:
        for batch, theirs in zip(loader, expected, strict=True):
            assert batch.taps_TAH.dtype == batch.last_hidden_TH.dtype == STATE_DTYPES[dtype]
            assert batch.taps_TAH.element_size() == 1
            assert theirs.taps_TAH.dtype == torch.float32
            assert_same(batch.to(CPU), theirs)


@pytest.mark.slow
def test_workers_train_the_same_drafter_to_the_bit(tmp_path: Path) -> None:
    store, trained = store_in(tmp_path / "hidden_states"), []
    for workers in (0, 1, 2):
        drafter = random_drafter(OPTIONS, dtype=torch.float32)
        config = trainer_config(
            packed_length=14, epochs=2, gradient_accumulation=2, learning_rate=1e-2, loader_workers=workers
        )
        stream = torch.random.get_rng_state()
        fit(tmp_path / str(workers), drafter, store, config)
        assert torch.equal(torch.random.get_rng_state(), stream)  # a loader draws nothing from the process's stream
        trained.append({name: p.detach() for name, p in tensors_of(drafter).items()})
    for other in trained[1:]:
        assert all(torch.equal(other[name], trained[0][name]) for name in trained[0])


def test_a_resumed_training_reads_nothing_of_what_came_before(tmp_path: Path) -> None:
    """In the middle of an epoch, too."""

    class Counting(MemoryStore):
        read: list[int]

        def __getitem__(self, index: int) -> TargetStates:
            self.read.append(index)
            return super().__getitem__(index)

    config = trainer_config(packed_length=14, epochs=2)
    source = Counting([replace(d, split="train") for d in documents()])
    trainer = make_trainer(tmp_path, random_drafter(OPTIONS), source, config)
    per_epoch, middle = trainer.sampler.steps_per_epoch[0], 2
    assert per_epoch > 4
    source.read = []
    with trainer._batches(per_epoch + middle) as batches:
        next(batches)
    (wanted,) = trainer.sampler[per_epoch + middle].micro_batches
    assert source.read == [trainer.train[d] for d in wanted]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [InputError("shard-00000.safetensors is broken"), ZeroDivisionError()], ids=repr)
def test_a_document_that_cannot_be_read_is_named(tmp_path: Path, workers: int, error: Exception) -> None:
    store_in(tmp_path)
    source = Breaking(tmp_path)
    source.error = error
    single = [BatchRequest((number,), 7) for number in range(8)]
    with BatchLoader(source, single, CPU, workers) as loader:
        assert all(next(loader).num_tokens > 0 for _ in range(BROKEN))
        with pytest.raises(RunError) as raised:
            next(loader)
    assert "doc-0004" in str(raised.value) and (str(error) or "ZeroDivisionError") in str(raised.value)
    assert raised.value.exit_code == 1 and "\n" not in str(raised.value)


def test_documents_that_make_no_batch_are_named() -> None:
    short, wide = random_document("0011", 3, 0), random_document("0011", 4, 1)
    with (
        BatchLoader(MemoryStore([short, wide]), [BatchRequest((0, 1), 9)], CPU) as loader,
        pytest.raises(RunError, match="doc-0000, doc-0001"),
    ):
        next(loader)


def test_a_worker_that_is_killed_ends_the_training_with_a_reason(tmp_path: Path) -> None:
    store_in(tmp_path / "hidden_states")
    config = trainer_config(packed_length=14, epochs=1, loader_workers=2)
    with pytest.raises(RunError, match=r"worker.*died.*memory.*trainer\.loader_workers") as error:
        fit(tmp_path / "run", random_drafter(OPTIONS, dtype=torch.float32), Dying(tmp_path / "hidden_states"), config)
    assert error.value.exit_code == 1 and "\n" not in str(error.value)


def test_a_worker_that_dies_while_the_trainer_is_busy_is_told_of_too(tmp_path: Path) -> None:
    """By a signal handler, in the middle of whatever the trainer does."""
    store, others = store_in(tmp_path), set(multiprocessing.active_children())

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError("the trainer waits for a lock that nobody will release")

    def work() -> None:
        with BatchLoader(store, requests(), CPU, workers=1, prefetch=1) as loader:
            next(loader)
            (worker,) = set(multiprocessing.active_children()) - others
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            # As if it had been killed while it held the lock by which torch ends its workers.
            loader._batches._workers_done_event._cond.acquire(timeout=1)  # type: ignore[attr-defined]
            signal.alarm(10)  # from here on it takes no second
            for _ in range(1000):
                time.sleep(0.01)

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    try:
        with pytest.raises(RunError, match="died"):
            work()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_another_error_of_the_training_stays_what_it_is_and_workers_end(tmp_path: Path) -> None:
    others = multiprocessing.active_children()

    def work() -> None:
        with BatchLoader(store_in(tmp_path), requests(), CPU, workers=1) as loader:
            next(loader)
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        work()
    assert multiprocessing.active_children() == others


@pytest.mark.slow
def test_workers_know_nothing_of_the_target(tmp_path: Path) -> None:
    """A fresh process that has what a training has, and a source that says what the worker has imported."""
    store_in(tmp_path)
    program = """
        import sys, torch, spectrain.cli, spectrain.training.trainer
        from loader_sources import Listing
        from spectrain.data.loader import BatchLoader, BatchRequest
        assert "spectrain.target.head" in sys.modules
        try:
            with BatchLoader(Listing(sys.argv[1]), [BatchRequest((0,), 7)], torch.device("cpu"), workers=1) as loader:
                next(loader)
        except Exception as error:
            print(error)
    """
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    imported = set(done.stdout.split())
    ours = {name for name in imported if name.startswith("spectrain.")}
    assert "spectrain.data.loader" in ours
    light = {"console", "copies", "data", "errors", "files", "masking", "processes", "signals"}
    assert {name.split(".")[1] for name in ours} <= light
    assert not {"transformers", "accelerate"} & imported
