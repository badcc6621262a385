"""The draft policies by their names in the configuration."""

from __future__ import annotations

from spectrain.config import DecodingConfig
from spectrain.decoding.confidence import DraftPolicy, ThresholdPolicy
from spectrain.decoding.scheduler import SchedulerPolicy, StepCost

FIXED, THRESHOLD, SCHEDULER = "fixed", "threshold", "scheduler"


def build_policy(name: str, config: DecodingConfig, cost: StepCost | None) -> DraftPolicy | None:
    """The policy of that name; ``cost`` is the scheduler's."""
    if name == FIXED:
        return None
    if name == THRESHOLD:
        return ThresholdPolicy(config.threshold)
    if cost is None:
        raise ValueError("the scheduler needs to know what a step costs")
    return SchedulerPolicy(cost)
