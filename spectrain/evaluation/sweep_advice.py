"""What a sweep's cells say: the best method and number of drafts for a suite and for a workload, what a wrong choice
costs, and where speculation does not pay.

Cells are compared by their speed-up over no speculation, which was measured beside each of them: throughputs of cells
an hour apart also measure what else the machine did. A workload is shares of output tokens by suite; its seconds a
token are the suites', weighted by the shares, so its speed-up is no mean of speed-ups.

Between measured cells speed is predicted (``sweep_predictions.py``), and marked as that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from spectrain.decoding.acceptance import percentile_interval, resampled_sums
from spectrain.evaluation.prompt_figures import timed_units
from spectrain.evaluation.records import Conditions, EvaluationRecord, Interval
from spectrain.evaluation.sweep_predictions import NONE, Asked, GroupKey, group_key, grouped, predicted_cells


@dataclass(frozen=True)
class Choice:
    """A method with its number of drafts, and what it is worth. ``predicted``: it was not measured."""

    method: str
    num_speculative_tokens: int
    speedup: float
    interval: Interval | None
    tokens_per_s: float | None = None
    predicted: bool = False


@dataclass(frozen=True)
class Advice:
    """For one suite (or workload) at one concurrency.

    best: the fastest measured choice; no speculation, where nothing is faster. choices: all, fastest first.
    certain: the best one's interval lies above 1 as a whole, or none is the best. predicted: nothing was measured here,
    so all choices are predicted, the best one, too, and nothing is certain.
    """

    suite: str
    engine: str
    temperature: float
    context_tokens: int | None
    concurrency: int
    best: Choice
    choices: tuple[Choice, ...]
    certain: bool
    predicted: bool = False

    def cost_of(self, choice: Choice) -> float:
        """The share of throughput that is lost with another choice."""
        return 1.0 - choice.speedup / self.best.speedup


def advise(
    records: Sequence[EvaluationRecord], step_by_step: Collection[str] = (), asked: Asked = MappingProxyType({})
) -> list[Advice]:
    """Advice for each suite at each concurrency, measured or between measured ones. ``step_by_step`` and ``asked``: as
    of ``predicted_cells``.
    """
    groups = grouped(records)
    predicted: dict[GroupKey, list[Choice]] = defaultdict(list)
    between: dict[GroupKey, Conditions] = {}
    for made in predicted_cells(records, step_by_step, asked):
        key, cell = group_key(made.conditions), made.conditions
        predicted[key].append(Choice(cell.method, cell.num_speculative_tokens, made.speedup, None, predicted=True))
        if key not in groups:
            between.setdefault(key, cell)
    advices = []
    for key, group in groups.items():
        measured = [_choice(record) for record in group if record.speedup is not None and record.method != NONE]
        plain = next((record for record in group if record.method == NONE), None)
        choices = [*measured, *predicted[key]]
        advices.append(_advice(group[0], choices, None if plain is None else plain.output_tokens_per_s))
    advices += [_advice(cell, predicted[key], None, predicted=True) for key, cell in between.items()]
    suites = list(dict.fromkeys(record.suite for record in records))
    return sorted(advices, key=lambda a: (suites.index(a.suite), a.context_tokens or 0, a.temperature, a.concurrency))


def advise_workload(records: Sequence[EvaluationRecord], shares: Mapping[str, float]) -> list[Advice]:
    """Advice for a workload at each concurrency, from the choices that were measured in all its suites. ``shares``: of
    output tokens by suite; empty: as much of each.
    """
    suites = sorted({record.suite for record in records})
    weights = {suite: shares.get(suite, 0.0) for suite in suites} if shares else dict.fromkeys(suites, 1.0)
    weights = {suite: weight / sum(weights.values()) for suite, weight in weights.items() if weight > 0}
    cells: dict[GroupKey, dict[str, EvaluationRecord]] = defaultdict(dict)
    for record in records:
        if record.speedup is not None and record.method != NONE and record.suite in weights:
            key = (*group_key(record, "suite"), record.method, record.num_speculative_tokens)
            cells[key][record.suite] = record
    groups: dict[GroupKey, list[dict[str, EvaluationRecord]]] = defaultdict(list)
    for key, by_suite in cells.items():
        if by_suite.keys() == weights.keys():
            groups[key[:-2]].append(by_suite)
    advices = []
    for group in groups.values():
        choices = [workload_choice(by_suite, weights) for by_suite in group]
        advices.append(_advice(next(iter(group[0].values())), choices, None, suite="workload"))
    return advices


def workload_choice(by_suite: Mapping[str, EvaluationRecord], weights: Mapping[str, float]) -> Choice:
    """One choice's speed-up for a workload, prompts of each suite resampled by themselves."""
    plain_s, ours_s, plain_R, ours_R = 0.0, 0.0, 0.0, 0.0
    for number, (suite, weight) in enumerate(sorted(weights.items())):
        figures = [
            (
                sum(prompt.baseline_seconds or 0.0 for prompt in unit),
                sum(prompt.seconds for prompt in unit),
                sum(prompt.output_tokens for prompt in unit),
            )
            for unit in timed_units(by_suite[suite].prompts)
        ]
        plain, ours, tokens = np.asarray(figures, dtype=np.float64).sum(axis=0)
        plain_s, ours_s = plain_s + weight * plain / tokens, ours_s + weight * ours / tokens
        sums_Rk = resampled_sums(figures, seed=number)
        plain_R = plain_R + weight * sums_Rk[:, 0] / sums_Rk[:, 2]
        ours_R = ours_R + weight * sums_Rk[:, 1] / sums_Rk[:, 2]
    record = next(iter(by_suite.values()))
    interval = percentile_interval(np.asarray(plain_R / ours_R))
    return Choice(record.method, record.num_speculative_tokens, plain_s / ours_s, interval, 1.0 / ours_s)


