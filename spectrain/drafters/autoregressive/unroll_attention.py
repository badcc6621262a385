"""Attention of an autoregressive drafter while it is unrolled in training.

Query (t, k), column t at step k, sees the step-0 keys of the columns <= t of its own document, and of each later step j
= 1 … k only its own key (t, j). That is what a server does: verified tokens sit in the drafter's cache with target
features (step 0), and the current draft's own keys follow behind column t. One softmax over both parts.

Step 0 needs every column of a document as a key but only the M counted columns as queries, so queries and keys have
different lengths.

Three equal implementations: ``eager`` (documents one by one, plain products: fastest on a CPU with short documents, and
the reference), ``sdpa`` (one masked call), ``flex`` (block-sparse kernels on a GPU; the two parts are merged by their
log-sum-exp).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spectrain.drafters.layers import compiled_flex

BACKENDS = ("eager", "sdpa", "flex")


@dataclass
class ColumnLayout:
    """Which columns ask and which may answer. T columns in all, M of them counted (ascending)."""

    query_M: Tensor  # column of each counted query, int64
    document_ids_T: Tensor
    spans: list[tuple[int, int, int, int]]  # per document with queries: key start, key end, query start, query end
    cache: dict[str, Any] = field(default_factory=dict)  # masks, built once for all layers and steps

    @classmethod
    def build(cls, query_M: Tensor, document_ids_T: Tensor) -> ColumnLayout:
        documents = int(document_ids_T.max()) + 1 if len(document_ids_T) else 0
        keys = torch.bincount(document_ids_T, minlength=documents).tolist()
        queries = torch.bincount(document_ids_T[query_M], minlength=documents).tolist()
        spans, key, query = [], 0, 0
        for num_keys, num_queries in zip(keys, queries, strict=True):
            if num_queries:
                # Keys behind the last query of a document are seen by nobody.
                last = int(query_M[query + num_queries - 1]) + 1
                spans.append((key, last, query, query + num_queries))
            key, query = key + num_keys, query + num_queries
        return cls(query_M, document_ids_T, spans)

    def visible_MT(self) -> Tensor:
        """bool [M, T]: step-0 key column <= query column, same document."""
        if "visible" not in self.cache:
            columns = torch.arange(len(self.document_ids_T), device=self.query_M.device)
            same = self.document_ids_T[self.query_M][:, None] == self.document_ids_T[None]
            self.cache["visible"] = same & (columns[None] <= self.query_M[:, None])
        return self.cache["visible"]


def unrolled_attention(
    q_MNd: Tensor,
    k0_TGd: Tensor,
    v0_TGd: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    layout: ColumnLayout,
    backend: str,
) -> Tensor:
    """Attend from M counted columns.

    Args:
        q_MNd: queries of one step, N heads of size d.
        k0_TGd, v0_TGd: step-0 keys and values of every column, G key/value heads (N is a multiple of G).
        own_k, own_v: keys and values [M, G, d] of steps 1 … k at the same columns (empty at step 0).
        layout: columns and documents.
        backend: one of ``BACKENDS``.

    Returns [M, N, d].
    """
    if len(q_MNd) == 0:
        return q_MNd  # a batch in which no column counts; flex_attention cannot do it
    return {"eager": _eager, "sdpa": _sdpa, "flex": _flex}[backend](q_MNd, k0_TGd, v0_TGd, own_k, own_v, layout)


def _own_scores(q_MGRd: Tensor, own_k: list[Tensor]) -> Tensor:
    """Unscaled scores of the diagonal part, [M, G, R, k]: each query against its own column's keys."""
    keys_MGkd = torch.stack(own_k, dim=2)
    return q_MGRd @ keys_MGkd.transpose(-1, -2)


