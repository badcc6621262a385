"""Batches of random shapes through flex attention, as training calls it: how many graphs are compiled for them?"""

from __future__ import annotations

import random

import torch

from spectrain.drafters.autoregressive.column_attention import ColumnLayout, unrolled_attention
from spectrain.drafters.block.block_attention import BlockLayout, block_attention

N, G, D = 4, 2, 32


def run_random_shape(draw: random.Random, device: str) -> None:
    """One pass of either kind of drafter over a packed sequence of up to 3,000 tokens; on a CPU, where flex attention
    has no backward pass, of up to 1,200.
    """
    trains = device != "cpu"
    lengths = [draw.randrange(20, 700 if trains else 300) for _ in range(draw.randrange(1, 5))]
    document_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    total = sum(lengths)
    rows = torch.tensor(sorted(draw.sample(range(1, total), draw.randrange(1, total // 2))))
    if draw.random() < 0.5:
        layout = ColumnLayout.build(rows, document_ids, device)
        q, k = torch.randn(len(rows), N, D, device=device), torch.randn(total, G, D, device=device)
        own = [torch.randn(len(rows), G, D, device=device)] * draw.randrange(3)
        q.requires_grad_(draw.random() < 0.5 and trains)
        out = unrolled_attention(q, k, k, own, own, layout, "flex")
    else:
        slots, anchors = draw.choice([4, 8]), rows[: draw.randrange(1, 300)]
        blocks = BlockLayout.build(anchors, document_ids, slots, draw.choice([None, 64]), False, device)
        q, own_k = (torch.randn(len(anchors), slots, heads, D, device=device) for heads in (N, G))
        k = torch.randn(total, G, D, device=device)
        q.requires_grad_(draw.random() < 0.5 and trains)
        out = block_attention(q, own_k, own_k, k, k, blocks, "flex")
    if out.requires_grad:
        out.sum().backward()
