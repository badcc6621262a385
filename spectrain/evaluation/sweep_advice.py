"""What a sweep's cells say: the best method and number of drafts for a suite and for a workload, what a wrong choice
costs, and where speculation does not pay.

Cells are compared by their speed-up over no speculation, which was measured beside each of them: throughputs of cells
an hour apart also measure what else the machine did. A workload is shares of output tokens by suite; its seconds a
token are the suites', weighted by the shares, so its speed-up is no mean of speed-ups.

Between measured numbers of drafts, speed is predicted: τ(n) = 1 + Σ_{j≤n} s_j from the acceptance by position of the
next longer measured round, and the cost of a round in plain steps, τ / speed-up, which is 1 for no drafts and taken as
linear in n. What that is worth is seen where a measured cell is predicted from the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spectrain.decoding.acceptance import percentile_interval, resampled_sums
from spectrain.evaluation.prompt_figures import timed_units
from spectrain.evaluation.records import EvaluationRecord, Interval

Conditions = tuple[object, ...]  # of a group of cells that may be compared with each other
NONE = "none"


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
    certain: the best one's interval lies above 1 as a whole, or none is the best.
    """

    suite: str
    engine: str
    temperature: float
    context_tokens: int | None
    concurrency: int
    best: Choice
    choices: tuple[Choice, ...]
    certain: bool

    def cost_of(self, choice: Choice) -> float:
        """The share of throughput that is lost with another choice."""
        return 1.0 - choice.speedup / self.best.speedup


@dataclass(frozen=True)
class PredictionError:
    """A measured cell, as predicted from the others of its group."""

    suite: str
    method: str
    num_speculative_tokens: int
    concurrency: int
    measured: float
    predicted: float

    @property
    def relative(self) -> float:
        return self.predicted / self.measured - 1.0


def advise(records: Sequence[EvaluationRecord], step_by_step: Collection[str] = ()) -> list[Advice]:
    """Advice for each suite at each concurrency. ``step_by_step``: methods whose shorter rounds are beginnings of
    longer ones, so that they can be predicted.
    """
    advices = []
    for group in _groups(records).values():
        measured = [_choice(record) for record in group if record.speedup is not None and record.method != NONE]
        plain = next((record for record in group if record.method == NONE), None)
        choices = [*measured, *_predicted(group, step_by_step)]
        advices.append(_advice(group[0], choices, None if plain is None else plain.output_tokens_per_s))
    return advices


def advise_workload(records: Sequence[EvaluationRecord], shares: Mapping[str, float]) -> list[Advice]:
    """Advice for a workload at each concurrency, from the choices that were measured in all its suites. ``shares``: of
    output tokens by suite; empty: as much of each.
    """
    suites = sorted({record.suite for record in records})
    weights = {suite: shares.get(suite, 0.0) for suite in suites} if shares else dict.fromkeys(suites, 1.0)
    weights = {suite: weight / sum(weights.values()) for suite, weight in weights.items() if weight > 0}
    cells: dict[Conditions, dict[str, EvaluationRecord]] = defaultdict(dict)
    for record in records:
        if record.speedup is not None and record.method != NONE and record.suite in weights:
            key = (*_conditions(record)[1:], record.method, record.num_speculative_tokens)
            cells[key][record.suite] = record
    groups: dict[Conditions, list[dict[str, EvaluationRecord]]] = defaultdict(list)
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


def pays_up_to(advices: Sequence[Advice]) -> dict[Conditions, int | None]:
    """(suite, engine, temperature, context) -> the greatest measured concurrency up to which some method is faster than
    none at every one measured; None: not even at the least.
    """
    found: dict[Conditions, int | None] = {}
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


def prediction_errors(records: Sequence[EvaluationRecord], step_by_step: Collection[str]) -> list[PredictionError]:
    """How well the cells between others are predicted from those others."""
    errors = []
    for group in _groups(records).values():
        for cells in _by_method(group, step_by_step).values():
            for n, record in cells.items():
                others = {m: other for m, other in cells.items() if m != n}
                predicted = _predict(others, n)
                if predicted is not None and record.speedup:
                    errors.append(
                        PredictionError(record.suite, record.method, n, record.concurrency, record.speedup, predicted)
                    )
    return errors


def _conditions(record: EvaluationRecord) -> Conditions:
    return (
        *(record.suite, record.target, record.target_revision, record.engine, record.temperature, record.top_p),
        *(record.top_k, record.proposal_policy, record.context_tokens, record.max_new_tokens, record.concurrency),
    )


def _groups(records: Sequence[EvaluationRecord]) -> dict[Conditions, list[EvaluationRecord]]:
    groups: dict[Conditions, list[EvaluationRecord]] = defaultdict(list)
    for record in records:
        groups[_conditions(record)].append(record)
    return groups


def _choice(record: EvaluationRecord) -> Choice:
    return Choice(
        record.method,
        record.num_speculative_tokens,
        record.speedup or 0.0,
        record.speedup_interval,
        record.output_tokens_per_s,
    )


def _advice(
    record: EvaluationRecord, choices: Sequence[Choice], plain_tokens_per_s: float | None, suite: str = ""
) -> Advice:
    none = Choice(NONE, 0, 1.0, None, plain_tokens_per_s)
    ordered = sorted([*choices, none], key=lambda choice: (-choice.speedup, choice.num_speculative_tokens))
    best = next(choice for choice in ordered if not choice.predicted)
    certain = best.method == NONE or (best.interval is not None and best.interval[0] > 1.0)
    return Advice(
        suite or record.suite,
        record.engine,
        record.temperature,
        record.context_tokens,
        record.concurrency,
        best,
        tuple(ordered),
        certain,
    )


def _by_method(
    group: Sequence[EvaluationRecord], step_by_step: Collection[str]
) -> dict[str, dict[int, EvaluationRecord]]:
    found: dict[str, dict[int, EvaluationRecord]] = defaultdict(dict)
    for record in group:
        if record.method in step_by_step and record.speedup and record.acceptance_length:
            found[record.method][record.num_speculative_tokens] = record
    return found


def _predicted(group: Sequence[EvaluationRecord], step_by_step: Collection[str]) -> list[Choice]:
    """The numbers of drafts between measured ones."""
    choices = []
    for method, cells in _by_method(group, step_by_step).items():
        for n in range(1, max(cells)):
            speedup = _predict(cells, n) if n not in cells else None
            if speedup is not None:
                choices.append(Choice(method, n, speedup, None, predicted=True))
    return choices


def _predict(cells: Mapping[int, EvaluationRecord], n: int) -> float | None:
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
