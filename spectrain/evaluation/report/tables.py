"""Tables: the one that ends an evaluation in the terminal, and rows of the report about drafting by confidence.

How records are named and their figures written, the same in the terminal and in the report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectrain.drafters.registry import known_method
from spectrain.evaluation.records import UNTUNED, EvaluationRecord, Interval

MISSING = "–"
_WITHOUT_DRAFTER = {"none": "no speculation", "ngram": "n-gram", "suffix": "suffix", "draft_model": "draft model"}
POLICY_LABELS = {"fixed": "all drafts", "threshold": "threshold", "scheduler": "scheduler"}

# What tells two records of one method apart, in the order of interest.
_DETAILS: tuple[Callable[[EvaluationRecord], str], ...] = (
    lambda record: f"n = {record.num_speculative_tokens}",
    lambda record: f"T = {record.temperature:g}",
    lambda record: POLICY_LABELS.get(record.draft_policy, record.draft_policy),
    lambda record: record.suite,
    lambda record: record.engine,
    lambda record: f"{record.concurrency} at a time",
    lambda record: record.drafter or "",
)


def measured_label(method: str) -> str:
    """The name of a measured method as a person reads it; an unknown one is shown as it is."""
    if method in _WITHOUT_DRAFTER:
        return _WITHOUT_DRAFTER[method]
    found = known_method(method.removesuffix(UNTUNED))
    if found is None:
        return method
    return f"{found.label}, untuned" if method.endswith(UNTUNED) else f"{found.label} drafter"


def distinct_names(records: Sequence[EvaluationRecord]) -> list[str]:
    """A name per record: its method, and as much as is needed to tell it from the others: ``["n-gram", "EAGLE-3
    drafter, n = 3", …]``.
    """
    names = [measured_label(record.method) for record in records]
    for detail in _DETAILS:
        for name in {name for name in names if names.count(name) > 1}:
            same = [i for i, other in enumerate(names) if other == name]
            if len({detail(records[i]) for i in same}) > 1:
                for i in same:
                    names[i] = f"{name}, {detail(records[i])}"
    return names


def shared_conditions(records: Sequence[EvaluationRecord]) -> str:
    """One line with the conditions under which the records were measured; what differs between them is left out."""
    speculative = [record for record in records if record.num_speculative_tokens]
    parts = (
        _shared(records, lambda record: record.target),
        _shared(records, lambda record: f"suite {record.suite}"),
        _shared(records, lambda record: f"{record.num_prompts} prompts"),
        _shared(speculative, lambda record: f"{record.num_speculative_tokens} draft tokens"),
        _shared(records, lambda record: f"temperature {record.temperature:g}" if record.temperature else "greedy"),
        _shared(records, lambda record: f"{record.concurrency} at a time"),
        _shared(records, lambda record: f"engine {record.engine} ({record.engine_version})"),
    )
    return " · ".join(part for part in parts if part)


def _shared(records: Sequence[EvaluationRecord], describe: Callable[[EvaluationRecord], str]) -> str | None:
    texts = {describe(record) for record in records}
    return texts.pop() if len(texts) == 1 else None


def number(value: float | None, unit: str = "", digits: int = 2) -> str:
    """``1.93``; a dash for what was not measured."""
    return MISSING if value is None else f"{value:,.{digits}f}{unit}"


def interval_text(interval: Interval | None, digits: int = 2) -> str:
    """``1.88–1.99``; empty where there is none."""
    return "" if interval is None else f"{interval[0]:,.{digits}f}–{interval[1]:,.{digits}f}"


def share_text(share: float | None) -> str:
    """``.481``, as the field writes acceptance by position; ``1.000`` for all."""
    return MISSING if share is None else f"{share:.3f}".removeprefix("0")


def percent(share: float | None) -> str:
    """``48 %``; a dash for what was not measured."""
    return MISSING if share is None else f"{100 * share:.0f} %"


def same_output(record: EvaluationRecord) -> str:
    """Whether speculation left the output as it was: ``yes``, ``no``; of sampled outputs the p-value of the same
    distribution, ``p .430``.
    """
    if record.output_distribution_p is not None:
        return f"p {share_text(record.output_distribution_p)}"
    return {None: MISSING, True: "yes", False: "no"}[record.output_identical]


def decoded_by(record: EvaluationRecord) -> str:
    """Who decoded: our own loop, or vLLM."""
    return "the loop" if record.engine == "hf" else "vLLM"


def compare_with_simulation(record: EvaluationRecord) -> tuple[str, bool] | None:
    """How the measured acceptance length compares with the simulated one, in words, and whether they agree. None
    without a simulation.

    At temperature 0 both count the same rounds, so the figures must be equal (to the three digits shown); above it both
    are random, so the measured one must lie in the simulation's interval.
    """
    simulated, measured = record.simulated_acceptance_length, record.acceptance_length
    interval = record.simulated_acceptance_length_interval
    if simulated is None or measured is None:
        return None
    if f"{simulated:.3f}" == f"{measured:.3f}":
        return "equal", True
    difference = f"{measured / simulated - 1:+.1%}"
    if record.temperature > 0 and interval is not None and interval[0] <= measured <= interval[1]:
        return f"{difference}, within the simulation's interval", True
    return difference, False


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
    graded = any(record.accuracy is not None for record in records)
    if graded:
        table.add_column("right", justify="right")
    names = distinct_names(records)
    for name, record in zip(names, records, strict=True):
        right = (Text(percent(record.accuracy)),) if graded else ()
        table.add_row(*_cells(name, record), *right, style="bold" if record.is_drafter else "")
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
    same = Text(same_output(record))
    if record.output_identical is False:
        same = Text("NO", style="bold red")
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
