"""Checkpoints: weights and optimiser state come back bit for bit, a kill leaves the one before, another model's are
refused.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_tools import Options, packed, random_documents, random_drafter, tensors_of

from spectrain import files
from spectrain.config.trainer_schema import TrainerConfig
from spectrain.drafters.autoregressive.eagle3 import Eagle3
from spectrain.errors import InputError
from spectrain.training import checkpointing
from spectrain.training.checkpointing import TrainingState, load_checkpoint, newest_checkpoint, save_checkpoint
from spectrain.training.optim import build_optimizers

OPTIONS = Options(reduced=True)


class Training:
    """A drafter with optimisers, and steps that need nothing else."""

    def __init__(self, optimizer: str = "adamw", options: Options = OPTIONS, seed: int = 0) -> None:
        self.drafter: Eagle3 = random_drafter(options, seed=seed, dtype=torch.float32)
        self.optimizers = build_optimizers(self.drafter, TrainerConfig(optimizer=optimizer, weight_decay=0.01))
        documents = random_documents(options)
        self.batch = packed(documents)
        self.batch.taps_TAH, self.batch.last_hidden_TH = self.batch.taps_TAH.float(), self.batch.last_hidden_TH.float()

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self.drafter.train_losses(self.batch).loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def save(self, folder: Path, step: int, keep: int = 2, **state: Any) -> Path:
        tensors = TrainingState.of(self.drafter, self.optimizers)
        return save_checkpoint(folder, tensors, {"step": step, **state}, keep)

    def load(self, folder: Path) -> dict[str, Any] | None:
        return load_checkpoint(folder, self.drafter, self.optimizers)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in tensors_of(self.drafter).items()}

    def moments(self) -> dict[tuple[int, str, str], torch.Tensor]:
        names = {id(p): name for name, p in tensors_of(self.drafter).items()}
        return {
            (number, names[id(p)], key): value.clone()
            for number, optimizer in enumerate(self.optimizers)
            for p, state in optimizer.state.items()
            for key, value in state.items()
        }


def assert_same_bits(one: dict[Any, torch.Tensor], two: dict[Any, torch.Tensor]) -> None:
    assert set(one) == set(two) and one
    for name in one:
        assert one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_restored_training_goes_on_with_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    whole, killed, resumed = Training(optimizer), Training(optimizer), Training(optimizer, seed=7)
    killed.step(3)
    killed.save(tmp_path, 3, best={"step": 2, "acceptance_length": 1.5})
    assert resumed.load(tmp_path) == {"step": 3, "best": {"step": 2, "acceptance_length": 1.5}}
    assert_same_bits(resumed.weights(), killed.weights())
    assert_same_bits(resumed.moments(), killed.moments())
    resumed.step(2)
    whole.step(5)
    assert_same_bits(resumed.weights(), whole.weights())
    assert_same_bits(resumed.moments(), whole.moments())


def test_a_frozen_head_is_kept_too(tmp_path: Path) -> None:
    """It has no moments, but its weights belong to the drafter."""
    trainings = [Training(seed=seed) for seed in (0, 7)]
    for training in trainings:
        tensors_of(training.drafter)["lm_head.weight"].requires_grad_(False)
        training.optimizers = build_optimizers(training.drafter, TrainerConfig())
    head = trainings[0].weights()["lm_head.weight"]
    trainings[0].step()
    trainings[0].save(tmp_path, 1)
    trainings[1].load(tmp_path)
    for training in trainings:
        training.step()
        assert torch.equal(training.weights()["lm_head.weight"], head)
    assert_same_bits(trainings[0].weights(), trainings[1].weights())
    assert not any("lm_head" in name for _, name, _ in trainings[1].moments())


def test_without_a_checkpoint_nothing_happens(tmp_path: Path) -> None:
    training = Training()
    before = training.weights()
    assert training.load(tmp_path / "none") is None
    assert_same_bits(training.weights(), before)


def test_only_the_newest_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    training = Training()
    for step in (5, 9, 100):
        training.step()
        training.save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000100"]
    state = Training().load(tmp_path)
    assert state is not None and state["step"] == 100


def test_only_safetensors_and_json_are_written(tmp_path: Path) -> None:
    training = Training("muon")
    training.step()
    assert {path.suffix for path in training.save(tmp_path, 1).iterdir()} == {".safetensors", ".json"}


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_kill_while_writing_leaves_the_checkpoint_before(
    tmp_path: Path, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at the first flush, at a later one, or at the rename: step 1 is what is found."""
    training = Training()
    training.step()
    training.save(tmp_path, 1)
    good = training.weights()
    training.step()
    left = [call]

    def die(*_: Any) -> None:
        if left[0] == 0 or call == 2:
            raise Killed
        left[0] -= 1

    monkeypatch.setattr(files.os, "replace" if call == 2 else "fsync", die)
    with pytest.raises(Killed):
        training.save(tmp_path, 2)
    monkeypatch.undo()
    other = Training(seed=3)
    state = other.load(tmp_path)
    assert state is not None and state["step"] == 1
    assert_same_bits(other.weights(), good)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]  # leftovers are gone


