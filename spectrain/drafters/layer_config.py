"""A drafter's decoder layers: from the configuration and the target, and as a Hugging Face configuration in both
directions, which is what ``transformer_layer_config`` of a folder holds.
"""

from __future__ import annotations

from typing import Any

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.drafters.layers import LayerShape
from spectrain.errors import ConfigError
from spectrain.target.spec import TargetSpec

_ROPE_THETA_DEFAULT = 10000.0
# Frequencies of one plain rotary embedding. Partial and multi-axis settings of a target describe its own heads, not the
# drafter's.
_ROPE_KEYS = frozenset(
    (
        "rope_type",
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "short_factor",
        "long_factor",
        "truncate",
    )
)


def layer_shape(config: DrafterConfig, spec: TargetSpec, layer_type: str) -> LayerShape:
    """As the target's layers, where the configuration does not say otherwise. ``layer_type``: where it names none."""
    heads = config.num_attention_heads or spec.num_attention_heads
    kv_heads = config.num_key_value_heads or min(spec.num_key_value_heads, heads)
    if heads % kv_heads:
        raise ConfigError(
            f"drafter.num_attention_heads={heads} must be a multiple of drafter.num_key_value_heads={kv_heads}"
        )
    head_dim = config.head_dim or spec.head_dim
    if head_dim % 2:
        raise ConfigError(f"drafter.head_dim={head_dim} must be even: rotary positions turn pairs")
    rope = {key: value for key, value in spec.rope_parameters.items() if key in _ROPE_KEYS}
    return LayerShape(
        layer_type=config.layer_type or layer_type,
        hidden_size=spec.hidden_size,
        intermediate_size=config.intermediate_size or spec.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA_DEFAULT} | rope,
        max_position_embeddings=spec.max_position_embeddings,
    )


def to_layer_config(shape: Any) -> dict[str, Any]:
    """Of a shape with ``layer`` and ``num_layers``; ``vocab_size`` is the target's."""
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
