"""The report: one self-contained HTML page about a run, for a person.

It loads nothing, follows the reader's light or dark setting, and prints; its one script steps through examples, which
are there without it, too. Every part is optional: a run
that was only trained has no methods to compare, and an imported drafter has no curves. All text is escaped by the
template; figures are SVG of ``plots.py``. The page's content policy forbids anything from outside, so that stays true.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from spectrain.evaluation.records import EvaluationRecord, Interval
from spectrain.evaluation.report import plots
from spectrain.evaluation.report.next_step import TrainedOn, next_step
from spectrain.evaluation.report.serving_report import limits_text, serving_drawings, serving_rows
from spectrain.evaluation.report.sweep_report import sweep_drawings
from spectrain.evaluation.report.tables import (
    MISSING,
    compare_with_simulation,
    confidence_rows,
    decoded_by,
    distinct_names,
    interval_text,
    number,
    percent,
    policy_rows,
    same_output,
    share_text,
    shared_conditions,
)
from spectrain.files import write_atomically

Fact = tuple[str, str]
TEMPLATE, SCRIPT = "report.html.jinja", "examples.js"


@dataclass(frozen=True)
class ExampleText:
    """An answer as it was decoded. ``pieces``: its text in order, True where an accepted draft, False where the
    target's own token.
    """

    prompt: str
    pieces: Sequence[tuple[str, bool]]
    title: str = ""
    acceptance_length: float | None = None


@dataclass(frozen=True)
class ServeCommand:
    """A command the reader can run, and what it is for."""

    title: str
    command: str


@dataclass(frozen=True)
class ReportInputs:
    """Everything the report shows; what is left empty is left out.

    title: the run's name. target: as the reader knows it. created: a date, as text. records: evaluation records, the
    first one of a drafter makes the headline. sweep: the cells of a sweep. serving: what servers' clients
    saw. step_costs: (what was measured,
    (tokens in the target's pass, steps a
    second)). training: the trainer's metrics lines, ``{"step", "loss", …}`` and ``{"step",
    "simulated_acceptance_length", "simulated_interval", "simulated_acceptance_length_by_n", …}``. Facts are pairs of
    name and text. trained_on: whose prompts the drafter of this run learnt from, for what to do next. config_yaml: the
    resolved configuration.
    """

    title: str
    target: str
    created: str = ""
    records: Sequence[EvaluationRecord] = ()
    sweep: Sequence[EvaluationRecord] = ()
    serving: Sequence[EvaluationRecord] = ()
    step_costs: Sequence[tuple[str, Sequence[tuple[int, float]]]] = ()
    training: Sequence[Mapping[str, Any]] = ()
    examples: Sequence[ExampleText] = ()
    drafter_facts: Sequence[Fact] = ()
    data_facts: Sequence[Fact] = ()
    trained_on: TrainedOn | None = None
    serve_commands: Sequence[ServeCommand] = ()
    config_yaml: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, str] = field(default_factory=dict)


def write_report(path: str | Path, inputs: ReportInputs) -> None:
    """Writes the page in one move."""
    write_atomically(Path(path), render_report(inputs))


def render_report(inputs: ReportInputs) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template, script = (
        resources.files(__package__).joinpath(name).read_text(encoding="utf-8") for name in (TEMPLATE, SCRIPT)
    )
    examples = [_Example(example) for example in inputs.examples]
    if all(len(example.passes) < 2 for example in examples):
        script = ""
    main = next((record for record in inputs.records if record.is_drafter), None)
    return environment.from_string(template).render(
        inputs=inputs,
        headline=None if main is None else _headline(inputs, main),
        next_step=None if main is None else next_step(main, inputs.trained_on),
        conditions=shared_conditions(inputs.records),
        methods=list(_method_rows(inputs.records, main)),
        graded=any(record.accuracy is not None for record in inputs.records),
        method_figures=list(_method_figures(inputs.records, main)),
        position_figures=list(_position_figures(inputs.records, main)),
        policies=list(policy_rows(inputs.records)),
        confidence=confidence_rows(main),
        confidence_figures=list(_confidence_figures(inputs, main)),
        training_figures=list(_training_figures(inputs.training)),
        sweep_figures=[_Figure(d.title, d.page(), d.note) for d in sweep_drawings(inputs.sweep)],
        served=list(serving_rows(inputs.serving)),
        served_limits=limits_text(inputs.serving),
        served_figures=[_Figure(d.title, d.page(), d.note) for d in serving_drawings(inputs.serving)],
        examples=examples,
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() if script else "",
    )


@dataclass(frozen=True)
class _Figure:
    title: str
    svg: Markup
    note: str = ""
    legend: Sequence[tuple[str, bool]] = ()  # name, drawn in the accent colour


@dataclass(frozen=True)
class _BigNumber:
    name: str
    value: str
    note: str
    good: bool | None = None


@dataclass(frozen=True)
class _Headline:
    sentence: str
    numbers: Sequence[_BigNumber]
    remark: str


def _headline(inputs: ReportInputs, main: EvaluationRecord) -> _Headline:
    numbers = [
        _BigNumber(
            "acceptance length τ", number(main.acceptance_length), _interval_note(main.acceptance_length_interval)
        )
    ]
    sentence = (
        f"With this drafter, {inputs.target} commits {number(main.acceptance_length)} tokens per pass instead of 1"
    )
    if main.speedup is not None:
        numbers.append(_BigNumber("speed-up", number(main.speedup, "×"), _interval_note(main.speedup_interval)))
        sentence += f" and decodes at {number(main.speedup)} times its own speed"
    verdict = compare_with_simulation(main)
    if verdict is not None:
        words, agree = verdict
        pair = f"{number(main.simulated_acceptance_length, digits=3)} → {number(main.acceptance_length, digits=3)}"
        note = f"simulation predicted, {decoded_by(main)} measured: {words}"
        numbers.append(_BigNumber("simulated → measured", pair, note, agree))
    remark = {
        None: "",
        True: "Its output is identical, token for token.",
        False: "Its output differs from plain greedy decoding.",
    }
    return _Headline(sentence + ".", numbers, remark[main.output_identical])


def _interval_note(interval: Interval | None) -> str:
    return f"95 % interval {interval_text(interval)}" if interval is not None else "no interval: too few prompts"


def _method_rows(records: Sequence[EvaluationRecord], main: EvaluationRecord | None) -> Iterator[dict[str, Any]]:
    for name, record in zip(distinct_names(records), records, strict=True):
        spread = record.acceptance_length_interval
        yield {
            "name": name,
            "main": record is main,
            "acceptance_length": number(record.acceptance_length),
            "acceptance_interval": interval_text(spread) if spread is not None and spread[0] < spread[1] else "",
            "positions": " ".join(map(share_text, record.acceptance_per_position)) or MISSING,
            "tokens_per_s": number(record.output_tokens_per_s, digits=1),
            "speedup": number(record.speedup, "×"),
            "speedup_interval": interval_text(record.speedup_interval),
            "identical": same_output(record),
            "differs": record.output_identical is False,
            "right": percent(record.accuracy),
        }


def _comparable(
    records: Sequence[EvaluationRecord], main: EvaluationRecord | None
) -> list[tuple[str, EvaluationRecord]]:
    """The records measured under the headline's conditions, with their names: what a figure may draw side by side."""

    def conditions(record: EvaluationRecord) -> tuple[object, ...]:
        return record.suite, record.engine, record.temperature, record.concurrency

    group = [record for record in records if main is None or conditions(record) == conditions(main)]
    return list(zip(distinct_names(group), group, strict=True))


