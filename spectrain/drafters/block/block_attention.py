"""Attention of many blocks in one training pass.

A query, slot j of the block at anchor a, sees the context keys of its own document at positions < a (strictly: the
anchor's own taps do not exist yet when a server drafts) and the slots of its own block, all of them or those up to
itself; never another block. With a sliding window W it sees only what is less than W positions away from its own
position a + j. One softmax over both parts.

Three equal implementations: ``eager`` goes through the documents in groups of neighbouring blocks, so that a group's
keys end at its last anchor and nothing is computed across documents or between blocks (fastest on a CPU); ``sdpa`` is
one call of torch's kernels a group; ``flex`` is one call for all, as block-sparse kernels, for a GPU. No memory grows
with the square of a document: where a group's scores are many, its backward pass does it again.

Legend: R blocks, B slots, T context tokens, N heads, G key-value heads, M = N/G heads that share keys, d size of a
head; r blocks and K context keys of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from spectrain.data.host_tokens import on_device
from spectrain.drafters.flex_kernels import attend_sparsely
from spectrain.drafters.key_ranges import KeyRanges, bucket, sparse_mask

BACKENDS = ("eager", "sdpa", "flex")
_GROUP_ROWS = (
    256  # queries per head of one group: enough for fast products, few enough that little lies behind the first anchor
)
_MOST_SCORES = 1 << 20  # of a group, a head: with more, backward does the group again


@dataclass(frozen=True)
class Group:
    """Neighbouring blocks of one document and the context any of them sees: [key_start, key_end), blocks
    [start, end).
    """

    key_start: int
    key_end: int
    start: int
    end: int


@dataclass
class BlockLayout:
    """R blocks in a batch of T tokens, anchors ascending."""

    anchor_R: Tensor
    host_anchor_R: np.ndarray
    document_ids_T: np.ndarray
    slots: int
    window: int | None
    causal: bool
    groups: list[Group]
    cache: dict[Any, Any] = field(default_factory=dict)  # masks, built once for all layers

    @classmethod
    def build(
        cls,
        anchor_R: np.ndarray | Tensor,
        document_ids_T: np.ndarray | Tensor,
        slots: int,
        window: int | None,
        causal: bool,
        device: torch.device | str = "cpu",
    ) -> BlockLayout:
        """Of what is on the host; ``device``: where queries and keys will be."""
        anchor_R, document_ids_T = np.asarray(anchor_R), np.asarray(document_ids_T)
        lengths = np.bincount(document_ids_T).tolist()
        blocks = np.bincount(document_ids_T[anchor_R], minlength=len(lengths)).tolist()
        anchors, step = anchor_R.tolist(), max(1, _GROUP_ROWS // slots)
        groups, key, block = [], 0, 0
        for num_keys, num_blocks in zip(lengths, blocks, strict=True):
            for start in range(block, block + num_blocks, step):
                end = min(start + step, block + num_blocks)
                first = key if window is None else max(key, anchors[start] - window + 1)
                groups.append(Group(first, anchors[end - 1], start, end))
            key, block = key + num_keys, block + num_blocks
        on = on_device(anchor_R, torch.device(device))
        return cls(on, anchor_R, document_ids_T, slots, window, causal, groups)

    def sees_own(self) -> Tensor:
        """bool [B, B]: which slots of its block a slot sees."""
        return own_block_mask(self.slots, self.window, self.causal, self.anchor_R.device)

    def sees_context(self, group: Group) -> Tensor:
        """bool [r, 1 or B, K]: a group's keys, of which each block sees those before its anchor (and inside each slot's
        window).
        """
        anchor_r11 = self.anchor_R[group.start : group.end, None, None]
        column_K = torch.arange(group.key_start, group.key_end, device=anchor_r11.device)
        visible = column_K < anchor_r11
        if self.window is not None:
            slot_B1 = torch.arange(self.slots, device=anchor_r11.device)[:, None]
            visible = visible & (anchor_r11 + slot_B1 - column_K < self.window)
        return visible

    def many_scores(self, group: Group) -> bool:
        """Whether a group's scores are so many that its backward pass should do it again."""
        return (group.end - group.start) * self.slots * (group.key_end - group.key_start) > _MOST_SCORES

    def ranges(self, behind: int) -> KeyRanges:
        """Keys of each slot: of the context, and of its own block, whose keys lie from ``behind`` on."""
        starts_D = np.searchsorted(self.document_ids_T, np.arange(self.document_ids_T[-1] + 1))
        r, b = len(self.host_anchor_R), self.slots
        anchor_Q, slot_Q = np.repeat(self.host_anchor_R, b), np.tile(np.arange(b), r)
        block_Q = behind + np.repeat(np.arange(r), b) * b
        start_Q = starts_D[self.document_ids_T[anchor_Q]]
        first_Q, last_Q = np.zeros_like(slot_Q), slot_Q if self.causal else np.full_like(slot_Q, b - 1)
        if self.window is not None:
            start_Q = np.maximum(start_Q, anchor_Q + slot_Q - self.window + 1)
            first_Q, last_Q = (
                np.maximum(first_Q, slot_Q - self.window + 1),
                np.minimum(last_Q, slot_Q + self.window - 1),
            )
        starts, ends = np.stack([start_Q, block_Q + first_Q]), np.stack([anchor_Q, block_Q + last_Q + 1])
        return KeyRanges(starts, ends, behind + r * b)

    def hidden_scores(self, group: Group, dtype: torch.dtype) -> Tensor:
        """What is added to a group's scores, 0 or -inf: [r, 1, 1 or B, K]."""
        if self.many_scores(group):  # not kept either
            return _additive(self.sees_context(group)[:, None], dtype)
        if group not in self.cache:
            self.cache[group] = _additive(self.sees_context(group)[:, None], dtype)
        return self.cache[group]

    def hidden_own(self, dtype: torch.dtype) -> Tensor:
        """The same for the slots of the block itself, [B, B]."""
        if "own" not in self.cache:
            self.cache["own"] = _additive(self.sees_own(), dtype)
        return self.cache["own"]


