"""Parameters of a target and the bytes they take, counted from its dimensions: for ``plan``, which has no weights."""

from __future__ import annotations

from spectrain.target.quantization import Quantization
from spectrain.target.spec import TargetSpec


def target_parameters(spec: TargetSpec) -> int:
    """Parameters of a decoder of these dimensions, all experts included."""
    return _outside_experts(spec) + _experts(spec, spec.experts.count if spec.experts else 0)


def active_parameters(spec: TargetSpec) -> int:
    """Those that one token meets: of a mixture of experts, the chosen ones."""
    return _outside_experts(spec) + _experts(spec, spec.experts.active if spec.experts else 0)


def target_bytes(spec: TargetSpec, number_bytes: int) -> float:
    """Of its weights where they are not quantised ``number_bytes`` each. A quantised checkpoint, which vLLM keeps as it
    is, takes what its codes and scales take.
    """
    every, quantization = target_parameters(spec), spec.quantization
    bits = None if quantization is None else quantization.bits
    if quantization is None or bits is None:
        return float(every * number_bytes)
    codes = _coded(spec, quantization)
    return codes * bits / 8 + (every - codes) * number_bytes


def _coded(spec: TargetSpec, quantization: Quantization) -> int:
    """Weights that are codes: the routed experts' alone, or those of all layers."""
    if quantization.experts_alone and spec.experts is not None:
        return _experts(spec, spec.experts.count)
    return target_parameters(spec) - _vocabulary(spec)


def _experts(spec: TargetSpec, each_layer: int) -> int:
    """Weights of so many routed experts in every layer that has any."""
    mixture = spec.experts
    if mixture is None:
        return 0
    return (spec.num_layers - mixture.dense_layers) * 3 * spec.hidden_size * each_layer * mixture.width


def _outside_experts(spec: TargetSpec) -> int:
    h, mixture, attention = spec.hidden_size, spec.experts, spec.attention_entries
    if attention is None:
        attention = spec.num_layers * h * spec.head_dim * (2 * spec.num_attention_heads + 2 * spec.num_key_value_heads)
    dense_layers = spec.num_layers if mixture is None else mixture.dense_layers
    layers = attention + dense_layers * 3 * h * spec.intermediate_size
    if mixture is not None:
        router = h * mixture.count
        layers += (spec.num_layers - dense_layers) * (3 * h * mixture.shared_width + router)
    return layers + _vocabulary(spec)


def _vocabulary(spec: TargetSpec) -> int:
    """Embeddings, and an output matrix of its own where there is one."""
    return spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
