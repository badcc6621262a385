"""Attention of an autoregressive drafter while it is unrolled in training.

Query (t, k), column t at step k, sees the step-0 keys of the columns <= t of its own document, and of each later step j
= 1 … k only its own key (t, j). That is what a server does: verified tokens sit in the drafter's cache with target
features (step 0), and the current draft's own keys follow behind column t. One softmax over both parts. With a window
of W, a query at position t + k sees keys at the W positions up to its own, as vLLM's sliding layers do.

Step 0 needs every column of a document as a key but only the M counted columns as queries, so queries and keys have
different lengths.

Three equal implementations: ``eager`` (documents one by one, plain products: fastest on a CPU with short documents, and
the reference), ``sdpa`` (torch's kernels, documents one by one), ``flex`` (block-sparse kernels on a GPU; the two parts
are merged by their log-sum-exp). No memory grows with the square of a document: of long ones ``eager`` and ``sdpa`` do
some queries at a time, and their backward pass does them again.

Legend: T columns, M of them counted, N heads, G key-value heads, R = N/G, d size of a head, q queries of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
# Scores of a document, a head: queries times keys. Above it, its queries are done in parts, which backward does again.
_MOST_SCORES = 1 << 22
_PART_SCORES = 1 << 20
_WINDOW_QUERIES = 256  # of a part, at least, however small the window


@dataclass(frozen=True)
class Span:
    """A document with queries: keys [key_start, key_end), queries [start, end) of all. ``again``: done anew in
    backward.
    """

    key_start: int
    key_end: int
    start: int
    end: int
    again: bool = False

    def parts(self, query_M: np.ndarray, window: int | None) -> list[Span]:
        """Runs of its queries, each with the keys from the first that its first one sees up to its last one: one where
        all scores are few enough.
        """
        keys, queries = self.key_end - self.key_start, self.end - self.start
        if keys * queries <= _MOST_SCORES:
            return [self]
        if window is not None:
            keys = min(keys, 2 * max(window, _WINDOW_QUERIES))
        step = max(1, _PART_SCORES // keys)
        if window is not None:
            step = min(step, max(window, _WINDOW_QUERIES))  # more would have keys that hardly any of them sees
        starts = range(self.start, self.end, step)
        ends = [min(start + step, self.end) for start in starts]
        return [
            Span(_first_seen(query_M, start, self.key_start, window), int(query_M[end - 1]) + 1, start, end, True)
            for start, end in zip(starts, ends, strict=True)
        ]


@dataclass
class ColumnLayout:
    """Which columns ask and which may answer. T columns in all, M of them counted (ascending)."""

    query_M: Tensor  # column of each counted query, int64
    host_query_M: np.ndarray
    document_ids_T: np.ndarray
    spans: list[Span]
    window: int | None = None  # positions that a query sees, its own included; None: all
    cache: dict[Any, Any] = field(default_factory=dict)  # masks, built once for all layers (and steps, if they share)
    step: int = 0  # of the queries, as far as it decides what they see: always 0 without a window

    @classmethod
    def build(
        cls,
        query_M: np.ndarray | Tensor,
        document_ids_T: np.ndarray | Tensor,
        device: torch.device | str = "cpu",
        window: int | None = None,
    ) -> ColumnLayout:
        """Of what is on the host; ``device``: where queries and keys will be."""
        query_M, document_ids_T = np.asarray(query_M), np.asarray(document_ids_T)
        keys = np.bincount(document_ids_T).tolist()
        queries = np.bincount(document_ids_T[query_M], minlength=len(keys)).tolist()
        spans, key, query = [], 0, 0
        for num_keys, num_queries in zip(keys, queries, strict=True):
            if num_queries:
                # Keys behind the last query of a document are seen by nobody.
                last = int(query_M[query + num_queries - 1]) + 1
                first = _first_seen(query_M, query, key, window)
                spans += Span(first, last, query, query + num_queries).parts(query_M, window)
            key, query = key + num_keys, query + num_queries
        return cls(on_device(query_M, torch.device(device)), query_M, document_ids_T, spans, window)

    def at_step(self, step: int) -> ColumnLayout:
        """That of the queries of a step, with the same cache."""
        return self if self.window is None else replace(self, step=step)

    def ranges(self) -> KeyRanges:
        """Step-0 keys of each query: those of its document, up to itself, as far as it sees."""
        starts_D = np.searchsorted(self.document_ids_T, np.arange(self.document_ids_T[-1] + 1))
        starts_M = starts_D[self.document_ids_T[self.host_query_M]]
        if self.window is not None:
            starts_M = np.maximum(starts_M, self.host_query_M + self.step + 1 - self.window)
        return KeyRanges(starts_M[None], self.host_query_M[None] + 1, len(self.document_ids_T))

    def hidden(self, span: Span) -> Tensor:
        """bool [q, keys]: which of a span's step-0 keys its queries do not see."""
        columns = torch.arange(span.key_start, span.key_end, device=self.query_M.device)
        query_q1 = self.query_M[span.start : span.end, None]
        hidden = columns[None] > query_q1
        return hidden if self.window is None else hidden | (columns[None] <= query_q1 + self.step - self.window)


def _first_seen(query_M: np.ndarray, query: int, key_start: int, window: int | None) -> int:
    """The first step-0 key of a document that a query sees at any step."""
    return key_start if window is None else max(key_start, int(query_M[query]) + 1 - window)


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
    layout = layout.at_step(len(own_k))
    if layout.window is not None:
        own_k, own_v = own_k[-layout.window :], own_v[-layout.window :]
    attend = {"eager": _eager, "sdpa": _sdpa, "flex": _flex}[backend]
    return attend(q_MNd, k0_TGd, v0_TGd, own_k, own_v, layout)


