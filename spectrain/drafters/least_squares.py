"""Least squares from sums: what the closed-form initialisations are solved with. S samples, I inputs, O outputs."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 3e-3  # of the mean diagonal of the Gram matrix


class Gram:
    """Sums of a least-squares problem, XᵀX and XᵀY, in float64."""

    def __init__(self) -> None:
        self.xx: Tensor | float = 0.0
        self.xy: Tensor | float = 0.0

    def add(self, x_SI: Tensor, y_SO: Tensor) -> None:
        self.xx = self.xx + (x_SI.T @ x_SI).double()
        self.xy = self.xy + (x_SI.T @ y_SO).double()

    def solve(self) -> Tensor:
        """Ridge solution [I, O]."""
        assert isinstance(self.xx, Tensor) and isinstance(self.xy, Tensor)
        ridge = RIDGE * self.xx.diagonal().mean() * torch.eye(len(self.xx), dtype=self.xx.dtype, device=self.xx.device)
        return torch.linalg.solve(self.xx + ridge, self.xy)


def unit(x: Tensor) -> Tensor:
    """Divided by its root mean square: a hidden state as the final norm sees it."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
