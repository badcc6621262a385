"""DFlash2's dynamic convolution: each channel mixes the last k slots of its block, before and after attention and MLP.

The coefficient of tap i (i slots back) at a slot is ``base_kernel[side, i, channel]`` plus a part that depends on the
slot's own input, shared by ``group_size`` neighbouring channels. Side 0 is applied to what attention (or the MLP)
reads, side 1 to what it gives; both dynamic parts come from the input of side 0. Nothing crosses the beginning of a
block.

Legend: R blocks, B slots, H hidden, K taps of the kernel (tap 0 is the slot itself), C groups of channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spectrain.drafters.block.block_shape import ConvShape


class GroupedConv(nn.Module):
    """Identity when fresh: base coefficient 1 on the slot itself, no dynamic part."""

    def __init__(self, shape: ConvShape, hidden_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.num_groups = hidden_size // shape.group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, shape.kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * shape.kernel_size * self.num_groups, bias=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def before(self, x_RBH: Tensor) -> tuple[Tensor, Tensor]:
        """(the input, mixed [R, B, H]; the dynamic coefficients [R, B, K, C] for ``after``)."""
        dynamic_RB2KC = self.kernel_projection(x_RBH).unflatten(-1, (2, self.shape.kernel_size, self.num_groups))
        return self._mix(x_RBH, dynamic_RB2KC[:, :, 0], 0), dynamic_RB2KC[:, :, 1]

    def after(self, x_RBH: Tensor, dynamic_RBKC: Tensor) -> Tensor:
        return self._mix(x_RBH, dynamic_RBKC, 1)

    def _mix(self, x_RBH: Tensor, dynamic_RBKC: Tensor, side: int) -> Tensor:
        groups = (self.num_groups, self.shape.group_size)
        x_RBCg = x_RBH.unflatten(-1, groups)
        base_KCg = self.base_kernel[side].unflatten(-1, groups)
        mixed_RBCg = (base_KCg[0] + dynamic_RBKC[:, :, 0, :, None]) * x_RBCg
        for tap in range(1, min(self.shape.kernel_size, x_RBH.shape[1])):
            term_RbCg = (base_KCg[tap] + dynamic_RBKC[:, tap:, tap, :, None]) * x_RBCg[:, :-tap]
            mixed_RBCg = mixed_RBCg + nn.functional.pad(term_RbCg, (0, 0, 0, 0, tap, 0))
        return mixed_RBCg.flatten(-2).to(x_RBH.dtype)
