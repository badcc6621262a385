"""How many of a round's drafts are verified: all, while their survival is above a threshold, or as many as pay
(``scheduler.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spectrain.config.schema import DecodingConfig
from spectrain.decoding.confidence import survival
from spectrain.decoding.scheduler import SchedulerPolicy, StepCost

FIXED, THRESHOLD, SCHEDULER = "fixed", "threshold", "scheduler"


class DraftPolicy(Protocol):
    """How many of the drafts that were made are verified."""

    def lengths(self, confidence_Bn: Tensor, drafted_B: list[int]) -> list[int]:
        """Drafts to keep, at most ``drafted_B[b]`` of row b, from calibrated confidences [B, n].

        Keeping slot j of a row may depend on that row's confidences up to slot j and on other rows, never on a later
        slot of the same row.
        """
        ...


@dataclass(frozen=True)
class ThresholdPolicy:
    """Drafts are kept while their survival is at least ``threshold``."""

    threshold: float

    def lengths(self, confidence_Bn: Tensor, drafted_B: list[int]) -> list[int]:
        survival_Bn = survival(confidence_Bn)
        # Survival never rises from slot to slot, so counting the slots above the threshold finds the prefix.
        kept_B = (survival_Bn >= self.threshold).sum(-1).tolist()
        return [min(kept, drafted) for kept, drafted in zip(kept_B, drafted_B, strict=True)]


def build_policy(name: str, config: DecodingConfig, cost: StepCost | None) -> DraftPolicy | None:
    """The policy of that name; ``cost`` is the scheduler's."""
    if name == FIXED:
        return None
    if name == THRESHOLD:
        return ThresholdPolicy(config.threshold)
    if cost is None:
        raise ValueError("the scheduler needs to know what a step costs")
    return SchedulerPolicy(cost)
