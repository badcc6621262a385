"""Products with the target's head whose results are float32, whatever the head is held in.

The logits of a teacher are large numbers whose small differences are probabilities: rounding them to bfloat16 costs one
part in 256 of each logit, where float32 sums of bfloat16 products lose nothing that hidden states in bfloat16 still
had. On a GPU that is one call of the matrix units; on a CPU, which has none for it, the matrix is widened some rows at
a time.

Legend: T rows, H hidden, D rows of the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from spectrain.target.cpu_kernels import linear

_WIDENED_ROWS = 4096


def wide_product(x_TH: Tensor, matrix_DH: Tensor) -> Tensor:
    """``x_TH @ matrix_DH.T`` in float32 at least. With a bfloat16 matrix ``x_TH`` is rounded to bfloat16, too, and sums
    are float32; such a product has no gradient.
    """
    if matrix_DH.dtype != torch.bfloat16 or x_TH.requires_grad:
        return linear(x_TH, matrix_DH)
    x_TH = x_TH.to(torch.bfloat16)
    if x_TH.is_cuda:
        flat = x_TH.flatten(0, -2)
        return torch.mm(flat, matrix_DH.T, out_dtype=torch.float32).unflatten(0, x_TH.shape[:-1])
    wide_TH = x_TH.float()
    return torch.cat([linear(wide_TH, rows.float()) for rows in matrix_DH.split(_WIDENED_ROWS)], dim=-1)


@contextmanager
def tf32(wanted: bool) -> Iterator[None]:
    """Inside, float32 products on a GPU may be computed in TF32, where ``wanted``."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = before or wanted
    try:
        yield
    finally:
        matmul.allow_tf32 = before
