"""Dimensions that conf/target holds, and parameters counted from dimensions, beside transformers' own models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.config.folders import group_options
from spectrain.config.loading import compose
from spectrain.config.target_schema import TargetConfig
from spectrain.stages.target_size import active_parameters, target_bytes, target_parameters
from spectrain.target.resolve import known_dimensions
from spectrain.target.spec import TargetSpec

# Parameters as the model cards give them, in billions: (all, those that a token meets).
CARDS = {
    "smollm2_135m": (0.135, 0.135),
    "qwen3_4b": (4.0, 4.0),
    "qwen3_8b": (8.2, 8.2),
    "qwen3_14b": (14.8, 14.8),
    "qwen3_30b_a3b": (30.5, 3.3),
    "qwen3_5_27b": (27, 27),
    "qwen3_5_122b_a10b": (122, 10),
    "qwen3_6_27b": (27, 27),
    "qwen3_6_35b_a3b": (35, 3),
    "gemma4_26b_a4b": (25.2, 3.8),
    "gemma4_31b": (30.7, 30.7),
    "llama3_1_8b": (8.03, 8.03),
    "llama3_3_70b": (70.6, 70.6),
    "gpt_oss_20b": (20.9, 3.6),
    "gpt_oss_120b": (116.8, 5.1),
    "glm4_5": (355, 32),
    "glm4_5_air": (106, 12),
    "deepseek_v3_2": (671, 37),
    "kimi_k2_5": (1026, 32),
    "minimax_m3_mxfp8": (428, 23),
}
SHIPPED = sorted(name for name in group_options("target") if name != "local" and not name.startswith("tiny_"))


def shipped(name: str) -> tuple[TargetConfig, dict[str, Any]]:
    target = compose([f"target={name}", "data=support"]).target
    fields = known_dimensions(target)
    assert fields is not None
    return target, dict(fields)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_target_that_ships_has_dimensions(name: str) -> None:
    target, fields = shipped(name)
    assert len(target.dimensions.get("revision", "")) == 40 or len(target.dimensions["source"]) > 20
    spec = TargetSpec.from_fields(fields, target.path)
    assert spec.dtype == torch.bfloat16
    every, active = CARDS[name]
    assert target_parameters(spec) / 1e9 == pytest.approx(every, rel=0.02)
    # Cards round, and leave out the embeddings or the head: up to 1.2 B of gpt-oss, 2.5 of MiniMax-M3.
    vocabulary = 2 * spec.vocab_size * spec.hidden_size / 1e9
    assert active * 0.9 < active_parameters(spec) / 1e9 < active * 1.05 + vocabulary


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.slow
def test_parameters_are_those_of_transformers_model(name: str) -> None:
    """Latent attention, Gated DeltaNet, gated outputs, shared experts and Gemma-4's two kinds of layers included."""
    target, fields = shipped(name)
    config = AutoConfig.for_model(**fields)
    text = config.get_text_config(decoder=True)
    text.tie_word_embeddings = config.tie_word_embeddings
    found = sum(entries(text).values())
    assert target_parameters(TargetSpec.from_fields(fields, target.path)) == pytest.approx(found, rel=1e-3)


def test_quantised_targets_take_what_their_codes_take() -> None:
    """Sizes of the checkpoints as the Hub shows them, in gigabytes; a bfloat16 copy takes two bytes a weight."""
    sizes = {}
    for name in ("gpt_oss_120b", "gpt_oss_20b", "kimi_k2_5", "deepseek_v3_2", "qwen3_8b"):
        target, fields = shipped(name)
        sizes[name] = target_bytes(TargetSpec.from_fields(fields, target.path), 2) / 1e9
    assert sizes == pytest.approx(
        {"gpt_oss_120b": 65, "gpt_oss_20b": 13.8, "kimi_k2_5": 595, "deepseek_v3_2": 690, "qwen3_8b": 16.4}, rel=0.05
    )


def test_dimensions_are_of_one_target() -> None:
    assert known_dimensions(compose(["target=qwen3_8b", "target.path=Qwen/Qwen3-14B"]).target) is None


def entries(config: Any) -> dict[str, int]:
    config.quantization_config = None
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