def own_block_mask(slots: int, window: int | None, causal: bool, device: torch.device) -> Tensor:
    """bool [B, B]: which slots of its block a slot sees: all, or those up to itself; with a window only near ones."""
    slot_B = torch.arange(slots, device=device)
    back_BB = slot_B[:, None] - slot_B
    visible_BB = back_BB >= 0 if causal else torch.ones_like(back_BB, dtype=torch.bool)
    return visible_BB if window is None else visible_BB & (back_BB.abs() < window)


def block_attention(
    q_RBNd: Tensor,
    k_RBGd: Tensor,
    v_RBGd: Tensor,
    context_k_TGd: Tensor,
    context_v_TGd: Tensor,
    layout: BlockLayout,
    backend: str,
) -> Tensor:
    """Attend from every slot to the context of its document and to its own block; returns [R, B, N, d]."""
    if len(q_RBNd) == 0:
        return q_RBNd
    return {"eager": _eager, "sdpa": _sdpa, "flex": _flex}[backend](
        q_RBNd, k_RBGd, v_RBGd, context_k_TGd, context_v_TGd, layout
    )


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def _eager(
    q_RBNd: Tensor, k_RBGd: Tensor, v_RBGd: Tensor, context_k_TGd: Tensor, context_v_TGd: Tensor, layout: BlockLayout
) -> Tensor:
    g = k_RBGd.shape[2]
    q_GRMBd = (q_RBNd * q_RBNd.shape[-1] ** -0.5).unflatten(2, (g, -1)).permute(2, 0, 3, 1, 4)
    own_k_GRdB, own_v_GRBd = k_RBGd.permute(2, 0, 3, 1), v_RBGd.permute(2, 0, 1, 3)

    def attend(group: Group) -> Tensor:
        blocks, keys = slice(group.start, group.end), slice(group.key_start, group.key_end)
        return _group(
            q_GRMBd[:, blocks],
            own_k_GRdB[:, blocks],
            own_v_GRBd[:, blocks],
            context_k_TGd[keys].permute(1, 2, 0),
            context_v_TGd[keys].transpose(0, 1),
            layout.hidden_scores(group, q_RBNd.dtype),
            layout.hidden_own(q_RBNd.dtype),
        )

    return torch.cat(_by_groups(layout, attend), dim=1).permute(1, 3, 0, 2, 4).flatten(2, 3)


