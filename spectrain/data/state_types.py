"""The types that hidden states are stored in, those of 8 bits with scales beside them.

Apart from the store, because those who capture need this and not the store. What is derived from a hidden state and
stored beside it is derived from what its reader will see (``as_stored``).

``int8`` has one scale a row (a token's tap), which a channel much larger than the others makes coarse for all of them;
``int8_grouped`` has one for every ``GROUP`` channels, so that such a channel spoils its own group alone, for 6 % more
bytes. ``float8_e4m3`` is OCP's (largest value 448, no infinities; not the FNUZ kind of gfx942, whose bits mean half as
much): 3 bits of fraction at every size, so a row needs one scale only to fit into its range.
"""

from __future__ import annotations

import torch
from torch import Tensor

STATE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int8_grouped": torch.int8,
    "float8_e4m3": torch.float8_e4m3fn,
}
GROUP = 64  # channels
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def scale_shape(dtype: str, width: int) -> tuple[int, ...] | None:
    """Of the scales that a row of so many channels has in a type; None: it needs none."""
    if STATE_DTYPES[dtype] not in _LARGEST:
        return None
    return (-(-width // GROUP),) if dtype == "int8_grouped" else ()


def quantize(x: Tensor, dtype: str = "int8") -> tuple[Tensor, Tensor]:
    """``[..., H]`` -> 8 bits ``[..., H]`` and float32 scales, ``[...]`` or of groups ``[..., G]``.

    The error of int8 is at most half a scale, which is 1/254 of the largest absolute value that shares it; that of
    float8_e4m3 1/16 of the value itself, or half a step of its smallest ones.
    """
    stored = STATE_DTYPES[dtype]
    largest, grouped = _LARGEST[stored], scale_shape(dtype, x.shape[-1]) != ()
    size = x.float().abs()
    scale = (_in_groups(size).amax(dim=-1) if grouped else size.amax(dim=-1)) / largest
    steps = x.float() / _by_channel(scale.clamp_min(torch.finfo(torch.float32).tiny), x)
    if stored == torch.int8:
        steps.round_()
    return steps.clamp_(-largest, largest).to(stored), scale


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """The float32 values that ``quantize`` rounded."""
    return q.float() * _by_channel(scale, q)


def _in_groups(x: Tensor) -> Tensor:
    """[..., H] -> [..., G, GROUP]; the last group is filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def _by_channel(scale: Tensor, x: Tensor) -> Tensor:
    """Scales of rows [...] or groups [..., G], as they multiply with ``x`` [..., H]."""
    if scale.ndim < x.ndim:
        return scale.unsqueeze(-1)
    return scale.repeat_interleave(GROUP, dim=-1)[..., : x.shape[-1]]


def as_stored(x: Tensor, dtype: str) -> Tensor:
    """``x`` as a reader of a store of this dtype will see it. What is derived from a hidden state and stored beside it
    is derived from this.
    """
    scaled = scale_shape(dtype, x.shape[-1]) is not None
    return dequantize(*quantize(x, dtype)) if scaled else x.to(STATE_DTYPES[dtype])
