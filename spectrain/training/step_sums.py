"""What one optimiser step adds up, over its micro-batches and over ranks.

Sums stay on the device, where adding to them keeps nobody waiting; they are read once a step, in one transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from spectrain.drafters.losses.fused import LossSums


@dataclass(frozen=True)
class StepTotals:
    """Sums of a step over all ranks, on the host. K: steps or slots of the drafter."""

    loss: float
    weight: float
    tokens: int
    terms_K: dict[str, Tensor]
    hits_K: Tensor
    count_K: Tensor

    def metrics(self) -> dict[str, Any]:
        """What a step logs of them: means over positions."""
        count_K = self.count_K.clamp(min=1)
        return {
            **{f"{name}_per_step": (value / count_K).tolist() for name, value in self.terms_K.items()},
            "accuracy_per_step": (self.hits_K / count_K).tolist(),
            "positions": int(self.count_K[0]),
        }


class StepSums:
    """Sums of this rank, on the device."""

    def __init__(self) -> None:
        self._tokens = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, sums: LossSums, tokens: int) -> None:
        """Add a micro-batch. Nothing here waits for the device. Loss and weight are added in double precision."""
        values = {"loss": sums.loss.detach().double(), "weight": sums.weight.double()}
        values |= {"hits": sums.hits_K, "count": sums.count_K, **sums.terms_K}
        for name, value in values.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._tokens += tokens

    def totals(self, accelerator: Accelerator) -> StepTotals:
        """Over all ranks, each of which has added a micro-batch at least. Waits for the device, once."""
        loss = self._sums["loss"]
        tokens = torch.full((1,), self._tokens, dtype=torch.float64, device=loss.device)
        flat = torch.cat([tokens, *(value.double().flatten() for value in self._sums.values())])
        alone = accelerator.num_processes == 1
        host = (flat if alone else accelerator.reduce(flat, reduction="sum")).cpu()
        sizes = [value.numel() for value in self._sums.values()]
        found = dict(zip(self._sums, host[1:].split(sizes), strict=True))
        if alone:  # doubles hold them exactly: means are taken in the type in which they were summed
            found = {name: value.to(self._sums[name].dtype) for name, value in found.items()}
        return StepTotals(
            float(found.pop("loss")),
            float(found.pop("weight")),
            int(host[0]),
            hits_K=found.pop("hits"),
            count_K=found.pop("count"),
            terms_K=found,
        )
