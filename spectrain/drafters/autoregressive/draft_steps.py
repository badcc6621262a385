"""Drafting with an autoregressive drafter, as a server does it.

The cache holds keys and values of *observed* columns: verified tokens with target features. Slot number = column =
position. Drafting writes its own keys into the slots behind, as scratch: the count of observed columns does not move,
so the next ``observe`` overwrites them and drafting leaves no trace. Column t needs x_{t+1}, so the feature of the last
observed token waits as ``pending`` until the next token is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from spectrain.decoding.proposers import Observation
from spectrain.drafters.drafter_cache import KeyValueCache
from spectrain.drafters.layers import Rotary
from spectrain.target.head import TargetHead

if TYPE_CHECKING:
    from spectrain.drafters.autoregressive.eagle3 import Eagle3Body


class AutoregressiveCache(KeyValueCache):
    """``pending_BH``: feature of the last observed token; None before the first observe."""

    pending_BH: Tensor | None = None

    def select(self, rows_B: Tensor) -> None:
        super().select(rows_B)
        self.pending_BH = None if self.pending_BH is None else self.pending_BH[rows_B]


def new_cache(body: Eagle3Body, batch_size: int) -> AutoregressiveCache:
    return AutoregressiveCache(body.shape.layer, body.shape.num_layers, batch_size, body.fc.weight)


def observe(
    body: Eagle3Body, rotary: Rotary, head: TargetHead, cache: AutoregressiveCache, observation: Observation
) -> None:
    """Verified tokens and their taps become step-0 columns; the last one's feature waits for its next token."""
    if observation.taps_BTAH is None:
        raise ValueError("an EAGLE-3 drafter observes taps of the target")
    ids_BT, lengths_B = observation.ids_BT, observation.lengths_B
    feature_BTH = body.fuse(observation.taps_BTAH)
    last_B = (lengths_B - 1).clamp(min=0)
    rows_B = torch.arange(len(ids_BT), device=ids_BT.device)
    if cache.pending_BH is None:
        column_feature, next_ids, new_B = feature_BTH[:, :-1], ids_BT[:, 1:], lengths_B - 1
        cache.pending_BH = feature_BTH[rows_B, last_B]
    else:
        column_feature = torch.cat([cache.pending_BH[:, None], feature_BTH[:, :-1]], dim=1)
        next_ids, new_B = ids_BT, lengths_B
        cache.pending_BH = torch.where((lengths_B > 0)[:, None], feature_BTH[rows_B, last_B], cache.pending_BH)
    if next_ids.shape[1]:
        _columns(body, rotary, head, cache, column_feature, next_ids, cache.columns_B, keys_only=True)
    cache.columns_B = cache.columns_B + new_B.clamp(min=0)


class DraftSteps:
    """Iterator over the n steps of one draft: yields the normed hidden state [B, H]; ``token_B`` must be set before the
    next step.
    """

    def __init__(
        self, body: Eagle3Body, rotary: Rotary, head: TargetHead, cache: AutoregressiveCache, anchor_B: Tensor, n: int
    ) -> None:
        if cache.pending_BH is None:
            raise RuntimeError(
                "observe the prompt before proposing: a draft starts from the feature of the last verified token"
            )
        self._parts = (body, rotary, head, cache)
        self.token_B = anchor_B
        self._n = n
        self._step = 0
        self._feature_BH: Tensor = cache.pending_BH

    def __iter__(self) -> DraftSteps:
        return self

    def __next__(self) -> Tensor:
        if self._step == self._n:
            raise StopIteration
        body, rotary, head, cache = self._parts
        start_B = cache.columns_B + self._step
        out_BH = _columns(body, rotary, head, cache, self._feature_BH[:, None], self.token_B[:, None], start_B)[:, 0]
        normed_BH = body.norm(out_BH)
        self._feature_BH = body.feed_back(out_BH, normed_BH)
        self._step += 1
        return normed_BH


def _columns(
    body: Eagle3Body,
    rotary: Rotary,
    head: TargetHead,
    cache: AutoregressiveCache,
    feature_BTH: Tensor,
    ids_BT: Tensor,
    start_B: Tensor,
    keys_only: bool = False,
) -> Tensor:
    """Run columns start … start + T − 1 of each row, writing their keys and values into those slots.

    Column c attends to slots 0 … c. With ``keys_only`` the last layer stops after its keys and values, and the result
    is meaningless.
    """
    rows_B1 = torch.arange(len(ids_BT), device=ids_BT.device)[:, None]
    slots_BT = start_B[:, None] + torch.arange(ids_BT.shape[1], device=ids_BT.device)
    end = int(slots_BT.max()) + 1
    cache.reserve(end)
    visible_B1TS = (torch.arange(end, device=ids_BT.device) <= slots_BT[..., None])[:, None]
    cos_sin = rotary.cos_sin(slots_BT)
    embedding_BTH = head.embed_rows(ids_BT).to(feature_BTH.dtype)
    stream = feature_BTH
    for layer, keys, values in zip(body.layers, cache.keys, cache.values, strict=True):
        residual, x = layer.attention_input(stream, embedding_BTH)
        keys[rows_B1, slots_BT], values[rows_B1, slots_BT] = layer.self_attn.keys_values(x, cos_sin)
        if keys_only and layer is body.layers[-1]:
            break
        q, k, v = (
            part.transpose(1, 2) for part in (layer.self_attn.queries(x, cos_sin), keys[:, :end], values[:, :end])
        )
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_B1TS, enable_gqa=True)
        stream = layer.finish(residual, heads.transpose(1, 2))
    return stream
