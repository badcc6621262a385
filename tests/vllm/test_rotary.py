"""Rotary embeddings are vLLM's own, for every kind that transformers has: the drafter's, and the target's where the
length that is served decides.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

from spectrain.drafters.layers import LayerShape, Rotary, rotate
from spectrain.target.served_rope import settle, settled

HEAD_DIM, POSITIONS, ORIGINAL = 16, 512, 128
SHORT, LONG = [1.0 + 0.02 * i for i in range(8)], [1.0 + 0.8 * i for i in range(8)]
PARTIAL = {"partial_rotary_factor": 0.5, "short_factor": SHORT[:4], "long_factor": LONG[:4]}
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": ORIGINAL}
# Kind -> parameters beyond rope_type and rope_theta.
KINDS: dict[str, list[dict[str, Any]]] = {
    "default": [{}],
    "linear": [{"factor": 4.0}],
    "dynamic": [{"factor": 4.0}],
    "yarn": [
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 0.7, "beta_fast": 16.0},
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "truncate": False},
    ],
    "llama3": [
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        }
    ],
    "longrope": [LONGROPE, {**LONGROPE, "factor": 9.0}, {**LONGROPE, "attention_factor": 1.5}],
    "proportional": [{}, {"partial_rotary_factor": 0.25}, {"factor": 2.0}],
}
CASES = [(kind, more) for kind, several in KINDS.items() for more in several]


def rope(kind: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


def vllm_turned(parameters: dict[str, Any], max_model_len: int, x_TNd: torch.Tensor) -> torch.Tensor:
    """Heads [T, N, head_dim] at positions 0 … T−1, as vLLM turns them."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, get_rope

    config = VllmConfig()
    object.__setattr__(config, "model_config", SimpleNamespace(max_model_len=max_model_len))
    _ROPE_DICT.clear()  # its key does not know max_model_len
    with set_current_vllm_config(config, check_compile=False):
        embedding = get_rope(HEAD_DIM, max_position=POSITIONS, rope_parameters=parameters, dtype=torch.float32)
        turn = getattr(embedding, "forward_native", embedding)
        return turn(torch.arange(len(x_TNd)), x_TNd.flatten(1), x_TNd.flatten(1))[0].view_as(x_TNd)


def heads(length: int) -> torch.Tensor:
    return torch.randn(length, 2, HEAD_DIM, generator=torch.Generator().manual_seed(0))


def test_every_kind_of_transformers_is_here() -> None:
    assert set(KINDS) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("served", [ORIGINAL, ORIGINAL + 1])
@pytest.mark.parametrize(("kind", "more"), CASES)
def test_drafters_turn_as_vllm_does(kind: str, more: dict[str, Any], served: int) -> None:
    parameters = settled(rope(kind, more), POSITIONS, served)
    rotary = Rotary(LayerShape("llama", 32, 8, 2, 1, HEAD_DIM, 1e-5, parameters, POSITIONS))
    x_TNd = heads(ORIGINAL)
    ours = rotate(x_TNd, rotary.cos_sin(torch.arange(ORIGINAL)))
    for told in (rope(kind, more), parameters):  # what the target's configuration says, and the drafter's folder
        torch.testing.assert_close(ours, vllm_turned(told, served, x_TNd), rtol=0, atol=2e-5)


@pytest.mark.parametrize("served", [ORIGINAL, ORIGINAL + 1, POSITIONS])
@pytest.mark.parametrize("length", [20, ORIGINAL + 40])  # of the longest row of a batch
@pytest.mark.parametrize("more", [*KINDS["longrope"], {**LONGROPE, **PARTIAL}])
def test_a_longrope_target_turns_as_vllm_does_whatever_the_batch(
    more: dict[str, Any], length: int, served: int
) -> None:
    parameters = rope("longrope", more)
    config = tiny_config(
        "phi3", hidden_size=64, head_dim=HEAD_DIM, rope_parameters=parameters, original_max_position_embeddings=ORIGINAL
    )
    settle(config, served)
    cos_sin = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    x_TNd = heads(length)
    x_1NTd = x_TNd.transpose(0, 1)[None]
    ours = apply_rotary_pos_emb(x_1NTd, x_1NTd, *cos_sin)[0][0].transpose(0, 1)[:served]
    torch.testing.assert_close(ours, vllm_turned(parameters, served, x_TNd[:served]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("more", [{"partial_rotary_factor": 0.5}, {"rope_dim": 8}])
def test_a_drafter_whose_heads_are_turned_in_part_is_refused(more: dict[str, Any]) -> None:
    """vLLM would turn them in part."""
    with pytest.raises(ValueError, match=next(iter(more))):
        LayerShape("llama", 32, 8, 2, 1, HEAD_DIM, 1e-5, rope("default", more), POSITIONS)
