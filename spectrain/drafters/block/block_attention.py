"""Attention of many blocks in one training pass.

A query, slot j of the block at anchor a, sees the context keys of its own document at positions < a (strictly: the
anchor's own taps do not exist yet when a server drafts) and the slots of its own block, all of them or those up to
itself; never another block. With a sliding window W it sees only what is less than W positions away from its own
position a + j. One softmax over both parts.

Three equal implementations: ``eager`` goes through the documents in groups of neighbouring blocks, so that a group's
keys end at its last anchor and nothing is computed across documents or between blocks (fastest on a CPU); ``sdpa`` is
one call with a dense mask over the context and all blocks' keys; ``flex`` is the same as block-sparse kernels, for a
GPU.

Legend: R blocks, B slots, T context tokens, N heads, G key-value heads, M = N/G heads that share keys, d size of a
head; r blocks and K context keys of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spectrain.drafters.layers import compiled_flex

BACKENDS = ("eager", "sdpa", "flex")
_GROUP_ROWS = (
    256  # queries per head of one group: enough for fast products, few enough that little lies behind the first anchor
)


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
    document_ids_T: Tensor
    slots: int
    window: int | None
    causal: bool
    groups: list[Group]
    cache: dict[Any, Any] = field(default_factory=dict)  # masks, built once for all layers

    @classmethod
    def build(
        cls, anchor_R: Tensor, document_ids_T: Tensor, slots: int, window: int | None, causal: bool
    ) -> BlockLayout:
        lengths = torch.bincount(document_ids_T).tolist()
        blocks = torch.bincount(document_ids_T[anchor_R], minlength=len(lengths)).tolist()
        anchors, step = anchor_R.tolist(), max(1, _GROUP_ROWS // slots)
        groups, key, block = [], 0, 0
        for num_keys, num_blocks in zip(lengths, blocks, strict=True):
            for start in range(block, block + num_blocks, step):
                end = min(start + step, block + num_blocks)
                first = key if window is None else max(key, anchors[start] - window + 1)
                groups.append(Group(first, anchors[end - 1], start, end))
            key, block = key + num_keys, block + num_blocks
        return cls(anchor_R, document_ids_T, slots, window, causal, groups)

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

    def hidden_scores(self, group: Group, dtype: torch.dtype) -> Tensor:
        """What is added to a group's scores, 0 or -inf: [r, 1, 1 or B, K]."""
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
    out = []
    for group in layout.groups:
        blocks, keys = slice(group.start, group.end), slice(group.key_start, group.key_end)
        out.append(
            _group(
                q_GRMBd[:, blocks],
                own_k_GRdB[:, blocks],
                own_v_GRBd[:, blocks],
                context_k_TGd[keys].permute(1, 2, 0),
                context_v_TGd[keys].transpose(0, 1),
                layout.hidden_scores(group, q_RBNd.dtype),
                layout.hidden_own(q_RBNd.dtype),
            )
        )
    return torch.cat(out, dim=1).permute(1, 3, 0, 2, 4).flatten(2, 3)


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


def _joined(blocks_RBGd: Tensor, context_TGd: Tensor) -> Tensor:
    """Keys or values of the context and then of all blocks, [1, G, T + R·B, d]."""
    return torch.cat([context_TGd, blocks_RBGd.flatten(0, 1)]).transpose(0, 1)[None]


def _visible_columns(layout: BlockLayout) -> Iterator[tuple[Group, Tensor]]:
    for group in layout.groups:
        yield group, layout.sees_context(group).expand(-1, layout.slots, -1).flatten(0, 1)


def _sdpa(
    q_RBNd: Tensor, k_RBGd: Tensor, v_RBGd: Tensor, context_k_TGd: Tensor, context_v_TGd: Tensor, layout: BlockLayout
) -> Tensor:
    r, b, n, _ = q_RBNd.shape
    if "visible" not in layout.cache:
        context = torch.zeros(r * b, len(context_k_TGd), dtype=torch.bool, device=q_RBNd.device)
        for group, visible in _visible_columns(layout):
            context[group.start * b : group.end * b, group.key_start : group.key_end] = visible
        own = torch.block_diag(*layout.sees_own().expand(r, -1, -1).unbind())
        layout.cache["visible"] = torch.cat([context, own], dim=1)
    share = n // k_RBGd.shape[2]
    k, v = (
        _joined(own, context).repeat_interleave(share, 1)
        for own, context in ((k_RBGd, context_k_TGd), (v_RBGd, context_v_TGd))
    )
    q_1NQd = q_RBNd.flatten(0, 1).transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(q_1NQd, k, v, attn_mask=layout.cache["visible"][None, None])
    return out[0].transpose(0, 1).view_as(q_RBNd)


def _flex(
    q_RBNd: Tensor, k_RBGd: Tensor, v_RBGd: Tensor, context_k_TGd: Tensor, context_v_TGd: Tensor, layout: BlockLayout
) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    r, b, n, _ = q_RBNd.shape
    t = len(context_k_TGd)
    if "block_mask" not in layout.cache:
        layout.cache["block_mask"] = create_block_mask(
            _mask_function(layout, t), None, None, r * b, t + r * b, device=str(q_RBNd.device)
        )
    attend = compiled_flex() if q_RBNd.is_cuda else flex_attention
    out = attend(
        q_RBNd.flatten(0, 1).transpose(0, 1)[None],
        _joined(k_RBGd, context_k_TGd),
        _joined(v_RBGd, context_v_TGd),
        block_mask=layout.cache["block_mask"],
        enable_gqa=n != k_RBGd.shape[2],
    )
    return out[0].transpose(0, 1).view_as(q_RBNd)


def _mask_function(layout: BlockLayout, num_context: int) -> Any:
    """Whether query (a slot of a block) sees key (a context token, or behind those a slot of a block)."""
    anchor_R, document_T, b, window = layout.anchor_R, layout.document_ids_T, layout.slots, layout.window

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        anchor = anchor_R[q // b]
        column, own = k.clamp(max=num_context - 1), (k - num_context).clamp(min=0)
        context = (k < num_context) & (column < anchor) & (document_T[column] == document_T[anchor])
        back = q % b - own % b
        same = (k >= num_context) & (own // b == q // b)
        if layout.causal:
            same = same & (back >= 0)
        if window is not None:
            context, same = context & (anchor + q % b - column < window), same & (back.abs() < window)
        return context | same

    return visible
