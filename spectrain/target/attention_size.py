"""How many weights the attention of a target has, by the fields of its configuration: four matrices a layer in most
families, and what DeepSeek's latent attention, Gated DeltaNet, gated outputs and Gemma-4's wide layers have instead.

For ``plan``, which has no weights; the tests compare it with transformers' own models. Norms and biases are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Families whose query projection makes a gate of the output, too.
_GATED_OUTPUT = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def attention_entries(text_config: Any, layer_types: Sequence[str]) -> int:
    """Entries of all attention matrices of a language model's transformers configuration."""
    layers = list(text_config.per_layer_config) if getattr(text_config, "is_heterogeneous", False) else None
    return sum(
        _of_layer(text_config, kind, text_config if layers is None else layers[number])
        for number, kind in enumerate(layer_types)
    )


def _of_layer(text: Any, kind: str, layer: Any) -> int:
    hidden: int = text.hidden_size
    if kind == "linear_attention" and hasattr(text, "linear_num_key_heads"):
        return _gated_delta_net(text)
    if getattr(text, "kv_lora_rank", None):
        return _latent(text) + _indexer(text, text.q_lora_rank or hidden)
    heads = layer.num_attention_heads
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    size = getattr(layer, "head_dim", None) or hidden // heads
    shared = kind == "full_attention" and getattr(text, "attention_k_eq_v", False)
    queries = 2 if text.model_type in _GATED_OUTPUT else 1
    sparse = _indexer(text, hidden) if kind == "minimax_m3_sparse" else 0
    return hidden * size * ((queries + 1) * heads + (1 if shared else 2) * kv_heads) + sparse


def _gated_delta_net(text: Any) -> int:
    """Queries, keys, values and an output gate, two scalars a value head, a convolution, and the output projection."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    inputs = text.hidden_size * (2 * keys + 2 * values + 2 * text.linear_num_value_heads)
    return inputs + text.linear_conv_kernel_dim * (2 * keys + values) + values * text.hidden_size


def _latent(text: Any) -> int:
    """Multi-head latent attention: low-rank queries, keys and values (DeepSeek-V2, section 2.1)."""
    heads, turned = text.num_attention_heads, text.qk_rope_head_dim
    query = heads * (text.qk_nope_head_dim + turned)
    rank = text.q_lora_rank
    queries = rank * (text.hidden_size + query) if rank else text.hidden_size * query
    keys_values = text.hidden_size * (text.kv_lora_rank + turned)
    keys_values += text.kv_lora_rank * heads * (text.qk_nope_head_dim + text.v_head_dim)
    return queries + keys_values + heads * text.v_head_dim * text.hidden_size


def _indexer(text: Any, query_input: int) -> int:
    """What chooses keys for sparse attention: queries, one key, a weight for each head."""
    heads, size = getattr(text, "index_n_heads", 0) or 0, getattr(text, "index_head_dim", 0) or 0
    if not heads:
        return 0
    weights = text.hidden_size * heads if getattr(text, "kv_lora_rank", None) else 0
    return query_input * heads * size + text.hidden_size * size + weights
