"""The cells of a sweep that were not run: speed-up between measured numbers of drafts, concurrencies and lengths of
context, never beyond them. What that is worth is seen where a measured cell is predicted from the others.

*Numbers of drafts.* τ(n) = 1 + Σ_{j≤n} s_j from the acceptance by position s of the next longer measured round, and the
cost of a round in plain steps, τ / speed-up, which is 1 for no drafts and taken as linear in n.

*Concurrencies and lengths of context.* The same method with the same number of drafts, measured below and above: on a
straight line between these two lie τ, the seconds of drafting and of verifying a round, d and v, and those of a step
without speculation, p = speed-up · (d + v) / τ. That is the step as this very cell saw it: the baseline was measured
beside it, and what is around the rounds (prefill) is in it. Then speed-up = τ · p / (d + v), which is exact where
seconds grow with the batch, or with the context, as a constant and a multiple.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

from spectrain.evaluation.records import Conditions, EvaluationRecord

NONE = "none"
GroupKey = tuple[object, ...]  # of cells that may be compared with each other: all but method and number of drafts
Axis = Literal["concurrency", "context_tokens"]
Asked = Mapping[Axis, Collection[int]]  # concurrencies and lengths of context that are wanted
_AXES: tuple[Axis, ...] = ("concurrency", "context_tokens")
_GROUPED = (
    *("suite", "target", "target_revision", "engine", "temperature", "top_p", "top_k", "proposal_policy"),
    *("max_new_tokens", *_AXES),
)


@dataclass(frozen=True)
class Prediction:
    """The speed-up of a cell that was not run. conditions: its own, with method and number of drafts."""

    conditions: Conditions
    speedup: float


@dataclass(frozen=True)
class PredictionError:
    """A measured cell, as predicted from the others. over: what lies between others (num_speculative_tokens,
    concurrency, context_tokens).
    """

    over: str
    suite: str
    engine: str
    method: str
    num_speculative_tokens: int
    concurrency: int
    context_tokens: int | None
    measured: float
    predicted: float

    @property
    def relative(self) -> float:
        return self.predicted / self.measured - 1.0


def group_key(cell: Conditions, but: str = "") -> GroupKey:
    """What cells must have in common to be compared; ``but``: without this one of it."""
    return tuple(getattr(cell, name) for name in _GROUPED if name != but)


def grouped(records: Iterable[EvaluationRecord]) -> dict[GroupKey, list[EvaluationRecord]]:
    """Cells that may be compared with each other, in their order."""
    groups: dict[GroupKey, list[EvaluationRecord]] = defaultdict(list)
    for record in records:
        groups[group_key(record)].append(record)
    return groups


def predicted_cells(
    records: Sequence[EvaluationRecord], step_by_step: Collection[str] = (), asked: Asked = MappingProxyType({})
) -> list[Prediction]:
    """The cells between measured ones: numbers of drafts below the longest measured round, of the methods
    ``step_by_step``, whose shorter rounds are beginnings of longer ones; and concurrencies and lengths of context
    between two measured ones: twice, four times, … the lower one, and those of ``asked``.
    """
    measured = {_identity(record) for record in records}
    found: dict[tuple[GroupKey, str, int], Prediction] = {}
    for made in (*_between_drafts(records, step_by_step), *_between_sizes(records, asked)):
        if _identity(made.conditions) not in measured:
            found.setdefault(_identity(made.conditions), made)
    return list(found.values())


def prediction_errors(records: Sequence[EvaluationRecord], step_by_step: Collection[str] = ()) -> list[PredictionError]:
    """Each measured cell that can be predicted from the others (leave one out), in each way in which it can."""
    errors: list[PredictionError] = []
    for group in grouped(records).values():
        for cells in _by_drafts(group, step_by_step).values():
            for n in cells:
                errors += _error("num_speculative_tokens", cells[n], _predict_drafts(_without(cells, n), n))
    for axis in _AXES:
        for cells in _along(records, axis).values():
            for at in cells:
                errors += _error(axis, cells[at], _predict_between(_without(cells, at), at))
    return errors


Cells = Mapping[int, EvaluationRecord]  # by the number that differs between them


def _identity(cell: Conditions) -> tuple[GroupKey, str, int]:
    return group_key(cell), cell.method, cell.num_speculative_tokens


def _between_drafts(records: Sequence[EvaluationRecord], step_by_step: Collection[str]) -> Iterator[Prediction]:
    for group in grouped(records).values():
        for cells in _by_drafts(group, step_by_step).values():
            numbers = range(1, max(cells))
            yield from _made(cells, "num_speculative_tokens", [(n, _predict_drafts(cells, n)) for n in numbers])


def _between_sizes(records: Sequence[EvaluationRecord], asked: Asked) -> Iterator[Prediction]:
    for axis in _AXES:
        for cells in _along(records, axis).values():
            wanted = sorted({*_doublings(sorted(cells)), *asked.get(axis, ())})
            yield from _made(cells, axis, [(at, _predict_between(cells, at)) for at in wanted])


def _by_drafts(group: Sequence[EvaluationRecord], step_by_step: Collection[str]) -> dict[str, Cells]:
    found: dict[str, dict[int, EvaluationRecord]] = defaultdict(dict)
    for record in group:
        if record.method in step_by_step and record.speedup and record.acceptance_length:
            found[record.method][record.num_speculative_tokens] = record
    return dict(found)


def _along(records: Sequence[EvaluationRecord], axis: Axis) -> dict[tuple[GroupKey, str, int], Cells]:
    """Cells that differ in nothing else, where seconds of their rounds are known."""
    found: dict[tuple[GroupKey, str, int], dict[int, EvaluationRecord]] = defaultdict(dict)
    for record in records:
        known = record.speedup and record.acceptance_length and record.draft_s_per_round is not None
        if known and record.verify_s_per_round and getattr(record, axis) is not None:
            key = group_key(record, axis), record.method, record.num_speculative_tokens
            found[key][getattr(record, axis)] = record
    return dict(found)


def _doublings(measured: Sequence[int]) -> Iterator[int]:
    for low, high in pairwise(measured):
        while (low := 2 * low) < high:
            yield low


def _predict_drafts(cells: Cells, n: int) -> float | None:
    """Speed-up with n drafts, from cells with other numbers; None without a longer one."""
    longer = min((m for m in cells if m > n), default=None)
    if longer is None or None in cells[longer].acceptance_per_position[:n]:
        return None
    length = 1.0 + sum(share or 0.0 for share in cells[longer].acceptance_per_position[:n])
    # Cost of a round in plain steps: 1 with no drafts, so a line through that point; least squares for its slope.
    extra = {m: (r.acceptance_length or 1.0) / (r.speedup or 1.0) - 1.0 for m, r in cells.items()}
    slope = sum(m * cost for m, cost in extra.items()) / sum(m * m for m in extra)
    cost = 1.0 + slope * n
    return length / cost if cost > 0 else None


def _predict_between(cells: Cells, at: int) -> float | None:
    """Speed-up at a concurrency or length of context, from cells at others; None unless it lies between two."""
    low = max((known for known in cells if known < at), default=None)
    high = min((known for known in cells if known > at), default=None)
    if low is None or high is None:
        return None
    share = (at - low) / (high - low)
    length, round_s, plain_s = (
        (1 - share) * below + share * above
        for below, above in zip(_round(cells[low]), _round(cells[high]), strict=True)
    )
    return length * plain_s / round_s


def _round(record: EvaluationRecord) -> tuple[float, float, float]:
    """(τ, seconds of drafting and verifying a round, seconds of a step without speculation)"""
    length, speedup = record.acceptance_length or 1.0, record.speedup or 1.0
    round_s = (record.draft_s_per_round or 0.0) + (record.verify_s_per_round or 0.0)
    return length, round_s, speedup * round_s / length


def _made(cells: Cells, name: str, speedups: Iterable[tuple[int, float | None]]) -> Iterator[Prediction]:
    record = next(iter(cells.values()))
    like = Conditions(**{field.name: getattr(record, field.name) for field in fields(Conditions)})
    for at, speedup in speedups:
        if speedup is not None:
            own: dict[str, Any] = {name: at}
            yield Prediction(replace(like, **own), speedup)


def _error(over: str, record: EvaluationRecord, predicted: float | None) -> Iterator[PredictionError]:
    if predicted is not None and record.speedup:
        told = {f.name: getattr(record, f.name) for f in fields(PredictionError) if hasattr(record, f.name)}
        yield PredictionError(**told, over=over, measured=record.speedup, predicted=predicted)


def _without(cells: Cells, left_out: int) -> Cells:
    return {at: record for at, record in cells.items() if at != left_out}
