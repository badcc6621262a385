"""A fresh block drafter: its shape from the configuration, its mask token from the training text, its weights from the
target.

Drafter layer i of L starts as layer N − L + i of the target where the shapes agree, the fused context as the deepest
tap, and the final norm as the target's: keys and values of the context are then close to the target's own. All gains
are plain in a drafter.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.drafters.block.block_drafter import BlockDrafter
from spectrain.drafters.block.block_shape import BlockShape, ConvShape, MarkovShape, SelectorShape
from spectrain.drafters.init_from_target import MLP_NORMS, copy_weights, mlp_norm, read_layer
from spectrain.drafters.layers import LayerShape
from spectrain.errors import ConfigError
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec

_GROUP_SIZE = 64
# An embedding much shorter than most was never trained: queries of mask slots would all be equal to nothing.
_LEAST_NORM = 0.5


def block_shape(
    config: DrafterConfig, spec: TargetSpec, layer: LayerShape, taps: tuple[int, ...], mask_token_id: int
) -> BlockShape:
    """Raises ConfigError where a setting does not fit the target."""
    block, method = config.block, config.method
    if mask_token_id >= spec.vocab_size:
        raise ConfigError(
            f"drafter.block.mask_token_id={mask_token_id} is outside the target's vocabulary of {spec.vocab_size}"
        )
    kind = (block.markov or "vanilla") if method == "dspark" else "none"
    markov = None if kind == "none" else MarkovShape(kind, block.markov_rank)
    confidence = method == "dspark" and block.confidence is not False
    conv = selector = None
    if method == "dflash2":
        conv = ConvShape(block.conv_kernel_size, _group_size(block.conv_group_size, spec.hidden_size))
        selector = SelectorShape(block.selector_rank, min(block.selector_top_k, spec.vocab_size))
    return BlockShape(
        method=method,
        layer=layer,
        num_layers=config.num_layers,
        taps=taps,
        target_vocab_size=spec.vocab_size,
        draft_vocab_size=config.draft_vocab_size or spec.vocab_size,
        block_size=block.block_size,
        mask_token_id=mask_token_id,
        sample_from_anchor=config.samples_from_anchor,
        sliding_window=block.sliding_window,
        causal=block.sliding_window is not None and block.causal,
        markov=markov,
        confidence=confidence,
        confidence_with_markov=confidence and markov is not None and block.confidence_with_markov,
        conv=conv,
        selector=selector,
    )


def settings_of(shape: BlockShape) -> dict[str, object]:
    """What ``drafter.block`` would say of a drafter of this shape."""
    settings: dict[str, object] = {
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": shape.sample_from_anchor,
        "sliding_window": shape.sliding_window,
        "markov": "none" if shape.markov is None else shape.markov.kind,
        "confidence": shape.confidence,
    }
    if shape.markov is not None:
        settings["markov_rank"] = shape.markov.rank
    if shape.conv is not None and shape.selector is not None:
        settings |= {"conv_kernel_size": shape.conv.kernel_size, "conv_group_size": shape.conv.group_size}
        settings |= {"selector_rank": shape.selector.rank, "selector_top_k": shape.selector.top_k}
    return settings


def _group_size(wanted: int | None, hidden_size: int) -> int:
    if wanted is None:
        return next(size for size in range(min(_GROUP_SIZE, hidden_size), 0, -1) if hidden_size % size == 0)
    if hidden_size % wanted:
        raise ConfigError(f"drafter.block.conv_group_size={wanted} must divide the target's width of {hidden_size}")
    return wanted


def choose_mask_token(used_V: np.ndarray, embedding_VH: Tensor) -> int:
    """The last token of the vocabulary that the training text never uses and whose embedding is no shorter than most.

    ``used_V``: how often each token occurs. Reserved tokens tend to stand last. Raises ConfigError where every token
    occurs.
    """
    norms_V = embedding_VH.float().norm(dim=-1).cpu()
    whole_V = norms_V >= _LEAST_NORM * norms_V.median()
    unused_V = torch.from_numpy(used_V[: len(norms_V)] == 0)
    candidates = torch.nonzero(unused_V & whole_V)[:, 0]
    if len(candidates) == 0:
        candidates = torch.nonzero(unused_V)[:, 0]
    if len(candidates) == 0:
        raise ConfigError(
            "every token of the vocabulary occurs in the training text: name one with drafter.block.mask_token_id"
        )
    return int(candidates[-1])


@torch.no_grad()
def copy_from_target(drafter: BlockDrafter, spec: TargetSpec, head: TargetHead, folder: Path) -> None:
    """Final norm, fused context and, where the shapes agree, attention and MLP of the target's last layers with their
    norms.
    """
    body, offset = drafter.body, 1.0 if head.one_plus else 0.0
    body.norm.weight.copy_(head.norm_weight + offset)
    hidden = spec.hidden_size
    body.fc.weight[:, -hidden:] += torch.eye(hidden)  # taps ascend, so the deepest comes last
    first = spec.num_layers - len(body.layers)
    for layer, index in zip(body.layers, range(first, spec.num_layers), strict=True):
        if index < 0:
            continue  # more layers than the target has
        source = read_layer(head, folder, index, ("mlp.", "self_attn.", "input_layernorm.weight", *MLP_NORMS))
        gain = source.get("input_layernorm.weight")
        if gain is not None and copy_weights(
            layer.self_attn, "self_attn", ("q_proj", "k_proj", "v_proj", "o_proj"), source
        ):
            layer.input_layernorm.weight.copy_(gain.float() + offset)
            body.hidden_norm.weight.copy_(gain.float() + offset)
            copy_weights(layer.self_attn, "self_attn", ("q_norm", "k_norm"), source, offset)
        gain = mlp_norm(source)
        if gain is not None and copy_weights(layer.mlp, "mlp", ("gate_proj", "up_proj", "down_proj"), source):
            layer.post_attention_layernorm.weight.copy_(gain.float() + offset)