def _own_scores(q_MGRd: Tensor, own_k: list[Tensor]) -> Tensor:
    """Unscaled scores of the diagonal part, [M, G, R, k]: each query against its own column's keys."""
    keys_MGkd = torch.stack(own_k, dim=2)
    return q_MGRd @ keys_MGkd.transpose(-1, -2)


def _by_spans(layout: ColumnLayout, attend: Callable[[Span], Tensor]) -> Tensor:
    """[M, N, d] of all spans; of those that backward does again nothing is kept."""
    again = torch.is_grad_enabled()
    out = [
        checkpoint(attend, span, use_reentrant=False, preserve_rng_state=False)
        if span.again and again
        else attend(span)
        for span in layout.spans
    ]
    return torch.cat(out)


def _eager(
    q_MNd: Tensor,
    k0_TGd: Tensor,
    v0_TGd: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    layout: ColumnLayout,
) -> Tensor:
    m, n, d = q_MNd.shape
    g = k0_TGd.shape[1]
    q_MGRd = q_MNd.unflatten(1, (g, n // g)) * d**-0.5
    own_MGRk = _own_scores(q_MGRd, own_k) if own_k else None
    own_v_MGkd = torch.stack(own_v, dim=2) if own_v else None

    def attend(span: Span) -> Tensor:
        rows, columns = slice(span.start, span.end), slice(span.key_start, span.key_end)
        queries, keys = span.end - span.start, span.key_end - span.key_start
        q = q_MGRd[rows].permute(1, 2, 0, 3).reshape(g, -1, d)  # [G, R·q, d]: grouped heads share one product
        k, v = k0_TGd[columns].transpose(0, 1), v0_TGd[columns].transpose(0, 1)
        scores = (q @ k.transpose(1, 2)).view(g, -1, queries, keys) + _hidden_scores(layout, span, q.dtype)
        if own_MGRk is not None:
            scores = torch.cat([scores, own_MGRk[rows].permute(1, 2, 0, 3)], dim=-1)
        weights = F.softmax(scores, dim=-1)
        mixed = (weights[..., :keys].reshape(g, -1, keys) @ v).view(g, -1, queries, d)
        if own_v_MGkd is not None:
            own_weights = weights[..., keys:].unsqueeze(-2)  # [G, R, q, 1, k]
            mixed = mixed + (own_weights @ own_v_MGkd[rows].permute(1, 0, 2, 3).unsqueeze(1)).squeeze(-2)
        return mixed.permute(2, 0, 1, 3).reshape(queries, n, d)

    return _by_spans(layout, attend)


def _hidden_scores(layout: ColumnLayout, span: Span, dtype: torch.dtype) -> Tensor:
    """What is added to a span's scores, 0 or -inf [q, keys]; kept for later steps, unless that would be much."""
    known = layout.cache.get((span, layout.step))
    if known is not None:
        return known
    hidden = layout.hidden(span)
    scores = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    if not span.again:
        layout.cache[span, layout.step] = scores
    return scores


def _sdpa(
    q_MNd: Tensor,
    k0_TGd: Tensor,
    v0_TGd: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    layout: ColumnLayout,
) -> Tensor:
    share = q_MNd.shape[1] // k0_TGd.shape[1]

    def attend(span: Span) -> Tensor:
        rows, columns = slice(span.start, span.end), slice(span.key_start, span.key_end)
        visible = ~layout.hidden(span)
        if own_k:
            diagonal = torch.eye(len(visible), dtype=torch.bool, device=visible.device)
            visible = torch.cat([visible, *[diagonal] * len(own_k)], dim=1)
        k, v = (
            torch.cat([first[columns], *(own[rows] for own in rest)]).repeat_interleave(share, dim=1)
            for first, rest in ((k0_TGd, own_k), (v0_TGd, own_v))
        )
        q_1NMd, k_1NSd, v_1NSd = (x.transpose(0, 1)[None] for x in (q_MNd[rows], k, v))
        out = F.scaled_dot_product_attention(q_1NMd, k_1NSd, v_1NSd, attn_mask=visible[None, None])
        return out[0].transpose(0, 1)

    return _by_spans(layout, attend)


def _flex(
    q_MNd: Tensor,
    k0_TGd: Tensor,
    v0_TGd: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    layout: ColumnLayout,
) -> Tensor:
    m, n, d = q_MNd.shape
    g = k0_TGd.shape[1]
    queries, keys = bucket(m), bucket(len(k0_TGd))
    if ("sparse", layout.step) not in layout.cache:
        layout.cache["sparse", layout.step] = sparse_mask(layout.ranges().padded(queries, keys), q_MNd.device)
    q_1NQd, k_1GKd, v_1GKd = (
        F.pad(x, (0, 0, 0, 0, 0, size - len(x))).transpose(0, 1)[None]
        for x, size in ((q_MNd, queries), (k0_TGd, keys), (v0_TGd, keys))
    )
    out, aux = attend_sparsely(q_1NQd, k_1GKd, v_1GKd, layout.cache["sparse", layout.step], with_lse=True)
    out_MNd, lse_MN = out[0, :, :m].transpose(0, 1), aux.lse[0, :, :m].transpose(0, 1)
    if not own_k:
        return out_MNd
    own = _own_scores(q_MNd.unflatten(1, (g, n // g)) * d**-0.5, own_k).flatten(1, 2)  # [M, N, k]
    joint = torch.logsumexp(torch.cat([lse_MN[..., None].to(own.dtype), own], dim=-1), dim=-1, keepdim=True)
    weights_MGRk = (own - joint).exp().unflatten(1, (g, n // g))
    own_out = (weights_MGRk @ torch.stack(own_v, dim=2)).flatten(1, 2)
    return out_MNd * (lse_MN[..., None].to(own.dtype) - joint).exp() + own_out
