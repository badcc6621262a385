"""Dimensions that conf/target holds, and parameters counted from dimensions, beside transformers' own models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_config
from transformers import AutoModelForCausalLM

from spectrain.config.folders import group_options
from spectrain.config.loading import compose
from spectrain.stages.plan import active_parameters, target_parameters
from spectrain.target.resolve import known_dimensions
from spectrain.target.spec import TargetSpec

# Parameters as the model cards give them, in billions.
CARDS = {"qwen3_8b": 8.2, "qwen3_4b": 4.0, "smollm2_135m": 0.135}


@pytest.mark.parametrize("name", sorted({*group_options("target")} - {"local"}))
def test_a_target_that_ships_has_dimensions(name: str) -> None:
    target = compose([f"target={name}", "data=support"]).target
    fields = known_dimensions(target)
    assert fields is not None and len(target.dimensions["revision"]) == 40
    spec = TargetSpec.from_fields(fields, target.path)
    assert (spec.dtype, spec.hybrid) == (torch.bfloat16, False)
    assert target_parameters(spec) / 1e9 == pytest.approx(CARDS[name], rel=0.02)


def test_dimensions_are_of_one_target() -> None:
    assert known_dimensions(compose(["target=qwen3_8b", "target.path=Qwen/Qwen3-14B"]).target) is None


def entries(config: Any) -> dict[str, int]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: p.numel() for name, p in model.named_parameters() if p.ndim > 1}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe"])
def test_experts_are_counted(family: str) -> None:
    """All of them for memory; for work those that a token meets, two of four."""
    config = tiny_config(family)
    spec, found = TargetSpec.from_config(config), entries(config)
    assert target_parameters(spec) == pytest.approx(sum(found.values()), rel=0.01)
    routed = sum(n for name, n in found.items() if ".experts." in name)
    assert active_parameters(spec) == pytest.approx(sum(found.values()) - routed / 2, rel=0.01)
    assert bool(routed) == (spec.experts is not None)
