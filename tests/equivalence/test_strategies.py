"""One rank, two, micro-batches, FSDP2, ZeRO 1 to 3: the same training, step by step, for both shapes of drafter; and
each goes on from the checkpoint of another.

In float32, which is what sharding engines take: numbers differ by rounding.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_tools import MemoryStore, make_trainer, trainer_config
from safetensors.torch import load_file
from torch import Tensor
from two_ranks import METHODS, RESUMED_AT, SETTINGS, documents, fresh_drafter, two_ranks

pytest.importorskip("deepspeed", reason="zero1 to zero3 need DeepSpeed: make deepspeed")
pytestmark = pytest.mark.slow

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
CHECKPOINTED = ("fsdp2+", "zero3+")  # where backward gathers layers that run again
RESUMED = ("ddp:fsdp2", "fsdp2:zero3", "zero3:zero1", "zero1:zero2", "zero2:ddp")
SAME = {"rtol": 2e-4, "atol": 2e-6}


def train_alone(folder: Path, method: str, **settings: Any) -> None:
    drafter = fresh_drafter(method, torch.float32)
    config = trainer_config(**{**SETTINGS, "gradient_accumulation": 4, **settings})
    make_trainer(folder, drafter, MemoryStore(documents(drafter.head)), config).fit()


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``HOW/METHOD`` for every way of training."""
    folder = tmp_path_factory.mktemp("strategies")
    with two_ranks(folder, *STRATEGIES, *CHECKPOINTED, *RESUMED) as said:
        for method in METHODS:
            train_alone(folder / "one rank" / method, method, micro_batch_size=4, gradient_accumulation=1)
            train_alone(folder / "four micro-batches" / method, method)
    assert not any("Traceback" in words for words in said)
    return folder


def table(folder: Path, method: str, ways: list[str]) -> str:
    """A row a step: loss and norm of the gradient under each way of training."""
    rows = [f"{method}: loss / norm of the gradient", "step  " + "".join(f"{way:>22}" for way in ways)]
    for numbers in zip(*(steps(folder / way / method) for way in ways), strict=True):
        cells = "".join(f"{line['loss']:>13.6f} {line['gradient_norm']:>8.5f}" for line in numbers)
        rows.append(f"{numbers[0]['step']:>4}  {cells}")
    return "\n".join(rows)


@pytest.mark.parametrize("method", METHODS)
def test_all_strategies_are_one(trained: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    ways = ["one rank", "four micro-batches", *STRATEGIES, *CHECKPOINTED]
    with capsys.disabled():
        print("\n" + table(trained, method, ways))  # noqa: T201 (what the test is for)
    expected = steps(trained / "one rank" / method)
    assert len(expected) >= 5
    assert max(line["gradient_norm"] for line in expected) > SETTINGS["max_grad_norm"]  # so some are clipped
    for way in ways[1:]:
        for found, line in zip(steps(trained / way / method), expected, strict=True):
            for name in ("loss", "gradient_norm", "positions", "epoch", "lr"):
                assert found[name] == pytest.approx(line[name], rel=2e-4), (way, line["step"], name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", [*STRATEGIES[1:], *RESUMED])
def test_weights_moments_and_the_drafters_folder_are_whole(trained: Path, method: str, way: str) -> None:
    """As those of data parallelism, on both ranks, whatever each held."""
    folder, expected = trained / way / method, trained / "ddp" / method
    first, second = (load_file(folder / f"weights-{rank}.safetensors") for rank in range(2))
    torch.testing.assert_close(first, load_file(expected / "weights-0.safetensors"), **SAME)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for file in ("model", "optimizer"):
        last = max((expected / "checkpoints").iterdir()).name
        found, wanted = (load_file(where / f"checkpoints/{last}/{file}.safetensors") for where in (folder, expected))
        assert set(found) == set(wanted)
        torch.testing.assert_close(found, wanted, **SAME)
        assert not any(math.isnan(float(tensor.sum())) for tensor in found.values())
    if way in STRATEGIES:  # resumed runs begin after the best one may have been found
        best: dict[str, Tensor] = load_file(folder / "drafter/model.safetensors")
        torch.testing.assert_close(best, load_file(expected / "drafter/model.safetensors"), **SAME)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", RESUMED)
def test_another_strategy_goes_on_from_a_checkpoint(trained: Path, method: str, way: str) -> None:
    found, expected = steps(trained / way / method), steps(trained / "ddp" / method)[RESUMED_AT:]
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, wanted in zip(found, expected, strict=True):
        for name in ("loss", "gradient_norm", "positions", "epoch"):
            assert line[name] == pytest.approx(wanted[name], rel=2e-4), (way, name)


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_goes_on_from_shards(trained: Path, method: str, tmp_path: Path) -> None:
    name = f"checkpoints/step-{RESUMED_AT:08d}"
    for kept in (name, "drafter"):
        shutil.copytree(trained / "zero3" / method / kept, tmp_path / kept)
    train_alone(tmp_path, method)
    for line, wanted in zip(steps(tmp_path), steps(trained / "ddp" / method)[RESUMED_AT:], strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=2e-4)
