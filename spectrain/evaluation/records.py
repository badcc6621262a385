"""The evaluation record: one measurement, with everything another person needs to judge or repeat it.

One JSON file per (suite, engine, method, number of speculative tokens, temperature, draft policy, concurrency). Units
are in the field names; a figure that was not measured is ``null``, never zero. Acceptance length (τ, tau) and rates
come from ``decoding/acceptance.py``, so a record, the trainer's evaluation and vLLM's counters are the same
quantities.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spectrain.config.evaluation_schema import BASELINES, DRAFT_POLICIES
from spectrain.decoding.acceptance import AcceptanceStats, acceptance, bootstrap_ratio_interval
from spectrain.errors import InputError, RunError
from spectrain.evaluation.prompt_figures import PromptFigures, accuracy, prompt_figures
from spectrain.evaluation.prompt_figures import PromptResult as PromptResult
from spectrain.evaluation.record_fields import fits, frozen, impossible
from spectrain.evaluation.reliability import ConfidenceStats
from spectrain.evaluation.serving_figures import ServingFigures
from spectrain.files import check_digest, finite_or_none, with_digest, without_digest, write_atomically
from spectrain.reading import read_json

Interval = tuple[float, float]
# Of a record, what trackers show.
_FIGURES = (
    *("acceptance_length", "acceptance_length_interval", "acceptance_rate", "acceptance_per_position"),
    *("simulated_acceptance_length", "output_tokens_per_s", "speedup", "speedup_interval"),
)
SCHEMA_VERSION = 1
STAGE_PREFIX = "eval/"  # of the manifest's entries of measurements
UNTUNED = "-untuned"  # behind a kind's name: what the target brings along, measured beside what was tuned from it


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What was measured, on what, and how: known before the first prompt.

    drafter: folder or Hub id, ``None`` for methods without one. num_speculative_tokens: the most drafts of a round, 0
    without speculation. top_p = 1 and top_k = 0 are off. concurrency: conversations decoded together. draft_policy:
    which drafts of a round are verified (fixed: all, threshold, scheduler), draft_threshold: the threshold of that
    policy. thinking: whether the chat template was told to let the target think; template_kwargs: all that it was told,
    as JSON. context_tokens: what prompts were lengthened to, ``None`` for prompts as they are. request_rate: requests
    that arrived in a second at a server, ``None`` where ``concurrency`` of them were under way at any time.
    """

    target: str
    target_revision: str
    drafter: str | None
    method: str
    engine: str
    engine_version: str
    suite: str
    num_speculative_tokens: int
    temperature: float
    top_p: float
    top_k: int
    proposal_policy: str
    concurrency: int
    thinking: bool = False
    template_kwargs: str = "{}"
    max_new_tokens: int | None = None
    draft_policy: str = "fixed"
    draft_threshold: float | None = None
    context_tokens: int | None = None
    request_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(Conditions):
    """``Conditions`` and the figures measured under them.

    acceptance_length (τ, tau) counts the bonus token; rounds, drafted_tokens and accepted_tokens are of complete rounds
    (``cut_rounds`` were ended by the length limit and are left out). acceptance_per_position is unconditional, as vLLM
    reports it. Intervals are 95 % bootstrap intervals over prompts. speedup: the baseline's seconds for as many tokens,
    over this method's. output_identical: the ids equal the baseline's, prompt by prompt; ``None`` above temperature 0.
    output_distribution_p: p-value of the same distribution with and without speculation, where seeds were drawn.
    simulated_*: what simulation predicted for the same prompts. confidence: whether a drafter's confidence was right,
    measured where all drafts are verified. accuracy: share of right answers of those graded. prompts: figures of each.
    inputs: digest of all that the measurement was made from, where it is one of a sweep. serving: what a server's
    clients saw; output_tokens_per_s, speedup (of a request's latency) and baseline_tokens_per_s are then of all
    requests.
    """

    num_prompts: int
    rounds: int
    cut_rounds: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_length: float | None
    acceptance_length_interval: Interval | None
    acceptance_rate: float | None
    acceptance_per_position: tuple[float | None, ...]
    conditional_acceptance_per_position: tuple[float | None, ...]
    output_tokens: int
    output_tokens_per_s: float
    baseline_tokens_per_s: float | None = None
    speedup: float | None = None
    speedup_interval: Interval | None = None
    draft_s_per_round: float | None = None
    verify_s_per_round: float | None = None
    peak_memory_bytes: int | None = None
    output_identical: bool | None = None
    output_distribution_p: float | None = None
    simulated_acceptance_length: float | None = None
    simulated_acceptance_length_interval: Interval | None = None
    simulated_rounds: int | None = None
    confidence: ConfidenceStats | None = None
    accuracy: float | None = None
    baseline_accuracy: float | None = None
    prompts: tuple[PromptFigures, ...] = ()
    inputs: str | None = None
    serving: ServingFigures | None = None
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def is_drafter(self) -> bool:
        """True for a trained drafter, False for the baselines, which need none."""
        return self.drafter is not None

    def file_name(self) -> str:
        """Distinct wherever ``measurement_name`` is."""
        name = measurement_name(
            self.suite,
            self.engine,
            self.num_speculative_tokens,
            self.temperature,
            self.draft_policy,
            self.draft_threshold,
            method=self.method,
            concurrency=self.concurrency,
            context_tokens=self.context_tokens,
            request_rate=self.request_rate,
        )
        return f"{name}.json"

    def write(self, folder: str | Path) -> Path:
        """Writes ``file_name()`` in ``folder``, in one move, and returns its path."""
        path = Path(folder) / self.file_name()
        content = with_digest(dataclasses.asdict(self))
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_atomically(path, text, "an evaluation record")
        return path


