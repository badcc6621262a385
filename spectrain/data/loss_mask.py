"""What a document's loss mask says: which tokens the target generated, as ranges, and which positions predict one of
them.

A mask has a 1 for each token that the target generated, its answers and the end tokens that belong to them, and a 0 for
what it was given.

Legend: S tokens of a document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def generated_ranges(loss_mask_S: Sequence[int] | npt.NDArray[np.generic]) -> list[tuple[int, int]]:
    """[start, end) of each run of generated tokens, in order: of each answer."""
    edges = np.flatnonzero(np.diff(np.asarray(loss_mask_S, dtype=np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def mask_of_ranges(ranges: Iterable[tuple[int, int]], length: int) -> Tensor:
    """The mask, [length] uint8, whose generated ranges these are."""
    mask_S = torch.zeros(length, dtype=torch.uint8)
    for start, end in ranges:
        mask_S[start:end] = 1
    return mask_S


def predicts_generated(loss_mask_S: Tensor) -> Tensor:
    """Where the next token is a generated one, [S] bool: what the target says there is trained on. The last position
    has no next token.
    """
    return torch.cat([loss_mask_S[1:].bool(), loss_mask_S.new_zeros(1, dtype=torch.bool)])
