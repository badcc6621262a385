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


@dataclass(frozen=True)
class Step:
    """One optimiser step that was made."""

    sums: StepTotals
    gradient_norm: float  # before it was clipped
    seconds: float
    data_wait_s: float  # of these seconds, those in which there was no batch yet

    @property
    def data_wait_share(self) -> float:
        return self.data_wait_s / self.seconds


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

    def over_ranks(self, accelerator: Accelerator) -> SumsOverRanks:
        """Of all ranks, each of which has added a micro-batch at least. Nobody waits."""
        loss = self._sums["loss"]
        tokens = torch.full((1,), self._tokens, dtype=torch.float64, device=loss.device)
        flat = torch.cat([tokens, *(value.double().flatten() for value in self._sums.values())])
        alone = accelerator.num_processes == 1
        total = flat if alone else accelerator.reduce(flat, reduction="sum")
        # Alone, doubles hold them exactly: means are taken in the type in which they were summed.
        return SumsOverRanks(total, {name: (v.numel(), v.dtype if alone else None) for name, v in self._sums.items()})


@dataclass(frozen=True)
class SumsOverRanks:
    """Still on the device. ``parts``: numbers of each sum behind that of tokens, and the type that it has (None:
    double).
    """

    flat: Tensor
    parts: dict[str, tuple[int, torch.dtype | None]]

    @property
    def weight(self) -> Tensor:
        """What the gradients are divided by, a scalar on the device."""
        return self.flat[2]  # behind tokens and loss

    def read(self, norm: Tensor) -> tuple[StepTotals, float]:
        """The sums, and beside them the norm of the gradients, on the host. Waits for the device: the one time in a
        step.
        """
        host = torch.cat([self.flat, norm.double().reshape(1)]).cpu()
        split = host[1:-1].split([count for count, _ in self.parts.values()])
        found = {
            name: value if dtype is None else value.to(dtype)
            for (name, (_, dtype)), value in zip(self.parts.items(), split, strict=True)
        }
        totals = StepTotals(
            float(found.pop("loss")),
            float(found.pop("weight")),
            int(host[0]),
            hits_K=found.pop("hits"),
            count_K=found.pop("count"),
            terms_K=found,
        )
        return totals, float(host[-1])
