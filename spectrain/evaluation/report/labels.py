"""How records are named and their figures written, the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spectrain.drafters.registry import known_method
from spectrain.evaluation.records import EvaluationRecord, Interval

MISSING = "–"
_WITHOUT_DRAFTER = {"none": "no speculation", "ngram": "n-gram"}
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
    found = known_method(method)
    return method if found is None else f"{found.label} drafter"


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
