"""The types that hidden states are stored in, 8 bits with a scale for each row among them.

Apart from the store, because those who capture need this and not the store. What is derived from a hidden state and
stored beside it is derived from what its reader will see (``as_stored``).
"""

from __future__ import annotations

import torch
from torch import Tensor

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., H]`` -> int8 ``[..., H]`` and one float32 scale per row ``[...]``.

    The error is at most half a scale, which is 1/254 of the row's largest absolute value.
    """
    scale = x.float().abs().amax(dim=-1) / 127
    steps = x.float() / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return steps.round_().clamp_(-127, 127).to(torch.int8), scale


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """The float32 values that ``quantize`` rounded."""
    return q.float() * scale.unsqueeze(-1)


def as_stored(x: Tensor, dtype: str) -> Tensor:
    """``x`` as a reader of a store of this dtype will see it. What is derived from a hidden state and stored beside it
    is derived from this.
    """
    return dequantize(*quantize(x)) if dtype == "int8" else x.to(STATE_DTYPES[dtype])
