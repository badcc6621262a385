"""Whether engines that decode the same prompts with the same drafter accept alike.

At temperature 0 a drafter's rounds are settled by the target, the drafter and the rules of the loop, so two engines
that agree on all three count the same acceptance, but for ties within rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from spectrain.evaluation.compare_records import LENGTH, compare
from spectrain.evaluation.records import EvaluationRecord, Interval

_NONE = "none"


@dataclass(frozen=True)
class EngineAgreement:
    """A greedy cell as two engines measured it.

    first, second: acceptance lengths; change: second − first, with its 95 % interval, prompts resampled in pairs.
    same_output: how many of ``prompts`` got the same answer. agrees: the interval holds 0.
    """

    suite: str
    method: str
    num_speculative_tokens: int
    concurrency: int
    context_tokens: int | None
    engines: tuple[str, str]
    first: float
    second: float
    change: float
    interval: Interval | None
    same_output: int
    prompts: int
    agrees: bool


def engine_agreements(records: Sequence[EvaluationRecord]) -> list[EngineAgreement]:
    """Every greedy cell that several engines measured: the first engine with each other one."""
    cells: dict[tuple[object, ...], list[EvaluationRecord]] = defaultdict(list)
    for record in records:
        if record.temperature == 0 and record.method != _NONE:
            cells[_cell(record)].append(record)
    found = []
    for group in cells.values():
        for other in group[1:]:
            agreement = _agreement(group[0], other)
            if agreement is not None:
                found.append(agreement)
    return found


def _cell(record: EvaluationRecord) -> tuple[object, ...]:
    return (
        *(record.target, record.target_revision, record.suite, record.method, record.num_speculative_tokens),
        *(record.concurrency, record.context_tokens, record.max_new_tokens),
    )


def _agreement(first: EvaluationRecord, second: EvaluationRecord) -> EngineAgreement | None:
    compared = compare(first, second, anyway=True)
    length = next((found for found in compared.differences if found.name == LENGTH), None)
    if length is None:
        return None
    return EngineAgreement(
        first.suite,
        first.method,
        first.num_speculative_tokens,
        first.concurrency,
        first.context_tokens,
        (first.engine, second.engine),
        length.first,
        length.second,
        length.change,
        length.interval,
        compared.same_output or 0,
        compared.prompts,
        not length.certain if length.interval is not None else length.change == 0,
    )