def test_a_kill_while_a_checkpoint_of_the_same_step_is_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    training.step()
    training.save(tmp_path, 1)
    moved: list[Any] = []

    def replace(source: Path, target: Path) -> None:
        if moved:
            raise Killed
        moved.append(Path(source).rename(target))

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(Killed):
        training.save(tmp_path, 1)
    monkeypatch.undo()
    state = Training(seed=3).load(tmp_path)
    assert state is not None and state["step"] == 1


def test_another_drafters_state_is_refused(tmp_path: Path) -> None:
    training = Training()
    training.step()
    training.save(tmp_path, 1)
    for options in (Options(), Options(reduced=True, taps=(1,)), Options(reduced=True, num_layers=2)):
        with pytest.raises(InputError, match="another drafter") as error:
            Training(options=options).load(tmp_path)
        assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(("written", "read"), [("muon", "adamw"), ("adamw", "muon")])
def test_another_optimisers_state_is_refused(tmp_path: Path, written: str, read: str) -> None:
    training = Training(written)
    training.step()
    training.save(tmp_path, 1)
    with pytest.raises(InputError, match="another optimiser"):
        Training(read).load(tmp_path)


def flip(path: Path, byte: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "model missing": lambda path: (path / "model.safetensors").unlink(),
    "state missing": lambda path: (path / "state.json").unlink(),
    "model empty": lambda path: (path / "model.safetensors").write_bytes(b""),
    "optimizer cut": lambda path: os.truncate(path / "optimizer.safetensors", 200),
    "a weight flipped": lambda path: flip(path / "model.safetensors"),
    "a moment flipped": lambda path: flip(path / "optimizer.safetensors"),
    "a header flipped": lambda path: flip(path / "optimizer.safetensors", 40),
    "state no JSON": lambda path: (path / "state.json").write_text("{"),
    "state of another type": lambda path: (path / "state.json").write_text("[1]"),
    "another step noted": lambda path: edit(path, step=1),
    "another best noted": lambda path: edit(path, best={"step": 1, "acceptance_length": 99.0}),
    "no digests": lambda path: (path / "state.json").write_text('{"step": 9}'),
    "nothing in it": lambda path: [file.unlink() for file in path.iterdir()],
}


def edit(path: Path, **values: Any) -> None:
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | values))


@pytest.mark.parametrize("damage", DAMAGE)
def test_of_a_damaged_checkpoint_the_one_before_is_taken_and_nothing_is_removed(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training()
    training.step()
    training.save(tmp_path, 8)
    good = training.weights(), training.moments()
    training.step()
    bad = training.save(tmp_path, 9)
    DAMAGE[damage](bad)
    left = {file.name: file.read_bytes() for file in bad.iterdir()}
    other = Training(seed=3)
    state = other.load(tmp_path)
    assert state is not None and state["step"] == 8
    assert_same_bits(other.weights(), good[0])
    assert_same_bits(other.moments(), good[1])
    assert f"{bad} is damaged (" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in bad.iterdir()} == left


def test_where_no_checkpoint_is_whole_training_starts_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    training.step()
    for step in (8, 9):
        flip(training.save(tmp_path, step) / "model.safetensors")
    other = Training(seed=3)
    before = other.weights()
    assert newest_checkpoint(tmp_path) is None  # so the drafter is initialised
    assert other.load(tmp_path) is None
    assert_same_bits(other.weights(), before)
    assert "training starts anew" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("stray", ["empty", "a copy", "a file"])
def test_a_stray_checkpoint_is_passed_over_and_displaces_none(tmp_path: Path, stray: str) -> None:
    training = Training()
    training.step()
    path = training.save(tmp_path, 9, keep=1)
    other = tmp_path / "step-99999999"
    {"empty": other.mkdir, "a copy": lambda: shutil.copytree(path, other), "a file": other.touch}[stray]()
    state = Training(seed=3).load(tmp_path)
    assert state is not None and state["step"] == 9
    training.save(tmp_path, 10, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-99999999"]


@pytest.mark.parametrize("call", [0, 1])
def test_a_kill_while_checkpoints_are_pruned_leaves_none_too_many(
    tmp_path: Path, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the old one is renamed, or before it is removed under its new name."""
    training = Training()
    training.step()
    for step in (1, 2):
        training.save(tmp_path, step)

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "remove", die) if call == 0 else patch.setattr(files, "sync", dying_at_last())
        with pytest.raises(Killed):
            training.save(tmp_path, 3)
    resumed = Training(seed=3)
    state = resumed.load(tmp_path)
    assert state is not None and state["step"] == 3
    checkpointing.prune_checkpoints(tmp_path, 3, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def dying_at_last() -> Any:
    """``sync`` that dies where a folder was just renamed to be removed."""
    sync = files.sync

    def run(path: Path) -> None:
        if any(path.glob(".*.removed")):
            raise Killed
        sync(path)

    return run
