"""The table that ends an evaluation in the terminal: what each method accepts, how fast it is, and whether the promise was kept."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectrain.evaluation.labels import (
    MISSING,
    distinct_names,
    interval_text,
    number,
    promise_verdict,
    served_by,
    share_text,
    shared_conditions,
)
from spectrain.evaluation.record import EvaluationRecord, Interval


def evaluation_table(records: Sequence[EvaluationRecord]) -> RenderableType:
    """One row per record under a line with what they share, then promise and measurement of every drafter that was walked."""
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
        *(line for name, record in zip(names, records, strict=True) if (line := _promise(name, record)) is not None),
        Text("Acceptance length: tokens per target pass, bonus token counted. Ranges: 95 % bootstrap over prompts.", style="dim"),
    )


def _cells(name: str, record: EvaluationRecord) -> tuple[Text, ...]:
    same = {None: Text(MISSING), True: Text("yes", style="green"), False: Text("NO", style="bold red")}[record.output_identical]
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


def _promise(name: str, record: EvaluationRecord) -> Text | None:
    verdict = promise_verdict(record)
    if verdict is None:
        return None
    words, kept = verdict
    line = Text(f"{name}: promised (walk) τ = {number(record.walk_acceptance_length, digits=3)}")
    line.append(f", served ({served_by(record)}) τ = {number(record.acceptance_length, digits=3)}: ")
    line.append(words, style="bold green" if kept else "bold yellow")
    return line
