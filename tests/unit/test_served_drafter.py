"""Evaluations of training run in the type that is served; what is trained and stored stays float32."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_tools import DSPARK, random_block_drafter
from drafter_tools import MemoryStore, Options, as_dtype, make_trainer, random_documents, random_drafter, trainer_config
from safetensors.torch import load_file

from spectrain import signals
from spectrain.config.evaluation_schema import DecodingConfig
from spectrain.drafters.drafter import Drafter
from spectrain.training.simulated_acceptance import simulate_heldout

OPTIONS = Options(reduced=True, layer_type="qwen3")
SAMPLED = DecodingConfig(temperature=1.0, proposal_policy="sample", num_speculative_tokens=2)
KINDS = ("eagle3", "dspark")


def fresh(kind: str) -> Drafter:
    if kind == "eagle3":
        return random_drafter(OPTIONS, dtype=torch.float32)
    return random_block_drafter(DSPARK, dtype=torch.float32)


def store_of(drafter: Drafter) -> MemoryStore:
    documents = [as_dtype(d, torch.float32) for d in random_documents(OPTIONS, drafter.head)]
    return MemoryStore(documents + [replace(d, split="heldout", key=f"held-{d.key}") for d in documents])


def train(folder: Path, drafter: Drafter, dtype: torch.dtype) -> list[dict[str, Any]]:
    config = trainer_config(SAMPLED, packed_length=64, epochs=2, warmup_fraction=0.0)
    make_trainer(folder, drafter, store_of(drafter), config, serving_dtype=dtype).fit()  # type: ignore[arg-type]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def by_length(lines: list[dict[str, Any]]) -> list[list[float]]:
    """Of every evaluation, the acceptance length in expectation for each number of drafts."""
    return [list(line[name].values()) for line in lines if (name := "simulated_acceptance_length_by_n") in line]


def simulated(drafter: Drafter) -> list[float]:
    store = store_of(drafter)
    heldout = store.indices("heldout")
    return simulate_heldout(drafter.eval(), store, heldout, SAMPLED, (), 64, drafter.training_steps).length_by_n


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_is_that_of_the_drafter_in_16_bits(kind: str, tmp_path: Path) -> None:
    first = copy.deepcopy(fresh(kind)).to(torch.bfloat16)
    found, trained = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        drafter = fresh(kind)
        lines = train(tmp_path / str(dtype), drafter, dtype)
        found[dtype], trained[dtype] = by_length(lines), {n: p.detach().clone() for n, p in drafter.named_parameters()}
        losses = [line["loss"] for line in lines if "loss" in line]
        assert len(found[dtype]) == 3 and len(losses) >= 2
    # The first evaluation, before any step, and the last one, of what has been trained.
    assert found[torch.bfloat16][0] == simulated(first)
    assert found[torch.bfloat16][-1] == simulated(drafter.to(torch.bfloat16))
    assert found[torch.bfloat16][0] != found[torch.float32][0]
    assert found[torch.bfloat16][0] == pytest.approx(found[torch.float32][0], rel=0.05)
    # It has moved nothing else.
    torch.testing.assert_close(trained[torch.bfloat16], trained[torch.float32], rtol=0, atol=0)
    stored = load_file(tmp_path / "torch.bfloat16/drafter/model.safetensors")
    assert all(tensor.dtype != torch.bfloat16 for tensor in stored.values())


def test_in_float32_there_is_no_copy(tmp_path: Path) -> None:
    drafter = fresh("eagle3")
    served = make_trainer(tmp_path, drafter, store_of(drafter), trainer_config()).served
    with served.like(drafter) as same:
        assert same is drafter and not drafter.training
    assert drafter.training


def test_a_rank_that_is_asked_to_stop_breaks_the_evaluation_off_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = fresh("eagle3")
    monkeypatch.setattr(signals, "asked", iter([0, 15]).__next__)
    seen: list[float] = []
    store = store_of(drafter)
    with pytest.raises(signals.StopAsked):
        simulate_heldout(drafter, store, store.indices("heldout"), SAMPLED, (), 16, advance=seen.append)
    assert len(seen) == 1
