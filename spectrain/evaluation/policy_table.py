"""Rows of the report about drafting by confidence: policies against each other, and how far the confidence could be trusted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from spectrain.evaluation.labels import POLICY_LABELS, interval_text, method_label, number, share_text
from spectrain.evaluation.record import EvaluationRecord


def policy_rows(records: Sequence[EvaluationRecord]) -> Iterator[dict[str, Any]]:
    """A row per batch size and policy, where several policies were measured under the same conditions; the fastest of each is marked."""
    groups: dict[tuple[object, ...], list[EvaluationRecord]] = defaultdict(list)
    for record in records:
        if record.is_drafter:
            groups[
                record.method, record.suite, record.engine, record.num_speculative_tokens, record.temperature, record.concurrency
            ].append(record)
    compared = [group for group in groups.values() if len({record.draft_policy for record in group}) > 1]
    for group in sorted(compared, key=lambda group: (group[0].suite, group[0].temperature, group[0].concurrency)):
        fastest = max(group, key=lambda record: record.output_tokens_per_s)
        for record in group:
            threshold = "" if record.draft_threshold is None else f" {record.draft_threshold:g}"
            yield {
                "batch": f"{record.concurrency}",
                "method": method_label(record.method),
                "policy": POLICY_LABELS.get(record.draft_policy, record.draft_policy) + threshold,
                "acceptance_length": number(record.acceptance_length),
                "drafted": number(record.drafted_tokens / record.rounds if record.rounds else None),
                "rate": share_text(record.acceptance_rate),
                "tokens_per_s": number(record.output_tokens_per_s, digits=1),
                "speedup": number(record.speedup, "×"),
                "speedup_interval": interval_text(record.speedup_interval),
                "main": record is fastest,
            }


def confidence_rows(record: EvaluationRecord | None) -> list[dict[str, str]]:
    """A row per draft position of the headline's confidence figures; none without them."""
    if record is None or record.confidence is None:
        return []
    stats = record.confidence
    return [
        {"position": f"{slot}", "ece": share_text(ece), "raw_ece": share_text(raw), "auroc": share_text(area)}
        for slot, (ece, raw, area) in enumerate(zip(stats.ece, stats.raw_ece, stats.auroc, strict=True), start=1)
    ]