def measurement_name(
    suite: str,
    engine: str,
    num_speculative_tokens: int,
    temperature: float,
    draft_policy: str = "fixed",
    draft_threshold: float | None = None,
    *,
    method: str = "",
    concurrency: int = 1,
    context_tokens: int | None = None,
    request_rate: float | None = None,
) -> str:
    """The name that tells measurements apart, safe in a path: of a record's file, and, without method and concurrency,
    of the stage that measures several methods and batch sizes: ``heldout-hf-eagle3-n3-t0``, ``heldout-hf-n3-t0``.
    """
    parts = [suite, engine, *([method] if method else []), f"n{num_speculative_tokens}", f"t{temperature:g}"]
    if draft_policy != "fixed":
        parts.append(draft_policy + ("" if draft_threshold is None else f"{draft_threshold:g}"))
    if context_tokens is not None:
        parts.append(f"k{context_tokens}")
    if request_rate is not None:
        parts.append(f"r{request_rate:g}")
    if concurrency > 1:
        parts.append(f"c{concurrency}")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts))


def build_record(
    conditions: Conditions,
    results: Sequence[PromptResult],
    baseline: Sequence[PromptResult] | None = None,
    simulated: AcceptanceStats | None = None,
    *,
    draft_s_per_round: float | None = None,
    verify_s_per_round: float | None = None,
    peak_memory_bytes: int | None = None,
    confidence: ConfidenceStats | None = None,
    inputs: str | None = None,
    output_distribution_p: float | None = None,
) -> EvaluationRecord:
    """The record of ``results``, one per prompt.

    baseline: the same prompts answered without speculation; leave it out for that measurement itself. simulated:
    the simulation's figures for these prompts. draft_s_per_round, verify_s_per_round: of a batch's round, as the loop
    times them.

    Raises RunError if there is no result, if no time was measured, or if ``baseline`` answers other prompts.
    """
    if not results:
        raise RunError(
            f"Suite {conditions.suite} gave no result for method {conditions.method}: nothing can be recorded."
        )
    if baseline is not None:
        baseline = _same_prompts(conditions, results, baseline)
    stats = acceptance([result.rounds for result in results], num_positions=conditions.num_speculative_tokens)
    speedup, speedup_interval = (None, None) if baseline is None else _speedup(results, baseline)
    known: dict[str, Any] = {f.name: getattr(conditions, f.name) for f in dataclasses.fields(Conditions)}
    return EvaluationRecord(
        **known,
        num_prompts=len(results),
        rounds=stats.rounds,
        cut_rounds=stats.cut_rounds,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        acceptance_length=finite_or_none(stats.acceptance_length),
        acceptance_length_interval=stats.interval,
        acceptance_rate=finite_or_none(stats.acceptance_rate),
        acceptance_per_position=tuple(finite_or_none(share) for share in stats.acceptance_per_position),
        conditional_acceptance_per_position=tuple(
            finite_or_none(share) for share in stats.conditional_acceptance_per_position
        ),
        output_tokens=_tokens(results),
        output_tokens_per_s=_tokens_per_s(conditions, results),
        baseline_tokens_per_s=None if baseline is None else _tokens_per_s(conditions, baseline),
        speedup=speedup,
        speedup_interval=speedup_interval,
        draft_s_per_round=draft_s_per_round,
        verify_s_per_round=verify_s_per_round,
        peak_memory_bytes=peak_memory_bytes,
        output_distribution_p=output_distribution_p,
        output_identical=_identical(conditions, results, baseline),
        simulated_acceptance_length=None if simulated is None else finite_or_none(simulated.acceptance_length),
        simulated_acceptance_length_interval=None if simulated is None else simulated.interval,
        simulated_rounds=None if simulated is None else simulated.rounds,
        confidence=confidence,
        accuracy=accuracy(results),
        baseline_accuracy=None if baseline is None else accuracy(baseline),
        prompts=prompt_figures(results, baseline),
        inputs=inputs,
    )


def _same_prompts(
    conditions: Conditions, results: Sequence[PromptResult], baseline: Sequence[PromptResult]
) -> list[PromptResult]:
    """The baseline in the order of ``results``."""
    by_key = {result.key: result for result in baseline}
    if len(by_key) != len(results) or any(result.key not in by_key for result in results):
        raise RunError(
            f"Suite {conditions.suite}: method {conditions.method} and its baseline answered different prompts, so no "
            f"speed-up."
        )
    return [by_key[result.key] for result in results]


