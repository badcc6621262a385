"""Recipes that tune a target's own head: they compose, and what they train is counted by hand."""

from __future__ import annotations

import pytest
import torch

from spectrain.config.folders import group_options
from spectrain.config.loading import compose
from spectrain.drafters.registry import find_method
from spectrain.target.resolve import known_dimensions
from spectrain.target.spec import TargetSpec

DENSE_27B = 3 * 5120 * 17408
# recipe -> (width, heads, key-value heads, entries of the MLP: dense, or experts, a shared one, its gate, a router)
HEADS = {
    "mtp_qwen3_5_27b": (5120, 24, 4, DENSE_27B),
    "mtp_qwen3_6_27b": (5120, 24, 4, DENSE_27B),
    "mtp_qwen3_6_35b_a3b": (2048, 16, 2, 257 * 3 * 2048 * 512 + 2048 + 256 * 2048),
    "mtp_qwen3_5_122b_a10b": (3072, 32, 2, 257 * 3 * 3072 * 1024 + 3072 + 256 * 3072),
}


@pytest.mark.parametrize("recipe", HEADS)
def test_the_head_alone_is_trained(recipe: str) -> None:
    config = compose([f"recipe={recipe}"])
    fields = known_dimensions(config.target)
    assert fields is not None
    spec, method = TargetSpec.from_fields(fields, config.target.path), find_method("mtp")
    with torch.device("meta"):
        body = method.body(method.shape(config.drafter, spec))
    width, heads, kv_heads, mlp = HEADS[recipe]
    matrices = 2 * width * width + width * 256 * (2 * heads + 2 * kv_heads + heads) + mlp
    assert sum(p.numel() for p in body.parameters() if p.ndim > 1) == matrices
    assert sum(p.numel() for p in body.parameters() if p.ndim == 1) == 5 * width + 2 * 256
    assert (config.drafter.method, config.drafter.init, config.capture.during_generation) == ("mtp", "target", True)
    assert method.taps(config.drafter, spec) == ()


def test_the_head_of_deepseek_v3_2_is_planned_without_its_target() -> None:
    """By hand: latent attention, 256 experts and a shared one, a router with its correction; no indexer."""
    config = compose(["target=deepseek_v3_2", "drafter=mtp"])
    fields = known_dimensions(config.target)
    assert fields is not None
    spec, method = TargetSpec.from_fields(fields, config.target.path), find_method("mtp")
    shape = method.shape(config.drafter, spec)
    with torch.device("meta"):
        body = method.body(shape)
    queries, keys_values = 7168 * 1536 + 1536 * 128 * 192, 7168 * 576 + 512 * 128 * 256
    attention, mlp = queries + keys_values + 128 * 128 * 7168, 257 * 3 * 7168 * 2048 + 256 * 7168
    assert sum(p.numel() for p in body.parameters() if p.ndim > 1) == 2 * 7168 * 7168 + attention + mlp
    assert (shape.family, shape.most_context, config.target.max_length) == ("deepseek_v32", 2048, 2048)


def test_the_smoke_recipe_needs_nothing() -> None:
    config = compose(["recipe=mtp_smoke"])
    assert (config.target.tiny, config.engine.name, config.drafter.method) == ("mimo", "hf", "mtp")
    assert {*HEADS, "mtp_smoke"} <= {*group_options("recipe")}
