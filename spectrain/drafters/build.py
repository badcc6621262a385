"""A drafter from its configuration, and how it starts.

With a few hundred documents, where a drafter starts decides how far it gets. Parts of the target that do nearly the
same job are copied: the head's rows, the final norm, and the last layer's MLP. All gains are plain in a drafter,
whatever the family's convention. Then ``autoregressive/eagle3_init.py`` solves for the rest in closed form, if the
configuration says so (``drafter.init``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.data.vocab import DraftVocab
from spectrain.drafters.autoregressive.eagle3 import Eagle3Shape
from spectrain.drafters.autoregressive.eagle3_drafter import Eagle3
from spectrain.drafters.base import Drafter, DrafterShape
from spectrain.drafters.block.block_build import block_shape, copy_from_target
from spectrain.drafters.block.block_drafter import BlockDrafter
from spectrain.drafters.drafter_folder import load_drafter
from spectrain.drafters.init_from_target import MLP_NORMS, copy_weights, mlp_norm, read_layer
from spectrain.drafters.layers import LayerShape, RMSNorm
from spectrain.errors import ConfigError
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec

_INIT_STD = 0.02
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


def layer_shape(config: DrafterConfig, spec: TargetSpec) -> LayerShape:
    """The drafter's decoder layer: as the target's, where the configuration does not say otherwise."""
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
        layer_type=config.layer_type
        or ("qwen3" if config.is_block or spec.model_type.startswith("qwen3") else "llama"),
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
    default = spec.spread_taps() if config.is_block else spec.default_taps()
    taps = config.taps if config.taps is not None else default
    beyond = [tap for tap in taps if tap > spec.num_layers]
    if beyond:
        raise ConfigError(
            f"drafter.taps={list(taps)}: {beyond[0]} lies beyond the last layer; the target has {spec.num_layers} "
            f"layers, "
            f"so taps run from 0 to {spec.num_layers}"
        )
    return tuple(taps)


def drafter_shape(config: DrafterConfig, spec: TargetSpec, mask_token_id: int = 0) -> DrafterShape:
    """``mask_token_id`` matters to block drafters."""
    layer, taps = layer_shape(config, spec), resolve_taps(config, spec)
    if config.is_block:
        return block_shape(config, spec, layer, taps, mask_token_id)
    return Eagle3Shape(
        layer=layer,
        num_layers=config.num_layers,
        taps=taps,
        target_vocab_size=spec.vocab_size,
        draft_vocab_size=config.draft_vocab_size or spec.vocab_size,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )


def build_drafter(
    config: DrafterConfig,
    spec: TargetSpec,
    vocab: DraftVocab,
    head: TargetHead,
    target_folder: Path,
    seed: int = 0,
    mask_token_id: int = 0,
) -> Drafter:
    """A fresh drafter, initialised and attached to the target's head. Deterministic in ``seed``; float32."""
    shape = drafter_shape(config, spec, mask_token_id)
    drafter: Drafter
    if isinstance(shape, Eagle3Shape):
        drafter = Eagle3(shape, vocab, config.ttt_steps, config.loss, config.attention)
    else:
        drafter = BlockDrafter(shape, vocab, config.block, config.loss, config.attention)  # type: ignore[arg-type]
    _initialise(drafter, seed)
    if config.init != "random":
        _copy_head(drafter, head)
        if isinstance(drafter, BlockDrafter):
            copy_from_target(drafter, spec, head, target_folder)
        elif isinstance(drafter, Eagle3):
            _copy_from_target(drafter, spec, head, target_folder)
    _finish(drafter, config, head)
    return drafter


def continue_drafter(config: DrafterConfig, head: TargetHead, usual_taps: Sequence[int] | None = None) -> Drafter:
    """The drafter in ``config.path``, ready to be trained on: how it is trained is the configuration's, all else is the
    folder's.

    ``usual_taps``: as in ``folder.load_drafter``. Float32 whatever it was stored in: small updates of 16-bit weights
    would round away.
    """
    drafter = load_drafter(Path(config.path or "").expanduser(), usual_taps)
    drafter.float().train()
    drafter.loss, drafter.attention = config.loss, config.attention
    if isinstance(drafter, Eagle3):
        drafter.steps = config.ttt_steps
    elif isinstance(drafter, BlockDrafter):
        drafter.options = replace(config.block, block_size=drafter.shape.block_size)
    _finish(drafter, config, head)
    return drafter


def _finish(drafter: Drafter, config: DrafterConfig, head: TargetHead) -> None:
    """What every drafter needs before it is trained."""
    if drafter.shape.owns_head:
        drafter.body.lm_head.requires_grad_(config.train_head)
    drafter.attach(head)


@torch.no_grad()
def _initialise(drafter: Drafter, seed: int) -> None:
    """Linear weights N(0, 0.02), norms 1; a block drafter's heads change (next to) nothing."""
    generator = torch.Generator().manual_seed(seed)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0.0, _INIT_STD, generator=generator)
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
    if isinstance(drafter, BlockDrafter):
        drafter.body.reset_heads(generator)


@torch.no_grad()
def _copy_head(drafter: Drafter, head: TargetHead) -> None:
    if drafter.shape.owns_head:
        drafter.body.lm_head.weight.copy_(head.lm_head_weight[drafter.draft_ids_D.to(head.lm_head_weight.device)])


@torch.no_grad()
def _copy_from_target(drafter: Eagle3, spec: TargetSpec, head: TargetHead, folder: Path) -> None:
    """Final norm and, where the shapes agree, the MLP of the target's last decoder layer with its norm."""
    body, layer = drafter.body, drafter.body.layers[0]
    offset = 1.0 if head.one_plus else 0.0
    body.norm.weight.copy_(head.norm_weight + offset)
    last = read_layer(head, folder, spec.num_layers - 1, ("mlp.", *MLP_NORMS))
    gain = mlp_norm(last)
    # Else a mixture of experts, fused projections, another width: the drafter's own initialisation stands.
    if gain is not None and copy_weights(layer.mlp, "mlp", ("gate_proj", "up_proj", "down_proj"), last):
        layer.post_attention_layernorm.weight.copy_(gain.float() + offset)