def _eager(
    q_MNd: Tensor, k0_TGd: Tensor, v0_TGd: Tensor, own_k: list[Tensor], own_v: list[Tensor], layout: ColumnLayout
) -> Tensor:
    m, n, d = q_MNd.shape
    g = k0_TGd.shape[1]
    q_MGRd = q_MNd.unflatten(1, (g, n // g)) * d**-0.5
    own_MGRk = _own_scores(q_MGRd, own_k) if own_k else None
    own_v_MGkd = torch.stack(own_v, dim=2) if own_v else None
    out = []
    for index, (k_start, k_end, q_start, q_end) in enumerate(layout.spans):
        queries, keys = q_end - q_start, k_end - k_start
        q = q_MGRd[q_start:q_end].permute(1, 2, 0, 3).reshape(g, -1, d)  # [G, R·q, d]: grouped heads share one product
        k, v = k0_TGd[k_start:k_end].transpose(0, 1), v0_TGd[k_start:k_end].transpose(0, 1)
        name = f"hidden{index}"
        if name not in layout.cache:
            columns = torch.arange(k_start, k_end, device=q.device)
            hidden = columns[None] > layout.query_M[q_start:q_end, None]
            layout.cache[name] = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(
                hidden, float("-inf")
            )
        scores = (q @ k.transpose(1, 2)).view(g, -1, queries, keys) + layout.cache[name]
        if own_MGRk is not None:
            scores = torch.cat([scores, own_MGRk[q_start:q_end].permute(1, 2, 0, 3)], dim=-1)
        weights = F.softmax(scores, dim=-1)
        mixed = (weights[..., :keys].reshape(g, -1, keys) @ v).view(g, -1, queries, d)
        if own_v_MGkd is not None:
            own_weights = weights[..., keys:].unsqueeze(-2)  # [G, R, q, 1, k]
            mixed = mixed + (own_weights @ own_v_MGkd[q_start:q_end].permute(1, 0, 2, 3).unsqueeze(1)).squeeze(-2)
        out.append(mixed.permute(2, 0, 1, 3).reshape(queries, n, d))
    return torch.cat(out) if out else q_MNd * 0


def _sdpa(
    q_MNd: Tensor, k0_TGd: Tensor, v0_TGd: Tensor, own_k: list[Tensor], own_v: list[Tensor], layout: ColumnLayout
) -> Tensor:
    m, n, _ = q_MNd.shape
    visible = layout.visible_MT()
    if own_k:
        diagonal = torch.eye(m, dtype=torch.bool, device=visible.device)
        visible = torch.cat([visible, *[diagonal] * len(own_k)], dim=1)
    k, v = (
        torch.cat([first, *rest]).repeat_interleave(n // first.shape[1], dim=1)
        for first, rest in ((k0_TGd, own_k), (v0_TGd, own_v))
    )
    q_1NMd, k_1NSd, v_1NSd = (x.transpose(0, 1)[None] for x in (q_MNd, k, v))
    out = F.scaled_dot_product_attention(q_1NMd, k_1NSd, v_1NSd, attn_mask=visible[None, None])
    return out[0].transpose(0, 1)


def _flex(
    q_MNd: Tensor, k0_TGd: Tensor, v0_TGd: Tensor, own_k: list[Tensor], own_v: list[Tensor], layout: ColumnLayout
) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    m, n, d = q_MNd.shape
    g = k0_TGd.shape[1]
    if "block_mask" not in layout.cache:
        query_M, document_T = layout.query_M, layout.document_ids_T

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            column = query_M[q]
            return (k <= column) & (document_T[k] == document_T[column])

        layout.cache["block_mask"] = create_block_mask(
            visible, None, None, m, len(document_T), device=str(q_MNd.device)
        )
    attend = compiled_flex() if q_MNd.is_cuda else flex_attention
    out, aux = attend(
        *(x.transpose(0, 1)[None] for x in (q_MNd, k0_TGd, v0_TGd)),
        block_mask=layout.cache["block_mask"],
        enable_gqa=n != g,
        return_aux=AuxRequest(lse=True),
    )
    out_MNd, lse_MN = out[0].transpose(0, 1), aux.lse[0].transpose(0, 1)
    if not own_k:
        return out_MNd
    own = _own_scores(q_MNd.unflatten(1, (g, n // g)) * d**-0.5, own_k).flatten(1, 2)  # [M, N, k]
    joint = torch.logsumexp(torch.cat([lse_MN[..., None].to(own.dtype), own], dim=-1), dim=-1, keepdim=True)
    weights_MGRk = (own - joint).exp().unflatten(1, (g, n // g))
    own_out = (weights_MGRk @ torch.stack(own_v, dim=2)).flatten(1, 2)
    return out_MNd * (lse_MN[..., None].to(own.dtype) - joint).exp() + own_out