def _method_figures(records: Sequence[EvaluationRecord], main: EvaluationRecord | None) -> Iterator[_Figure]:
    group = _comparable(records, main)
    lengths = [
        plots.Measured(name, record.acceptance_length, record.acceptance_length_interval, record is main)
        for name, record in group
        if record.acceptance_length is not None
    ]
    if len(lengths) > 1:
        yield _Figure(
            "Acceptance length",
            plots.interval_figure(lengths, reference=1.0),
            "tokens per target pass, with 95 % interval",
        )
    speeds = [plots.Measured(name, record.output_tokens_per_s, None, record is main) for name, record in group]
    if len(speeds) > 1:
        yield _Figure("Throughput", plots.bar_figure(speeds, "tokens per second"), "output tokens per second")


def _position_figures(records: Sequence[EvaluationRecord], main: EvaluationRecord | None) -> Iterator[_Figure]:
    if main is None or not main.acceptance_per_position:
        return
    # The headline and the baselines that draft; further drafters are in the table, or the bars would be too many to
    # read.
    shown = [
        (n, r) for n, r in _comparable(records, main) if r.acceptance_per_position and (r is main or not r.is_drafter)
    ]
    legend = [(name, record is main) for name, record in shown]
    survival = [plots.Series(name, record.acceptance_per_position, record is main) for name, record in shown]
    yield _Figure("Accepted up to this position", plots.survival_figure(survival), "share of all rounds", legend)
    conditional = [
        plots.Series(name, record.conditional_acceptance_per_position, record is main) for name, record in shown
    ]
    yield _Figure(
        "Accepted, if all before were",
        plots.conditional_figure(conditional),
        "share of the rounds that reached this position",
        legend,
    )


