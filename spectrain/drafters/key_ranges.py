"""Who sees whom in a packed batch, as ranges of keys: masks of attention that are never made of all pairs.

Documents lie end to end, so the keys that a query sees are one range (its document up to itself), or two (a block's
context, and its own slots behind all context). Four numbers a query say everything; a mask of all pairs, at 32,768
queries and as many keys, would be a gigabyte of bools.

``sparse_mask`` gives flex attention its blocks of 128 queries and 128 keys: those in which nobody sees anything are
left out, those in which everybody sees everything need no mask, and the rest ask the ranges. ``bucket`` rounds numbers
of queries and keys up to a few sizes, so that few graphs and kernels are compiled for all batches there will ever be.

Legend: S ranges of a query, Q queries, K keys, I and J blocks of queries and of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectrain.data.host_tokens import on_device

BLOCK = 128  # queries, and keys, of a block of flex attention's mask


def bucket(count: int) -> int:
    """The number that ``count`` queries or keys are padded to: a multiple of ``BLOCK``, and of every power of two
    upwards from 4·``BLOCK`` one of four sizes. At most a quarter is padding, in the mean a tenth.
    """
    blocks = max(1, -(-count // BLOCK))
    step = 1 << max(0, blocks.bit_length() - 3)
    return -(-blocks // step) * step * BLOCK


@dataclass(frozen=True)
class KeyRanges:
    """Query q sees the keys ``starts_SQ[s, q]`` … ``ends_SQ[s, q]`` − 1 of each s; none where the end is not behind the
    start. Ranges of one query do not overlap.
    """

    starts_SQ: np.ndarray
    ends_SQ: np.ndarray
    num_keys: int

    def padded(self, queries: int, keys: int) -> KeyRanges:
        """With more queries, each of which sees key 0 alone so that no softmax is empty, and more keys, which nobody
        sees.
        """
        more = queries - self.starts_SQ.shape[1]
        ends = np.zeros((len(self.ends_SQ), more), dtype=self.ends_SQ.dtype)
        ends[0] = 1
        starts = np.zeros_like(ends)
        return KeyRanges(np.hstack([self.starts_SQ, starts]), np.hstack([self.ends_SQ, ends]), keys)

    def visible(self, device: torch.device) -> Tensor:
        """bool [Q, K]: the mask of all pairs."""
        key_K = torch.arange(self.num_keys, device=device)
        starts, ends = (on_device(x, device)[..., None] for x in (self.starts_SQ, self.ends_SQ))
        return ((starts <= key_K) & (key_K < ends)).any(0)


def block_counts(ranges: KeyRanges) -> tuple[np.ndarray, np.ndarray]:
    """int32 [I, J]: how many queries of block i see something of block j, and how many see all of it. Of multiples of
    ``BLOCK`` queries and keys.
    """
    queries = ranges.starts_SQ.shape[1]
    shape = (queries // BLOCK, ranges.num_keys // BLOCK + 1)
    some_IJ, all_IJ = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    row_Q = np.arange(queries) // BLOCK
    for start_Q, end_Q in zip(ranges.starts_SQ, ranges.ends_SQ, strict=True):
        seen_Q = end_Q > start_Q
        _add_runs(some_IJ, row_Q[seen_Q], start_Q[seen_Q] // BLOCK, (end_Q[seen_Q] - 1) // BLOCK + 1)
        first_Q, behind_Q = -(-start_Q // BLOCK), end_Q // BLOCK
        whole_Q = behind_Q > first_Q
        _add_runs(all_IJ, row_Q[whole_Q], first_Q[whole_Q], behind_Q[whole_Q])
    return some_IJ.cumsum(1)[:, :-1], all_IJ.cumsum(1)[:, :-1]


def _add_runs(counts_IJ: np.ndarray, row: np.ndarray, first: np.ndarray, behind: np.ndarray) -> None:
    """One more in the columns ``first`` … ``behind`` − 1 of each row, as differences of neighbouring columns."""
    np.add.at(counts_IJ, (row, first), 1)
    np.add.at(counts_IJ, (row, behind), -1)


def sparse_mask(ranges: KeyRanges, device: torch.device) -> Any:
    """The BlockMask of flex attention. Queries and keys are multiples of ``BLOCK``."""
    from torch.nn.attention.flex_attention import BlockMask

    some_IJ, all_IJ = block_counts(ranges)
    full_IJ = all_IJ == BLOCK
    some, full = ([on_device(x, device) for x in _table(kept)] for kept in ((some_IJ > 0) & ~full_IJ, full_IJ))
    starts_SQ, ends_SQ = (on_device(x.astype(np.int32), device) for x in (ranges.starts_SQ, ranges.ends_SQ))
    return BlockMask.from_kv_blocks(
        some[0],
        some[1],
        full[0],
        full[1],
        BLOCK_SIZE=BLOCK,
        mask_mod=_asks_ranges(starts_SQ, ends_SQ),
        seq_lengths=(ranges.starts_SQ.shape[1], ranges.num_keys),
    )


def _table(kept_IJ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of keys for each block of queries: how many, and which, ahead of the rest ([1, 1, I] and [1, 1, I, J])."""
    order_IJ = np.argsort(~kept_IJ, axis=1, kind="stable")
    return kept_IJ.sum(1).astype(np.int32)[None, None], order_IJ.astype(np.int32)[None, None]


def _asks_ranges(starts_SQ: Tensor, ends_SQ: Tensor) -> Any:
    if len(starts_SQ) == 1:

        def in_range(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (starts_SQ[0, q] <= k) & (k < ends_SQ[0, q])

        return in_range

    def in_either(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        context = (starts_SQ[0, q] <= k) & (k < ends_SQ[0, q])
        return context | ((starts_SQ[1, q] <= k) & (k < ends_SQ[1, q]))

    return in_either
