"""Keys and values of a drafter while a text grows, in buffers that every shape of drafter shares.

Legend: B rows, G key-value heads, d size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spectrain.drafters.layers import LayerShape

_START_SLOTS = 64


class KeyValueCache:
    """Per layer keys and values [B, capacity, G, d]; row b holds ``columns_B[b]`` columns, what lies behind them is
    scratch.
    """

    def __init__(self, layer: LayerShape, num_layers: int, batch_size: int, weight: Tensor) -> None:
        """``weight`` lends its type and device."""
        shape = (batch_size, _START_SLOTS, layer.num_key_value_heads, layer.head_dim)
        self.keys = [weight.new_zeros(shape) for _ in range(num_layers)]
        self.values = [weight.new_zeros(shape) for _ in range(num_layers)]
        self.columns_B = torch.zeros(batch_size, dtype=torch.long, device=weight.device)

    def reserve(self, slots: int) -> None:
        """Make room for ``slots`` columns a row, growing by doubling."""
        have = self.keys[0].shape[1]
        if slots > have:
            extra = max(slots, 2 * have) - have
            self.keys = [F.pad(k, (0, 0, 0, 0, 0, extra)) for k in self.keys]
            self.values = [F.pad(v, (0, 0, 0, 0, 0, extra)) for v in self.values]

    def select(self, rows_B: Tensor) -> None:
        self.keys = [k[rows_B] for k in self.keys]
        self.values = [v[rows_B] for v in self.values]
        self.columns_B = self.columns_B[rows_B]


def draft_uniforms(generators: Sequence[torch.Generator] | None, n: int, like: Any) -> Tensor:
    """[B, n] numbers that drafts are drawn by, each row from its own stream, on the device of ``like``."""
    if generators is None:
        raise ValueError("sampled drafts need a random generator per row")
    return torch.stack([torch.rand(n, generator=generator, dtype=torch.float64) for generator in generators]).to(
        like.device
    )