def _confidence_figures(inputs: ReportInputs, main: EvaluationRecord | None) -> Iterator[_Figure]:
    if main is not None and main.confidence is not None:
        svg = plots.reliability_figure(main.confidence.bins, main.confidence.raw_bins)
        legend = [("calibrated", True), ("as the drafter says", False)]
        yield _Figure(
            "Predicted and true", svg, f"survival of drafts in {main.confidence.rounds:,} rounds, all positions", legend
        )
    for label, points in inputs.step_costs:
        yield _Figure("What a step costs", plots.cost_figure(points, label), f"steps a second, {label}")


def _training_figures(training: Sequence[Mapping[str, Any]]) -> Iterator[_Figure]:
    losses = _by_step(training, "loss")
    if len(losses) > 1:
        svg = plots.loss_figure([line["step"] for line in losses], [line["loss"] for line in losses])
        yield _Figure("Training loss", svg, "each step, and a running mean")
    simulations = _by_step(training, "simulated_acceptance_length")
    if not simulations:
        return
    lengths = [line["simulated_acceptance_length"] for line in simulations]
    intervals = [tuple(line["simulated_interval"]) if line.get("simulated_interval") else None for line in simulations]
    svg = plots.simulated_acceptance_figure([line["step"] for line in simulations], lengths, intervals)
    yield _Figure("Simulated acceptance length", svg, "on held-out text, with 95 % interval; the best is kept")
    best = simulations[max(range(len(simulations)), key=lengths.__getitem__)]
    by_n = sorted(
        (int(n), length)
        for n, length in (best.get("simulated_acceptance_length_by_n") or {}).items()
        if _finite(length)
    )
    if len(by_n) > 1:
        yield _Figure(
            "If it drafted fewer or more",
            plots.draft_length_figure(by_n),
            f"simulated acceptance length at step {best['step']:,}",
        )


def _by_step(training: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """The lines that measured ``name``, one per step in order: a resumed run writes the steps after its checkpoint
    again.
    """
    lines = {line["step"]: line for line in training if "step" in line and _finite(line.get(name))}
    return [lines[step] for step in sorted(lines)]


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _passes(pieces: Sequence[tuple[str, bool]]) -> list[list[tuple[str, bool]]]:
    """What each pass of the target committed: accepted drafts, and its own token behind them."""
    passes: list[list[tuple[str, bool]]] = [[]]
    for piece in pieces:
        passes[-1].append(piece)
        if not piece[1]:
            passes.append([])
    return [part for part in passes if part]


class _Example:
    """An example for the template: runs of pieces and what they add up to."""

    def __init__(self, example: ExampleText) -> None:
        self.title = example.title
        self.prompt = example.prompt
        self.passes = _passes(example.pieces)
        accepted = sum(is_draft for _, is_draft in example.pieces)
        facts = [f"{accepted} of {len(example.pieces)} tokens are accepted drafts"]
        if example.acceptance_length is not None:
            facts.append(f"τ {number(example.acceptance_length)}")
        self.facts = " · ".join(facts)
