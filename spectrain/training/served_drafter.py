"""The drafter as a server will run it, for the evaluations of training: in 16 bits where the target is.

Trained are float32 weights; vLLM computes drafter and target in one type. What rounding to 16 bits costs in acceptance,
an evaluation shows where it is made in that type, so the best drafter is the best of those that are served. The copy is
there while an evaluation lasts: two bytes a parameter, beside those of training (``stages/training_memory.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spectrain.drafters.drafter import Drafter
from spectrain.training.strategies import WholeCopy

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class ServedDrafter:
    """``dtype``: what it is served in."""

    def __init__(self, drafter: Drafter, dtype: torch.dtype) -> None:
        """``drafter``: the one that is trained, before it is sharded."""
        self.dtype = dtype
        self._copy = WholeCopy(drafter) if dtype in SIXTEEN_BITS else None

    @contextmanager
    def like(self, drafter: Drafter) -> Iterator[Drafter]:
        """For evaluation, with the weights that the whole ``drafter`` has now."""
        drafter.eval()
        try:
            if self._copy is None:
                yield drafter
                return
            device = next(drafter.parameters()).device
            with self._copy.lent(p.detach().to(self.dtype) for p in drafter.parameters()) as served:
                yield served.to(device).eval()  # buffers, too: the copy was made before the drafter was moved
        finally:
            drafter.train()
