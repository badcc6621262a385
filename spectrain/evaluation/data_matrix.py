"""Which data helps which task: acceptance lengths of several runs' drafters on several suites.

A column compares drafters, so its figures are over the same prompts under the same conditions. Whether two differ by
more than chance is judged over pairs of answers to the same prompt, which tells more than two intervals that overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spectrain.errors import InputError
from spectrain.evaluation.compare_records import CONDITIONS, LENGTH, compare
from spectrain.evaluation.records import UNTUNED, EvaluationRecord, Interval

# What must agree in a matrix: conditions of the measurement, and how much is drafted.
_SAME = (*CONDITIONS, "num_speculative_tokens", "draft_policy", "draft_threshold")


@dataclass(frozen=True)
class MatrixCell:
    """τ of one run's drafter on one suite. ``best``: the greatest of its column; ``level``: not that, but the paired
    95 % interval of the difference to the best holds zero.
    """

    tau: float
    interval: Interval | None
    best: bool
    level: bool
    prompts: int


@dataclass(frozen=True)
class DataMatrix:
    """``cells[run][suite]``; a suite that was not measured with a run's drafter is missing there. ``shared``: a record
    of it, for the conditions that all share. ``own_prompts``: suites that are left out, because each run asked others.
    """

    runs: tuple[str, ...]
    suites: tuple[str, ...]
    cells: Mapping[str, Mapping[str, MatrixCell]]
    shared: EvaluationRecord
    own_prompts: tuple[str, ...]


def data_matrices(runs: Mapping[str, Sequence[EvaluationRecord]], suites: Iterable[str] = ()) -> list[DataMatrix]:
    """One matrix for each set of conditions under which two runs or more were measured.

    Args:
        runs: name of a run -> its records; of several of the same measurement, the last counts.
        suites: the columns; none: every suite that two runs share.

    Raises InputError where no two runs were measured on the same prompts under the same conditions.
    """
    wanted = tuple(suites)
    groups: dict[tuple[object, ...], dict[str, dict[str, EvaluationRecord]]] = {}
    for run, records in runs.items():
        for record in records:
            trained = record.is_drafter and not record.method.endswith(UNTUNED) and record.acceptance_length is not None
            if trained and (not wanted or record.suite in wanted):
                same = tuple(getattr(record, name) for name in _SAME)
                groups.setdefault(same, {}).setdefault(run, {})[record.suite] = record
    found = [made for group in groups.values() if len(group) > 1 and (made := _matrix(group)) is not None]
    if not found:
        raise InputError(
            "no two of these runs were measured on the same prompts under the same conditions (target, engine, "
            "temperature, number of drafts, length limits): measure all of them with --suites NAME,NAME"
        )
    return found


def _matrix(group: Mapping[str, Mapping[str, EvaluationRecord]]) -> DataMatrix | None:
    cells: dict[str, dict[str, MatrixCell]] = {run: {} for run in group}
    kept, others = [], []
    for suite in dict.fromkeys(suite for records in group.values() for suite in records):
        column = {run: records[suite] for run, records in group.items() if suite in records}
        if len(column) < 2:
            continue
        if len({frozenset(prompt.key for prompt in record.prompts) for record in column.values()}) > 1:
            others.append(suite)
            continue
        kept.append(suite)
        for run, cell in _column(column).items():
            cells[run][suite] = cell
    if not kept:
        return None
    runs = tuple(run for run in group if cells[run])
    shared = next(record for records in group.values() for record in records.values())
    return DataMatrix(runs, tuple(kept), cells, shared, tuple(others))


def _column(column: Mapping[str, EvaluationRecord]) -> dict[str, MatrixCell]:
    taus = {run: record.acceptance_length or 0.0 for run, record in column.items()}
    first = max(taus, key=taus.__getitem__)
    cells = {}
    for run, record in column.items():
        differences = [] if run == first else compare(column[first], record).differences
        level = any(found.name == LENGTH and not found.certain for found in differences)
        best = run == first or taus[run] == taus[first]
        cells[run] = MatrixCell(
            taus[run], record.acceptance_length_interval, best, level and not best, record.num_prompts
        )
    return cells
