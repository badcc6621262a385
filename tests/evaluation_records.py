"""Records of measurements that nobody made, as far as a test needs them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from spectrain.evaluation.records import Conditions, EvaluationRecord

CONDITIONS = Conditions(
    target="tiny",
    target_revision="abc",
    drafter="runs/x/drafter",
    method="eagle3",
    engine="hf",
    engine_version="1.0",
    suite="heldout",
    num_speculative_tokens=3,
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    proposal_policy="greedy",
    concurrency=1,
)


def record_of(shares: tuple[float, ...], **figures: Any) -> EvaluationRecord:
    """Of a drafter with so many drafts, each of which is accepted in its share of 100 rounds; under ``CONDITIONS``, but
    for ``figures``.
    """
    known: dict[str, Any] = {
        **asdict(CONDITIONS),
        "num_speculative_tokens": len(shares),
        "num_prompts": 4,
        "rounds": 100,
        "cut_rounds": 0,
        "drafted_tokens": 100 * len(shares),
        "accepted_tokens": int(100 * sum(shares)),
        "acceptance_length": 1 + sum(shares),
        "acceptance_length_interval": None,
        "acceptance_rate": 0.5,
        "acceptance_per_position": shares,
        "conditional_acceptance_per_position": (0.5,) * len(shares),
        "output_tokens": 100,
        "output_tokens_per_s": 10.0,
    }
    return EvaluationRecord(**(known | figures))


def halving_record(drafts: int, **figures: Any) -> EvaluationRecord:
    """Every draft is accepted in half of the rounds that reach it; without speculation it is as fast."""
    shares = tuple(0.5**place for place in range(1, drafts + 1))
    return record_of(shares, **({"speedup": 1.0, "baseline_tokens_per_s": 10.0} | figures))
