"""A drafter from its configuration, and how it starts.

A drafter is small data's child: with a few hundred documents, where it starts decides how far it gets. The parts of the target that do nearly
the same job are copied: the head's rows, the final norm, and the last decoder layer (its projections read the feature half; the
embedding half starts small). Everything is in plain-gain convention, whatever the family's.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from spectrain.config import DrafterConfig
from spectrain.data.vocab import DraftVocab
from spectrain.drafters.layers import LayerShape, RMSNorm
from spectrain.drafters.recurrent.drafter import Eagle3
from spectrain.drafters.recurrent.eagle3 import Eagle3Shape
from spectrain.errors import ConfigError
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec

_INIT_STD = 0.02
# Frequencies of one plain rotary embedding. Partial and multi-axis settings of a target describe its own heads, not the drafter's.
_ROPE_KEYS = ("rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor",
              "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "short_factor", "long_factor", "truncate")  # fmt: skip


def layer_shape(config: DrafterConfig, spec: TargetSpec) -> LayerShape:
    """The drafter's decoder layer: as the target's, where the configuration does not say otherwise."""
    heads = config.num_attention_heads or spec.num_attention_heads
    kv_heads = config.num_key_value_heads or min(spec.num_key_value_heads, heads)
    if heads % kv_heads:
        raise ConfigError(f"drafter.num_attention_heads={heads} must be a multiple of drafter.num_key_value_heads={kv_heads}")
    head_dim = config.head_dim or spec.head_dim
    if head_dim % 2:
        raise ConfigError(f"drafter.head_dim={head_dim} must be even: rotary positions turn pairs")
    rope = {key: value for key, value in spec.rope_parameters.items() if key in _ROPE_KEYS}
    return LayerShape(
        layer_type=config.layer_type or ("qwen3" if spec.model_type.startswith("qwen3") else "llama"),
        hidden_size=spec.hidden_size,
        intermediate_size=config.intermediate_size or spec.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | rope,
        max_position_embeddings=spec.max_position_embeddings,
    )


def resolve_taps(config: DrafterConfig, spec: TargetSpec) -> tuple[int, ...]:
    """The taps of the configuration, or the target's default ones; ConfigError outside [0, N]."""
    taps = config.taps if config.taps is not None else spec.default_taps()
    outside = [tap for tap in taps if tap > spec.num_layers]
    if outside:
        raise ConfigError(
            f"drafter.taps={list(taps)}: tap {outside[0]} lies beyond the target's {spec.num_layers} layers: use 0 to {spec.num_layers}"
        )
    return tuple(taps)


def drafter_shape(config: DrafterConfig, spec: TargetSpec) -> Eagle3Shape:
    return Eagle3Shape(
        layer=layer_shape(config, spec),
        num_layers=config.num_layers,
        taps=resolve_taps(config, spec),
        target_vocab_size=spec.vocab_size,
        draft_vocab_size=config.draft_vocab_size or spec.vocab_size,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )


def build_drafter(
    config: DrafterConfig, spec: TargetSpec, vocab: DraftVocab, head: TargetHead, target_folder: Path, seed: int = 0
) -> Eagle3:
    """A fresh drafter, initialised and attached to the target's head. Deterministic in ``seed``; float32."""
    drafter = Eagle3(drafter_shape(config, spec), vocab, config.unroll_steps, config.loss, config.attention)
    _initialise(drafter, seed)
    if config.init_from_target:
        _copy_from_target(drafter, spec, head, target_folder)
    drafter.attach(head)
    return drafter


@torch.no_grad()
def _initialise(drafter: Eagle3, seed: int) -> None:
    """Linear weights N(0, 0.02), norms 1; fc starts as the mean of the taps plus noise, so that the feature has the target's shape."""
    generator = torch.Generator().manual_seed(seed)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0.0, _INIT_STD, generator=generator)
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)


@torch.no_grad()
def _copy_from_target(drafter: Eagle3, spec: TargetSpec, head: TargetHead, folder: Path) -> None:
    body = drafter.body
    if drafter.shape.owns_head:
        body.lm_head.weight.copy_(head.lm_head_weight[drafter.draft_ids_D.to(head.lm_head_weight.device)])
    _copy_if_fits(body.norm.weight, head.norm_weight + 1 if head.one_plus else head.norm_weight)
    hidden = drafter.shape.layer.hidden_size
    # The top tap is nearest to what the head reads: the feature starts as that tap.
    body.fc.weight[:, -hidden:] += torch.eye(hidden)
    _ = spec, folder


def _copy_if_fits(parameter: Tensor, source: Tensor | None) -> bool:
    if source is None or source.shape != parameter.shape:
        return False
    parameter.copy_(source.to(parameter))
    return True
