"""Checkpoints are written beside training: whole or not at all, of the state at that moment, one at a time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_tools import random_drafter
from safetensors.torch import load_file

from spectrain.errors import RunError
from spectrain.training import checkpoint_writer
from spectrain.training.checkpoint_writer import CheckpointWriter
from spectrain.training.checkpointing import TrainingState, damage, save_checkpoint


def facts(step: int, extra: bool = False) -> dict[str, Any]:
    return {"step": step, "extra": extra}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_training_goes_on_while_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Path:
        begun.set()
        assert may_end.wait(60)
        return save_checkpoint(*arguments)

    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", slow)
    drafter, writer = random_drafter(), CheckpointWriter(tmp_path, keep=2)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    writer.start(TrainingState.of(drafter, []), facts(1))
    assert begun.wait(60)
    with torch.no_grad():  # the next step
        for parameter in drafter.parameters():
            parameter.add_(1.0)
    assert names(tmp_path) == []
    may_end.set()
    writer.finish()
    assert names(tmp_path) == ["step-00000001"] and damage(tmp_path / "step-00000001") is None
    written = load_file(tmp_path / "step-00000001/model.safetensors")
    assert all(torch.equal(written[name], before[name]) for name in before)


def test_what_could_not_be_written_is_said_by_whoever_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Path:
        raise RunError("the disk is full")

    state, writer = TrainingState.of(random_drafter(), []), CheckpointWriter(tmp_path, keep=2)
    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", full)
    writer.start(state, facts(1))
    with pytest.raises(RunError, match="full"):
        writer.start(state, facts(2))
    writer.finish()  # said once
    writer.start(state, facts(3))
    with pytest.raises(RunError, match="full"):
        writer.finish()


def test_the_one_of_a_signal_takes_no_place_of_those_that_are_due(tmp_path: Path) -> None:
    state, writer = TrainingState.of(random_drafter(), []), CheckpointWriter(tmp_path, keep=2)
    for step, extra in ((2, False), (4, False), (5, True)):
        writer.start(state, facts(step, extra))
    writer.finish()
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    again = CheckpointWriter(tmp_path, keep=2)
    again.goes_on_from(5, is_extra=True)
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    again.start(state, facts(6))
    again.finish()
    assert names(tmp_path) == ["step-00000004", "step-00000006"]
