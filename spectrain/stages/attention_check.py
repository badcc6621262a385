"""Whether the attention kernels of training compute what plain products do: forward and backward, on each device.

A kernel that is wrong here trains a drafter that accepts little, and nothing else would tell. Inputs are those of a
small batch: documents of several lengths, grouped heads, columns that count and columns that do not.

Legend: N heads, G key-value heads, d their size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from spectrain.drafters.autoregressive.unroll import ColumnLayout, unrolled_attention
from spectrain.drafters.block.block_attention import BlockLayout, block_attention
from spectrain.stages.findings import Finding

_N, _G, _D = 4, 2, 32
_LENGTHS = (70, 90, 40)
_COLUMNS = (
    *range(60, 69),
    *range(100, 160, 7),
    199,
)  # of autoregressive drafters: positions that count; of others: anchors
_SLOTS = 5
_TOLERANCE = {"cpu": 1e-4, "cuda": 5e-3}  # float32; a GPU may multiply in TF32
_REMEDY = "use drafter.attention=eager, and report the versions of torch and of the driver"

Attend = Callable[[list[Tensor], str], Tensor]


def check_attention_kernels(backends: tuple[str, ...] = ("sdpa", "flex")) -> Iterator[Finding]:
    """A finding a device, kind of drafter and backend."""
    for device in _devices():
        for kind, (shapes, attend) in _kinds(device).items():
            for backend in backends:
                yield _compared(f"attention {kind} {backend} on {device}", shapes, attend, backend, device)


def _devices() -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def _kinds(device: str) -> dict[str, tuple[list[tuple[int, ...]], Attend]]:
    """Shapes of the inputs, and what is computed of them."""
    documents = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS)).to(device)
    columns = torch.tensor(_COLUMNS, device=device)
    total, count = sum(_LENGTHS), len(_COLUMNS)

    def unrolled(inputs: list[Tensor], backend: str) -> Tensor:
        query, key, value, own_key, own_value = inputs
        layout = ColumnLayout.build(columns, documents)
        return unrolled_attention(query, key, value, [own_key], [own_value], layout, backend)

    def blocks(inputs: list[Tensor], backend: str) -> Tensor:
        layout = BlockLayout.build(columns, documents, _SLOTS, None, False)
        query, own_key, own_value, key, value = inputs
        return block_attention(query, own_key, own_value, key, value, layout, backend)

    return {
        "unrolled": ([(count, _N, _D), *[(total, _G, _D)] * 2, *[(count, _G, _D)] * 2], unrolled),
        "block": ([(count, _SLOTS, _N, _D), *[(count, _SLOTS, _G, _D)] * 2, *[(total, _G, _D)] * 2], blocks),
    }


def _compared(name: str, shapes: list[tuple[int, ...]], attend: Attend, backend: str, device: str) -> Finding:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    # flex has no backward pass on a CPU, where nothing trains with it.
    backward = not (backend == "flex" and device == "cpu")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that flex runs uncompiled on a CPU
            wanted, found = (_run(attend, inputs, name, backward) for name in ("eager", backend))
    except Exception as error:  # of a compiler that is not there, a driver that is too old
        text = f"cannot be run: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
        return Finding(name, "warning" if device == "cpu" else "failure", text, _REMEDY)
    worst = max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted, strict=True))
    what = "forward and backward" if backward else "forward"
    limit = _TOLERANCE[device.partition(":")[0]]
    if not worst <= limit:
        return Finding(
            name, "failure", f"{what} differ from eager by {worst:.1e}, rounding explains {limit:g}", _REMEDY
        )
    return Finding(name, "ok", f"{what} equal eager up to {worst:.1e}")


def _run(attend: Attend, inputs: list[Tensor], backend: str, backward: bool) -> list[Tensor]:
    """Output, and the gradients of a fixed sum of it."""
    if not backward:
        return [attend([tensor.detach() for tensor in inputs], backend)]
    out = attend(inputs, backend)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]
