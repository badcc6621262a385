"""Drafting with a block drafter, as a server does it.

The cache holds keys and values of verified tokens, made from the target's taps; column number = position. A draft runs
a block behind them whose own keys are never kept, so drafting leaves no trace. Each round the cache grows by the
accepted tokens and their anchor.

Legend: B rows, S slots of the block, J slots that draft, T tokens, A taps, H hidden, N heads, G key-value heads, d size
of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from spectrain.decoding.proposers import Observation
from spectrain.drafters.block.block_attention import own_block_mask
from spectrain.drafters.block.block_model import BlockBody
from spectrain.drafters.block.block_shape import BlockShape
from spectrain.drafters.drafter_cache import KeyValueCache
from spectrain.drafters.layers import Rotary
from spectrain.target.head import TargetHead


def new_cache(body: BlockBody, batch_size: int) -> KeyValueCache:
    return KeyValueCache(body.shape.layer, body.shape.num_layers, batch_size, body.fc.weight)


def observe(body: BlockBody, rotary: Rotary, cache: KeyValueCache, observation: Observation) -> None:
    """Taps of verified tokens become context columns. Columns behind a row's length are scratch, overwritten by
    the next call.
    """
    taps_BTAH = observation.taps_BTAH
    if taps_BTAH is None:
        raise ValueError("a block drafter observes taps of the target")
    rows_B1 = torch.arange(len(taps_BTAH), device=taps_BTAH.device)[:, None]
    positions_BT = cache.columns_B[:, None] + torch.arange(taps_BTAH.shape[1], device=taps_BTAH.device)
    cache.reserve(int(positions_BT.max()) + 1)
    context_BTH, cos_sin = body.fuse(taps_BTAH), rotary.cos_sin(positions_BT)
    for layer, keys, values in zip(body.layers, cache.keys, cache.values, strict=True):
        keys[rows_B1, positions_BT], values[rows_B1, positions_BT] = layer.context_kv(context_BTH, cos_sin)
    cache.columns_B = cache.columns_B + observation.lengths_B


def draft_block(
    body: BlockBody, rotary: Rotary, head: TargetHead, cache: KeyValueCache, anchor_B: Tensor, num_drafts: int
) -> Tensor:
    """Normed hidden states [B, J, H] of the slots that draft ``num_drafts`` tokens behind the anchor."""
    shape = body.shape
    slots = shape.slots(num_drafts)
    positions_BS = cache.columns_B[:, None] + torch.arange(slots, device=anchor_B.device)
    end = int(cache.columns_B.max())
    own_SS = own_block_mask(slots, shape.sliding_window, shape.causal, anchor_B.device)
    context_BSK = _context_mask(shape, positions_BS, cache.columns_B, end)
    visible_B1SK = torch.cat([context_BSK, own_SS.expand(len(context_BSK), -1, -1)], dim=-1)[:, None]

    def attend(index: int, q_BSNd: Tensor, k_BSGd: Tensor, v_BSGd: Tensor) -> Tensor:
        k = torch.cat([cache.keys[index][:, :end], k_BSGd], dim=1).transpose(1, 2)
        v = torch.cat([cache.values[index][:, :end], v_BSGd], dim=1).transpose(1, 2)
        return F.scaled_dot_product_attention(
            q_BSNd.transpose(1, 2), k, v, attn_mask=visible_B1SK, enable_gqa=True
        ).transpose(1, 2)

    hidden_BSH = body(body.block_input(anchor_B, head, slots), rotary.cos_sin(positions_BS), attend)
    return hidden_BSH[:, shape.first_slot :]


def _context_mask(shape: BlockShape, positions_BS: Tensor, columns_B: Tensor, end: int) -> Tensor:
    """[B, S, end]: a slot sees the row's own columns, those inside the window if there is one."""
    column_K = torch.arange(end, device=columns_B.device)
    visible_BSK = (column_K < columns_B[:, None, None]).expand(-1, positions_BS.shape[1], -1)
    if shape.sliding_window is not None:
        visible_BSK = visible_BSK & (positions_BS[..., None] - column_K < shape.sliding_window)
    return visible_BSK