def _by_groups(layout: BlockLayout, attend: Callable[[Group], Tensor]) -> list[Tensor]:
    """Of those with many scores nothing is kept for the backward pass."""
    again = torch.is_grad_enabled()
    return [
        checkpoint(attend, group, use_reentrant=False, preserve_rng_state=False)
        if again and layout.many_scores(group)
        else attend(group)
        for group in layout.groups
    ]


def _group(
    q_GrMBd: Tensor,
    k_GrdB: Tensor,
    v_GrBd: Tensor,
    context_k_GdK: Tensor,
    context_v_GKd: Tensor,
    hidden: Tensor,
    hidden_BB: Tensor,
) -> Tensor:
    """[G, r, M, B, d]. Grouped heads and all blocks share one product with the context; each block has one with its own
    keys.
    """
    g, r, m, b, d = q_GrMBd.shape
    keys = context_k_GdK.shape[-1]
    q_GrXd = q_GrMBd.reshape(g, r, m * b, d)
    context_scores = (q_GrXd.reshape(g, -1, d) @ context_k_GdK).view(g, r, m, b, keys) + hidden
    own_scores = (q_GrXd @ k_GrdB).view(g, r, m, b, b) + hidden_BB
    weights = F.softmax(torch.cat([context_scores, own_scores], dim=-1), dim=-1)
    mixed = weights[..., :keys].reshape(g, r * m * b, keys) @ context_v_GKd  # there may be no keys at all
    own = weights[..., keys:].reshape(g, r, m * b, b) @ v_GrBd
    return mixed.view(g, r, m, b, d) + own.view(g, r, m, b, d)


def _sdpa(
    q_RBNd: Tensor, k_RBGd: Tensor, v_RBGd: Tensor, context_k_TGd: Tensor, context_v_TGd: Tensor, layout: BlockLayout
) -> Tensor:
    b = layout.slots
    share = q_RBNd.shape[2] // k_RBGd.shape[2]

    def attend(group: Group) -> Tensor:
        blocks, columns = slice(group.start, group.end), slice(group.key_start, group.key_end)
        context = layout.sees_context(group).expand(-1, b, -1).flatten(0, 1)
        own = torch.block_diag(*layout.sees_own().expand(group.end - group.start, -1, -1).unbind())
        k, v = (
            torch.cat([context_TGd[columns], own_RBGd[blocks].flatten(0, 1)]).repeat_interleave(share, 1)
            for own_RBGd, context_TGd in ((k_RBGd, context_k_TGd), (v_RBGd, context_v_TGd))
        )
        q_1NQd, k_1NKd, v_1NKd = (x.transpose(0, 1)[None] for x in (q_RBNd[blocks].flatten(0, 1), k, v))
        out = F.scaled_dot_product_attention(q_1NQd, k_1NKd, v_1NKd, attn_mask=torch.cat([context, own], 1)[None, None])
        return out[0].transpose(0, 1).unflatten(0, (-1, b))

    return torch.cat(_by_groups(layout, attend))


def _flex(
    q_RBNd: Tensor, k_RBGd: Tensor, v_RBGd: Tensor, context_k_TGd: Tensor, context_v_TGd: Tensor, layout: BlockLayout
) -> Tensor:
    asking, t = q_RBNd.shape[0] * q_RBNd.shape[1], len(context_k_TGd)
    queries, behind = bucket(asking), bucket(t)
    if "sparse" not in layout.cache:
        ranges = layout.ranges(behind).padded(queries, behind + queries)
        layout.cache["sparse"] = sparse_mask(ranges, q_RBNd.device)

    def keys(own_RBGd: Tensor, context_TGd: Tensor) -> Tensor:
        """Of the context and then of all blocks, each padded: [1, G, K, d]."""
        parts = (_filled(context_TGd, behind), _filled(own_RBGd.flatten(0, 1), queries))
        return torch.cat(parts).transpose(0, 1)[None]

    q_1NQd = _filled(q_RBNd.flatten(0, 1), queries).transpose(0, 1)[None]
    out = attend_sparsely(q_1NQd, keys(k_RBGd, context_k_TGd), keys(v_RBGd, context_v_TGd), layout.cache["sparse"])
    return out[0, :, :asking].transpose(0, 1).view_as(q_RBNd)


def _filled(rows_TGd: Tensor, size: int) -> Tensor:
    """With rows of zeros behind."""
    return F.pad(rows_TGd, (0, 0, 0, 0, 0, size - len(rows_TGd)))