def pays_up_to(advices: Sequence[Advice]) -> dict[GroupKey, int | None]:
    """(suite, engine, temperature, context) -> the greatest measured concurrency up to which some method is faster than
    none at every one measured; None: not even at the least.
    """
    found: dict[GroupKey, int | None] = {}
    for advice in sorted(advices, key=lambda advice: advice.concurrency):
        key = (advice.suite, advice.engine, advice.temperature, advice.context_tokens)
        pays = advice.best.method != NONE
        if key not in found:
            found[key] = advice.concurrency if pays else None
        elif pays and found[key] is not None and not _skipped(advices, advice, found[key]):
            found[key] = advice.concurrency
    return found


def _skipped(advices: Sequence[Advice], last: Advice, reached: int | None) -> bool:
    """Whether some concurrency between the one reached and ``last`` did not pay."""
    return any(
        advice.best.method == NONE and reached is not None and reached < advice.concurrency < last.concurrency
        for advice in advices
        if (advice.suite, advice.engine, advice.temperature, advice.context_tokens)
        == (last.suite, last.engine, last.temperature, last.context_tokens)
    )


def _choice(record: EvaluationRecord) -> Choice:
    return Choice(
        record.method,
        record.num_speculative_tokens,
        record.speedup or 0.0,
        record.speedup_interval,
        record.output_tokens_per_s,
    )


def _advice(
    cell: Conditions,
    choices: Sequence[Choice],
    plain_tokens_per_s: float | None,
    suite: str = "",
    predicted: bool = False,
) -> Advice:
    none = Choice(NONE, 0, 1.0, None, plain_tokens_per_s, predicted)
    ordered = sorted([*choices, none], key=lambda choice: (-choice.speedup, choice.num_speculative_tokens))
    best = next(choice for choice in ordered if choice.predicted == predicted)
    certain = best.method == NONE or (best.interval is not None and best.interval[0] > 1.0)
    return Advice(
        suite or cell.suite,
        cell.engine,
        cell.temperature,
        cell.context_tokens,
        cell.concurrency,
        best,
        tuple(ordered),
        certain and not predicted,
        predicted,
    )
