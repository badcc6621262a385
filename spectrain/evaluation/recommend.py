"""How many tokens to draft: what evaluation measured, and what follows from it for shorter rounds.

A round of n drafts commits τ(n) = 1 + Σ_{j≤n} s_j tokens, where s_j is the share of rounds in which j drafts were
accepted, and costs n drafting steps and one pass of the target over n + 1 tokens. The best n is the one with the most
tokens per second. Where it was measured, the measurement counts. For an autoregressive drafter a shorter round is the
beginning of a longer one, so s_j is the same for it, and its costs lie between those of the measured round and of
decoding without drafts; a block drafter's shorter block is another drafter, of which nothing is known without a
measurement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from spectrain.evaluation.records import EvaluationRecord


@dataclass(frozen=True)
class Recommendation:
    """num_speculative_tokens: the best number. speedup: over no speculation, there; None if that was not measured.
    reason: for the user.
    """

    num_speculative_tokens: int
    speedup: float | None
    reason: str


def recommend(records: Sequence[EvaluationRecord], autoregressive: bool) -> Recommendation | None:
    """The number of drafts with the most tokens per second, or None without a record.

    records: of one drafter. Figures are compared only within one suite, engine, temperature and concurrency; vLLM's own
    come before those of the embedded loop, then the group with most measured lengths, then that with most rounds.
    """
    groups: dict[tuple[object, ...], dict[int, EvaluationRecord]] = defaultdict(dict)
    for record in records:
        if record.num_speculative_tokens >= 1 and record.rounds and record.draft_policy == "fixed":
            key = (record.engine, record.suite, record.temperature, record.top_p, record.top_k, record.concurrency)
            groups[key][record.num_speculative_tokens] = record
    if not groups:
        return None
    group = max(groups.values(), key=_worth)
    has_baseline = all(record.speedup is not None for record in group.values())
    gains = {n: _gain(record, has_baseline) for n, record in group.items()}
    source = max((n for n, record in group.items() if _has_costs(record)), default=None)
    if autoregressive and source is not None:
        gains = _shorter(group[source], gains[source]) | gains
    best = min(gains, key=lambda n: (-gains[n], n))
    record = group[best if best in group or source is None else source]
    origin = "measured" if best in group else f"estimated from {source} drafts measured"
    figure = f"{gains[best]:.2f}x" if has_baseline else f"{gains[best]:,.0f} tokens/s"
    where = f"suite {record.suite}, engine {record.engine}, temperature {record.temperature:g}"
    return Recommendation(best, gains[best] if has_baseline else None, f"{figure} {origin} ({where})")


def _worth(group: dict[int, EvaluationRecord]) -> tuple[bool, int, int]:
    engine = next(iter(group.values())).engine
    return engine.startswith("vllm"), len(group), sum(record.rounds for record in group.values())


def _gain(record: EvaluationRecord, has_baseline: bool) -> float:
    """Speed-up; without a baseline tokens per second, which order the same group in the same way."""
    return record.speedup if has_baseline and record.speedup is not None else record.output_tokens_per_s


def _shorter(record: EvaluationRecord, gain: float) -> dict[int, float]:
    """Gains of rounds shorter than those of ``record``, which had ``gain``."""
    n, shares = record.num_speculative_tokens, [share or 0.0 for share in record.acceptance_per_position]
    draft_s, verify_s = record.draft_s_per_round or 0.0, record.verify_s_per_round or 0.0
    step_s = verify_s
    if record.baseline_tokens_per_s:
        step_s = min(
            verify_s, record.concurrency / record.baseline_tokens_per_s
        )  # a pass over one token of each conversation

    def rate(m: int) -> float:
        return (1.0 + sum(shares[:m])) / (draft_s * m / n + step_s + (verify_s - step_s) * m / n)

    return {m: gain * rate(m) / rate(n) for m in range(1, n)}


def _has_costs(record: EvaluationRecord) -> bool:
    return (
        record.draft_s_per_round is not None
        and bool(record.verify_s_per_round)
        and None not in record.acceptance_per_position
    )
