"""A drafter's decoder layers as a Hugging Face configuration, in both directions: what ``transformer_layer_config`` of
a folder holds.
"""

from __future__ import annotations

from typing import Any

from spectrain.drafters.base import DrafterShape
from spectrain.drafters.layers import LayerShape

_ROPE_THETA_DEFAULT = 10000.0


def to_layer_config(shape: DrafterShape) -> dict[str, Any]:
    """``vocab_size`` is the target's."""
    layer = shape.layer
    return {
        "model_type": layer.layer_type,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_parameters": layer.rope_parameters,
        "rope_theta": layer.rope_parameters.get(
            "rope_theta", _ROPE_THETA_DEFAULT
        ),  # where releases before rope_parameters look
        "max_position_embeddings": layer.max_position_embeddings,
        "vocab_size": shape.target_vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def from_layer_config(config: dict[str, Any]) -> LayerShape:
    """Raises KeyError for a field that is missing, ValueError for a type of layer that is not known."""
    if config["model_type"] not in ("llama", "qwen3"):
        raise ValueError(f"its layer is of type {config['model_type']!r}, known are llama and qwen3")
    rope = config.get("rope_parameters") or {
        "rope_type": "default",
        "rope_theta": config.get("rope_theta", _ROPE_THETA_DEFAULT),
    }
    return LayerShape(
        layer_type=config["model_type"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters=rope,
        max_position_embeddings=config["max_position_embeddings"],
    )