def _speedup(results: Sequence[PromptResult], baseline: Sequence[PromptResult]) -> tuple[float | None, Interval | None]:
    """Ratio of seconds with its paired bootstrap interval; the unit drawn is what was timed together, a prompt or a
    batch.

    Where answers differ in length (sampling), the baseline's seconds are scaled to the method's tokens, prompt by
    prompt.
    """
    baseline_s: dict[object, float] = {}
    method_s: dict[object, float] = {}
    for ours, theirs in zip(results, baseline, strict=True):
        if len(theirs.output_ids) == 0:  # nothing to scale from
            continue
        unit = ("alone", ours.key) if ours.batch is None else ("batch", ours.batch)
        baseline_s[unit] = baseline_s.get(unit, 0.0) + theirs.seconds * len(ours.output_ids) / len(theirs.output_ids)
        method_s[unit] = method_s.get(unit, 0.0) + ours.seconds
    total_s = sum(method_s.values())
    if total_s <= 0:
        return None, None
    return sum(baseline_s.values()) / total_s, bootstrap_ratio_interval(
        list(baseline_s.values()), list(method_s.values())
    )


def _identical(
    conditions: Conditions, results: Sequence[PromptResult], baseline: Sequence[PromptResult] | None
) -> bool | None:
    if baseline is None or conditions.temperature > 0:
        return None
    return all(list(ours.output_ids) == list(theirs.output_ids) for ours, theirs in zip(results, baseline, strict=True))


def _tokens(results: Sequence[PromptResult]) -> int:
    return sum(len(result.output_ids) for result in results)


def _tokens_per_s(conditions: Conditions, results: Sequence[PromptResult]) -> float:
    seconds = sum(result.seconds for result in results)
    if seconds <= 0:
        raise RunError(
            f"Suite {conditions.suite}, method {conditions.method}: no time was measured, so no throughput can be "
            f"recorded."
        )
    return _tokens(results) / seconds


def read_record(path: str | Path) -> EvaluationRecord:
    """The record in a file. Raises InputError that names the file and what is wrong with it, or that it was changed."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"There is no evaluation record {path}: run `spectrain eval` first.")
    try:
        values = read_json(path)
    except InputError as error:
        raise InputError(
            f"{path} is not a readable evaluation record ({error}): delete it and run `spectrain eval` again."
        ) from None
    digested, values = values, without_digest(values)
    hints = typing.get_type_hints(EvaluationRecord)
    required = {f.name for f in dataclasses.fields(EvaluationRecord) if f.default is dataclasses.MISSING}
    problems = [f"unknown field {name}" for name in values if name not in hints]
    problems += [f"missing field {name}" for name in sorted(required - values.keys())]
    problems += [
        f"field {name} has a wrong type"
        for name, value in values.items()
        if name in hints and not fits(value, hints[name])
    ]
    problems += [f"field {name}: no figure is {value}" for name, value in impossible(values)]
    if values.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        problems.insert(0, f"schema version {values['schema_version']}, this spectrain reads {SCHEMA_VERSION}")
    if problems:
        raise InputError(
            f"{path} is not an evaluation record of this version ({problems[0]}): run `spectrain eval` again."
        )
    check_digest(digested, path, "delete it and run `spectrain eval` again")
    fields = {name: frozen(value) for name, value in values.items()}
    if fields.get("confidence") is not None:
        fields["confidence"] = ConfidenceStats(**fields["confidence"])
    if fields.get("serving") is not None:
        fields["serving"] = ServingFigures.read(fields["serving"])
    fields["prompts"] = tuple(PromptFigures(**figures) for figures in fields.get("prompts") or ())
    return EvaluationRecord(**fields)


def read_records(folder: str | Path) -> list[EvaluationRecord]:
    """All records of a folder: without speculation first, then n-gram, then drafters; by suite and number of drafts
    within each.
    """
    records = [read_record(path) for path in sorted(Path(folder).glob("*.json"))]
    methods = {name: order for order, name in enumerate(BASELINES)}
    policies = {name: order for order, name in enumerate(DRAFT_POLICIES)}
    return sorted(
        records,
        key=lambda r: (
            *(r.suite, r.temperature, methods.get(r.method, len(methods)), not r.method.endswith(UNTUNED), r.method),
            r.num_speculative_tokens,
            *(r.concurrency, policies.get(r.draft_policy, len(policies))),
        ),
    )


def record_figures(records: Sequence[EvaluationRecord]) -> dict[str, Any]:
    """Figures of evaluation records, each under its conditions: ``eval/heldout-hf-eagle3-n3-t0/acceptance_length``."""
    return {
        f"eval/{record.file_name().removesuffix('.json')}/{name}": getattr(record, name)
        for record in records
        for name in _FIGURES
        if getattr(record, name) is not None
    }
