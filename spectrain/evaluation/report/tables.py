"""Tables: the one that ends an evaluation in the terminal, and rows of the report about drafting by confidence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectrain.evaluation.records import EvaluationRecord, Interval
from spectrain.evaluation.report.labels import (
    MISSING,
    POLICY_LABELS,
    compare_with_simulation,
    decoded_by,
    distinct_names,
    interval_text,
    measured_label,
    number,
    share_text,
    shared_conditions,
)


def evaluation_table(records: Sequence[EvaluationRecord]) -> RenderableType:
    """One row per record under a line with what they share, then what simulation predicted and what was measured, for
    every drafter that was simulated.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method")
    table.add_column("acceptance length", justify="right")
    table.add_column("by position", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("speed-up", justify="right")
    table.add_column("same output", justify="center")
    names = distinct_names(records)
    for name, record in zip(names, records, strict=True):
        table.add_row(*_cells(name, record), style="bold" if record.is_drafter else "")
    return Group(
        Text(shared_conditions(records), style="bold"),
        table,
        *(
            line
            for name, record in zip(names, records, strict=True)
            if (line := _simulated_beside_measured(name, record)) is not None
        ),
        Text(
            "Acceptance length τ (tau): tokens per target pass, bonus token counted. Ranges: 95 % bootstrap by prompt.",
            style="dim",
        ),
    )


def _cells(name: str, record: EvaluationRecord) -> tuple[Text, ...]:
    same = {None: Text(MISSING), True: Text("yes", style="green"), False: Text("NO", style="bold red")}[
        record.output_identical
    ]
    return (
        Text(name),
        _with_interval(record.acceptance_length, record.acceptance_length_interval),
        Text(" ".join(share_text(share) for share in record.acceptance_per_position) or MISSING),
        Text(number(record.output_tokens_per_s, digits=1)),
        _with_interval(record.speedup, record.speedup_interval, unit="×"),
        same,
    )


def _with_interval(value: float | None, interval: Interval | None, unit: str = "") -> Text:
    text = Text(number(value, unit))
    # Without speculation every round makes one token: an interval of no width says nothing.
    if value is not None and interval is not None and interval[0] < interval[1]:
        text.append(f" ({interval_text(interval)})", style="dim")
    return text


def _simulated_beside_measured(name: str, record: EvaluationRecord) -> Text | None:
    verdict = compare_with_simulation(record)
    if verdict is None:
        return None
    words, agree = verdict
    line = Text(f"{name}: simulation predicted τ = {number(record.simulated_acceptance_length, digits=3)}, ")
    line.append(f"{decoded_by(record)} measured τ = {number(record.acceptance_length, digits=3)}: ")
    line.append(words, style="bold green" if agree else "bold yellow")
    return line


def policy_rows(records: Sequence[EvaluationRecord]) -> Iterator[dict[str, Any]]:
    """A row per batch size and policy, where several policies were measured under the same conditions; the fastest of
    each is marked.
    """
    groups: dict[tuple[object, ...], list[EvaluationRecord]] = defaultdict(list)
    for record in records:
        if record.is_drafter:
            groups[
                record.method,
                record.suite,
                record.engine,
                record.num_speculative_tokens,
                record.temperature,
                record.concurrency,
            ].append(record)
    compared = [group for group in groups.values() if len({record.draft_policy for record in group}) > 1]
    for group in sorted(compared, key=lambda group: (group[0].suite, group[0].temperature, group[0].concurrency)):
        fastest = max(group, key=lambda record: record.output_tokens_per_s)
        for record in group:
            threshold = "" if record.draft_threshold is None else f" {record.draft_threshold:g}"
            yield {
                "batch": f"{record.concurrency}",
                "method": measured_label(record.method),
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
