"""The small pieces of a decoder layer between its products (norms, rotary phases, SwiGLU), and how they are compiled
where ``trainer.compile`` says so.

Each of them is a few operations on every number, and on an accelerator each operation reads and writes all of them once
more; compiled, a piece is one kernel forward and one backward. Products and attention stay as they are: they have
kernels of their own. One graph serves all shapes of a kind (sizes are symbols), so that a training of batches of all
lengths compiles a few dozen at its beginning and none later. Values are those of the operations one by one within
rounding: kernels may keep in float32 what lies between two operations of bfloat16.

Off, and outside a training's steps, this is what it was before: the same operations, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spectrain.errors import RunError

BACKEND: Any = "inductor"
# Of one piece: ranks of tensors, types, with and without gradients, and sizes of 1, which torch compiles apart.
MOST_GRAPHS = 32

_on = False


@contextmanager
def compiled_pieces(on: bool) -> Iterator[None]:
    """Inside, pieces are compiled, at their first use with tensors of a kind. A backward pass that runs layers again
    belongs inside, too.
    """
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


def _piece(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    compiled: dict[Any, Callable[..., Tensor]] = {}  # by backend

    @wraps(function)
    def call(*arguments: Any) -> Tensor:
        if not _on:
            return function(*arguments)
        if BACKEND not in compiled:
            compiled[BACKEND] = torch.compile(function, dynamic=True, fullgraph=True, backend=BACKEND)
        return _compiled(compiled[BACKEND], *arguments)

    return call


def _compiled(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Raises RunError where it cannot be compiled."""
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import InductorError

    try:
        with config.patch(recompile_limit=MOST_GRAPHS):
            return function(*arguments)
    except (TorchDynamoException, FailOnRecompileLimitHit, InductorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(
            f"norms, rotary phases and SwiGLU could not be compiled on this machine ({reason}): set "
            f"trainer.compile=false"
        ) from error


@_piece
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x²) + eps)`` over the last dimension, in float32 where x has 16 bits."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


@_piece
def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary phases [..., T, hd] on x [..., T, N, hd]."""
    cos, sin = (part.unsqueeze(-2).to(x.dtype) for part in (cos, sin))
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


@_piece
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """The units of SwiGLU."""
    return F.silu(gate) * up
