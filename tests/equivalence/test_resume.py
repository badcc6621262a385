"""Killed and resumed training = uninterrupted training, bit for bit: weights, optimiser state, metrics, best
drafter.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_tools import Options, fit, random_document, random_drafter, trainer_config, write_store

from spectrain.config.evaluation_schema import DecodingConfig
from spectrain.config.schema import SpectrainConfig
from spectrain.data.hidden_states import StoredHiddenStates, TargetStates

OPTIONS = Options(reduced=True)
TIMINGS = ("tokens_per_s", "data_wait_share", "simulation_s")


def settings(optimizer: str) -> SpectrainConfig:
    """Checkpoints and evaluations at different steps, so that a resume repeats some evaluations and not others."""
    return trainer_config(
        DecodingConfig(temperature=1.0, proposal_policy="sample", num_speculative_tokens=2),
        optimizer=optimizer,
        epochs=5,
        packed_length=14,
        micro_batch_size=2,
        gradient_accumulation=2,
        checkpoint_every_steps=3,
        eval_every_steps=4,
        learning_rate=3e-3,
        muon_learning_rate=3e-3,
        weight_decay=0.01,
        schedule="wsd",
        keep_checkpoints=2,
    )


def store_in(folder: Path) -> StoredHiddenStates:
    if not folder.exists():
        masks = ["0" * (1 + i % 4) + "1" * (3 + (5 * i) % 8) for i in range(24)]
        head = random_drafter(OPTIONS).head
        splits = ["heldout" if i % 6 == 5 else "train" for i in range(24)]
        documents = [
            random_document(m, 3, i, head, split=s) for i, (m, s) in enumerate(zip(masks, splits, strict=True))
        ]
        write_store(folder, documents, OPTIONS.taps)
    return StoredHiddenStates(folder)


def train(folder: Path, store: Any, optimizer: str) -> None:
    fit(folder, random_drafter(OPTIONS, dtype=torch.float32), store, settings(optimizer))


def everything(folder: Path) -> dict[str, Any]:
    """All that a training leaves: file contents, and the metrics without what a clock measured."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    lines = [json.loads(line) for line in files.pop("metrics.jsonl").decode().splitlines()]
    return files | {"metrics": [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]}


def assert_same(found: Path, expected: Path) -> None:
    ours, theirs = everything(found), everything(expected)
    assert set(ours) == set(theirs)
    different = [name for name in ours if ours[name] != theirs[name]]
    assert different == []
    assert {"drafter/config.json", "drafter/model.safetensors"} < set(ours)
    assert sum(name.endswith("optimizer.safetensors") for name in ours) == 2
    assert len([line for line in ours["metrics"] if "loss" in line]) >= 15


class Killed(BaseException):
    """Stands for a signal that nothing handles."""


class DyingStore:
    """A store that kills whoever reads it, at the ``is_alive``-th read."""

    def __init__(self, store: StoredHiddenStates, is_alive: int) -> None:
        self._store = store
        self._lives = is_alive

    def __getitem__(self, index: int) -> TargetStates:
        if self._lives == 0:
            raise Killed
        self._lives -= 1
        return self._store[index]

    def as_stored(self, index: int) -> TargetStates:
        return self[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.slow
def test_killed_anywhere_and_resumed(tmp_path: Path, optimizer: str) -> None:
    store = store_in(tmp_path / "hidden_states")
    train(tmp_path / "whole", store, optimizer)
    kills = 0
    for is_alive in (
        1,
        21,
        26,
        19,
        24,
        22,
        20,
        10_000,
    ):  # the first before any step is done, others in steps and in evaluations
        try:
            train(tmp_path / "killed", DyingStore(store, is_alive), optimizer)
        except Killed:
            kills += 1
            if kills > 1:
                with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
                    file.write('{"step": 99, "loss"')  # and while a line was being written
    assert kills >= 6
    assert_same(tmp_path / "killed", tmp_path / "whole")


def test_a_finished_training_changes_nothing_when_run_again(tmp_path: Path) -> None:
    store = store_in(tmp_path / "hidden_states")
    train(tmp_path / "run", store, "adamw")
    before = everything(tmp_path / "run")
    train(tmp_path / "run", store, "adamw")
    assert everything(tmp_path / "run") == before


@pytest.mark.slow
def test_sigkill_at_a_random_moment(tmp_path: Path) -> None:
    store = store_in(tmp_path / "hidden_states")
    train(tmp_path / "whole", store, "muon")
    steps = len((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines())
    seed = time.time_ns()
    rng = random.Random(seed)
    wanted, delay_s = rng.randint(1, steps - 1), rng.random() * 0.1
    metrics = tmp_path / "killed" / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_text().count("\n") >= wanted:
                break
            time.sleep(0.002)
        time.sleep(delay_s)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert metrics.exists()
    train(tmp_path / "killed", store, "muon")
    print(f"seed {seed}: killed after {wanted} lines and {delay_s:.3f} s")  # noqa: T201 (shown when what follows fails)
    assert_same(tmp_path / "killed", tmp_path / "whole")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]) / "killed", store_in(Path(sys.argv[1]) / "hidden_states"), "muon")
