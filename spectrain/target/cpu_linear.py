"""Matrix products of decoding on a CPU by oneDNN instead of MKL.

torch sends float32 products to MKL, whose kernels for a handful of rows are slow on many processors: for the layers of SmolLM2-135M, on
an EPYC with two threads, four rows cost 65 ms where one costs 36. oneDNN, which torch ships too, takes 31 and 24: verifying four drafts
is then nearly as cheap as decoding one token, which is what speculative decoding lives on. Same float32 products, another order of sums.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, by oneDNN where it can and no gradient is asked for."""
    if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and not torch.is_grad_enabled() and _available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class CpuLinear(nn.Linear):
    """``nn.Linear`` through ``linear``."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def speed_up(model: nn.Module) -> None:
    """Let every plain ``nn.Linear`` of a model that decodes on the CPU use ``linear``; parameters and names stay as they are."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu":
            module.__class__ = CpuLinear


def _available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
