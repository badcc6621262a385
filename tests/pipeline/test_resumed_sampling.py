"""A sampled generation that is interrupted and resumed draws the tokens of one that was not.

Logits depend on the batch in their last bits only, so here the target's states are made to depend on it grossly: any
change of company changes the answer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from workplace import make

import spectrain.stages.generate
from spectrain import cli
from spectrain.data.responses import ResponseStore
from spectrain.engines import hf


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """22 conversations, in groups of 8."""
    found = make(tmp_path_factory.mktemp("workplace"))
    replaced = ("sampling.temperature=", "engine.batch_size=")
    return [
        *(argument for argument in found if not argument.startswith(replaced)),
        *("sampling.temperature=1", "engine.batch_size=2"),
    ]


class Company:
    """Disturbs states by who else is in the batch; interrupts before the ``stop_at``-th draw (0: never)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: int = 0) -> None:
        self.draws = 0
        self.stop_at = stop_at
        real = hf.ResponseGenerator._draw

        def draw(generator: hf.ResponseGenerator, rows: list[hf.DrawnDialogue], last_hidden_BH: torch.Tensor) -> None:
            self.draws += 1
            if self.draws == self.stop_at:
                raise KeyboardInterrupt
            real(generator, rows, last_hidden_BH.roll(sum(len(row.ids) for row in rows) % 7, -1))

        monkeypatch.setattr(hf.ResponseGenerator, "_draw", draw)


def documents(path: Path) -> dict[str, list[int]]:
    return {response.key: response.input_ids.tolist() for response in ResponseStore(path / "responses").load()}


def test_an_interrupted_run_ends_like_an_undisturbed_one(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spectrain.stages.generate, "_PART_S", 1e9)  # only an end or an interruption stores
    with monkeypatch.context() as patch:
        whole = Company(patch)
        assert cli.main(["generate", *arguments, f"run.dir={tmp_path / 'whole'}"]) == 0
    expected = documents(tmp_path / "whole")
    assert len({key.partition("-")[0] for key in expected}) == 22
    stored = [0]
    path = tmp_path / "stopped"
    for stop_at in (whole.draws // 2, whole.draws // 3, 3, 0):
        with monkeypatch.context() as patch:
            Company(patch, stop_at)
            code = cli.main(["generate", *arguments, f"run.dir={path}"])
        assert (code == 0) == (stop_at == 0)
        stored.append(sum("-" not in key for key in documents(path)))
    assert documents(path) == expected
    assert stored == sorted(stored) and len(set(stored)) >= 3
    assert all(count % 8 == 0 for count in stored[:-1])  # groups are whole or missing


def test_the_company_matters_here(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without groups a resumed run would end otherwise."""
    found = []
    for size in (2, 3):
        with monkeypatch.context() as patch:
            Company(patch)
            path = tmp_path / str(size)
            assert cli.main(["generate", *arguments, f"engine.batch_size={size}", f"run.dir={path}"]) == 0
        found.append(documents(path))
    assert found[0] != found[1]
