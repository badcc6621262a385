"""What a sweep ends with: a table in the terminal, ``summary/recommendation.json``, and figures for the page and as
files.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from spectrain.config.evaluation_schema import BASELINES
from spectrain.console import say, stdout
from spectrain.evaluation.engine_agreement import EngineAgreement, engine_agreements
from spectrain.evaluation.records import EvaluationRecord
from spectrain.evaluation.report.sweep_plots import Drawing, Line, bars, heatmap, lines, stacked_rounds
from spectrain.evaluation.report.tables import interval_text, measured_label, number
from spectrain.evaluation.sweep_advice import (
    NONE,
    Advice,
    Choice,
    advise,
    advise_workload,
    pays_up_to,
)
from spectrain.evaluation.sweep_predictions import Asked, PredictionError, prediction_errors
from spectrain.files import with_digest, write_atomically

SUMMARY = Path("summary") / "recommendation.json"  # in a folder of its own: what lies beside the cells is a cell


def write_summary(
    folder: Path,
    records: Sequence[EvaluationRecord],
    shares: Mapping[str, float],
    step_by_step: Collection[str],
    asked: Asked,
) -> float | None:
    """Writes the summary and the figures, prints the recommendation. Returns the best speed-up of the workload, or
    of the only suite. asked: concurrencies and lengths of context, of which not all need have been measured.
    """
    suites = advise(records, step_by_step, asked)
    measured = [advice for advice in suites if not advice.predicted]
    several = len({record.suite for record in records}) > 1
    workload = advise_workload(records, shares) if several else []
    errors = prediction_errors(records, step_by_step)
    agreements = engine_agreements(records)
    content = {
        "suites": [_advice_json(advice) for advice in suites],
        "workload": {"shares": dict(shares), "choices": [_advice_json(advice) for advice in workload]},
        "pays_up_to": _pays_json(measured, suites),
        "prediction_errors": [asdict(error) | {"relative": error.relative} for error in errors],
        "engines": [asdict(agreement) for agreement in agreements],
    }
    text = json.dumps(with_digest(json.loads(json.dumps(content))), indent=2, ensure_ascii=False) + "\n"
    write_atomically(folder / SUMMARY, text, "the sweep's summary")
    write_atomically(folder / SUMMARY.parent / "table.md", markdown_table(records))
    for before in (folder / SUMMARY.parent).glob("*.[sp][vn]g"):  # of other cells: these need not have the same figures
        before.unlink()
    for drawing in sweep_drawings(records):
        drawing.write(folder / SUMMARY.parent)
    stdout.print(_table([*suites, *workload]))
    for line in (*_sentences(suites, workload, errors), *_agreement_sentences(agreements)):
        say(line)
    found = workload or measured
    return max((advice.best.speedup for advice in found), default=None)


def markdown_table(records: Sequence[EvaluationRecord]) -> str:
    """A row a cell, for a README."""
    several = len({record.engine for record in records}) > 1
    lines = [
        f"| suite |{' engine |' * several} at a time | method | drafts | acceptance length | tokens/s | speed-up "
        "| prompts |",
        "|---" * (8 + several) + "|",
    ]
    order = {name: place for place, name in enumerate(BASELINES)}
    for r in sorted(
        records,
        key=lambda r: (
            *(r.suite, r.temperature, r.context_tokens or 0, r.engine, r.concurrency),
            *(order.get(r.method, len(order)), r.num_speculative_tokens),
        ),
    ):
        shown = "" if r.acceptance_length is None else f"{number(r.acceptance_length)} {_in_brackets(r)}".strip()
        speed = "" if r.speedup is None else f"{number(r.speedup)}× ({interval_text(r.speedup_interval)})"
        lines.append(
            f"| {r.suite} |{f' {r.engine} |' * several} {r.concurrency} "
            f"| {measured_label(r.method)} | {r.num_speculative_tokens or ''} "
            f"| {shown} | {number(r.output_tokens_per_s, digits=1)} | {speed} | {r.num_prompts} |"
        )
    return "\n".join(lines) + "\n"


def _in_brackets(record: EvaluationRecord) -> str:
    interval = record.acceptance_length_interval
    return f"({interval_text(interval)})" if interval is not None and interval[0] < interval[1] else ""


def _advice_json(advice: Advice) -> dict[str, Any]:
    values = asdict(advice)
    for choice, written in zip(advice.choices, values["choices"], strict=True):
        written["cost"] = advice.cost_of(choice)
    return values


def _pays_json(measured: Sequence[Advice], suites: Sequence[Advice]) -> list[dict[str, Any]]:
    """concurrency: of the measured ones; predicted: with those between them."""
    predicted = pays_up_to(suites)
    return [
        {
            **dict(zip(("suite", "engine", "temperature", "context_tokens"), key, strict=True)),
            "concurrency": most,
            "predicted": predicted.get(key),
        }
        for key, most in pays_up_to(measured).items()
    ]


def _table(advices: Sequence[Advice]) -> Table:
    """The best choice of each group, and what the others cost."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    several = len({advice.engine for advice in advices}) > 1
    for name in ("suite", *(("engine",) * several), "at a time", "recommended", "speed-up", "a wrong choice costs"):
        table.add_column(name, justify="right" if name in ("at a time", "speed-up") else "left", overflow="fold")
    for advice in advices:
        # Predicted ones that look better are no choice yet: they are in the summary.
        others = [c for c in advice.choices if c.predicted == advice.predicted and c is not advice.best]
        costs = ", ".join(f"{_name(choice)} {advice.cost_of(choice):.0%}" for choice in others[:6])
        table.add_row(
            _group(advice),
            *((advice.engine,) * several),
            str(advice.concurrency),
            Text(_label(advice.best), style="bold"),
            f"{number(advice.best.speedup)}× {_bracketed(advice.best)}".strip(),
            costs,
        )
    return table


def _group(advice: Advice) -> str:
    context = "" if advice.context_tokens is None else f", {advice.context_tokens:,} tokens"
    warm = f", T = {advice.temperature:g}" if advice.temperature else ""
    return f"{advice.suite}{context}{warm}"


def _label(choice: Choice) -> str:
    return f"{_name(choice)}{' (predicted)' if choice.predicted else ''}"


def _name(choice: Choice) -> str:
    drafts = f", n = {choice.num_speculative_tokens}" if choice.num_speculative_tokens else ""
    return f"{measured_label(choice.method)}{drafts}"


def _bracketed(choice: Choice) -> str:
    return f"({interval_text(choice.interval)})" if choice.interval else ""


def _sentences(
    suites: Sequence[Advice], workload: Sequence[Advice], errors: Sequence[PredictionError]
) -> Iterator[str]:
    several = len({advice.engine for advice in suites}) > 1
    measured = [advice for advice in (*suites, *workload) if not advice.predicted]
    between = pays_up_to([*suites, *workload])
    for key, most in pays_up_to(measured).items():
        sizes = [a.concurrency for a in measured if a.suite == key[0]]
        where = f"{key[0]}, {key[1]}" if several else key[0]
        if most is None:
            yield f"sweep: {where}: speculation does not pay, not even with {min(sizes)} at a time"
        elif most < max(sizes):
            further = between.get(key) or 0
            guess = f" (predicted between the measured ones: up to {further})" if further > most else ""
            yield f"sweep: {where}: speculation pays up to {most} at a time, not above{guess}"
    for advice in measured:
        group = f"{_group(advice)}, {advice.engine}" if several else _group(advice)
        if not advice.certain:
            yield (
                f"sweep: {group}, {advice.concurrency} at a time: whether {_label(advice.best)} is faster "
                "than none is within the noise: more prompts (suite.max_prompts) would tell"
            )
        for choice in advice.choices:
            if choice.predicted and choice.speedup > advice.best.speedup:
                yield (
                    f"sweep: {group}, {advice.concurrency} at a time: {_label(choice)} may be faster still: "
                    f"{choice.speedup:.2f}x, not measured"
                )
    yield from _error_sentences(errors, any(advice.predicted for advice in suites))


_OVER = {
    "num_speculative_tokens": "other numbers of drafts",
    "concurrency": "other concurrencies",
    "context_tokens": "other lengths of context",
}


def _error_sentences(errors: Sequence[PredictionError], between: bool) -> Iterator[str]:
    """How far off predictions are. ``between``: there are some of whole groups of cells that were not run."""
    for over, told in _OVER.items():
        found = [error for error in errors if error.over == over]
        if not found:
            continue
        worst = max(found, key=lambda error: abs(error.relative))
        at = f"{worst.concurrency} at a time" if over == "concurrency" else f"{worst.context_tokens} tokens"
        yield (
            f"sweep: predicted from {told}, {len(found)} measured cells are off by "
            f"{sum(abs(error.relative) for error in found) / len(found):.1%} on average, at most by "
            f"{worst.relative:+.1%} ({worst.suite}, {measured_label(worst.method)}, n = {worst.num_speculative_tokens}"
            f"{'' if over == 'num_speculative_tokens' else f', {at}'})"
        )
    if between and not any(error.over != "num_speculative_tokens" for error in errors):
        yield (
            "sweep: how far off predicted concurrencies and lengths of context are is not known: of three measured "
            "ones the middle one tells"
        )


def _agreement_sentences(agreements: Sequence[EngineAgreement]) -> Iterator[str]:
    """Of engines that measured the same greedy cells."""
    for engines in dict.fromkeys(agreement.engines for agreement in agreements):
        pair = [agreement for agreement in agreements if agreement.engines == engines]
        apart = [agreement for agreement in pair if not agreement.agrees]
        yield (
            f"sweep: {engines[0]} and {engines[1]} have the same acceptance length, within 95 % intervals, in "
            f"{len(pair) - len(apart)} of {len(pair)} greedy cells, and the same answers to "
            f"{sum(cell.same_output for cell in pair)} of {sum(cell.prompts for cell in pair)} prompts"
        )
        for cell in apart:
            yield (
                f"sweep: {cell.suite}, {measured_label(cell.method)}, n = {cell.num_speculative_tokens}, "
                f"{cell.concurrency} at a time: {number(cell.first)} with {engines[0]}, {number(cell.second)} with "
                f"{engines[1]}"
            )


# --- figures ---------------------------------------------------------------------------------------------------------


def sweep_drawings(records: Sequence[EvaluationRecord]) -> list[Drawing]:
    """The figures that these cells give, of each engine; of several temperatures, contexts and targets those of the
    first.
    """
    engines = list(dict.fromkeys(record.engine for record in records))
    if len(engines) < 2:
        return _drawings_of(records)
    return [
        replace(drawing, name=f"{drawing.name}-{engine}", title=f"{drawing.title}, engine={engine}")
        for engine in engines
        for drawing in _drawings_of([record for record in records if record.engine == engine])
    ]


def _drawings_of(records: Sequence[EvaluationRecord]) -> list[Drawing]:
    if not records:
        return []
    first = records[0]
    shown = [
        record
        for record in records
        if (record.target, record.temperature, record.context_tokens)
        == (first.target, first.temperature, first.context_tokens)
    ]
    least = min(record.concurrency for record in shown)
    alone = [record for record in shown if record.concurrency == least]
    return [*_heatmaps(alone), *_by_drafts(alone), *_by_concurrency(shown), *_rounds(alone), *_memory(alone)]


def _heatmaps(records: Sequence[EvaluationRecord]) -> Iterator[Drawing]:
    longest: dict[tuple[str, str], EvaluationRecord] = {}
    for record in records:
        if record.acceptance_per_position:
            key = record.suite, record.method
            if key not in longest or record.num_speculative_tokens > longest[key].num_speculative_tokens:
                longest[key] = record
    suites = list(dict.fromkeys(suite for suite, _ in longest))
    for suite in suites:
        rows = [(_short(r.method), r.acceptance_per_position) for (s, _), r in longest.items() if s == suite]
        if rows:
            yield heatmap(f"positions-{suite}", f"Acceptance by method and position, {suite}", rows)
    for method in dict.fromkeys(method for _, method in longest):
        rows = [(s, r.acceptance_per_position) for (s, m), r in longest.items() if m == method]
        if len(rows) > 1:
            yield heatmap(f"suites-{method}", f"Acceptance by suite and position, {_short(method)}", rows)


def _by_drafts(records: Sequence[EvaluationRecord]) -> Iterator[Drawing]:
    series: dict[str, dict[str, list[EvaluationRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.speedup is not None and record.method != NONE:
            series[record.suite][record.method].append(record)
    for suite, methods in series.items():
        drawn = [
            Line(
                _short(method),
                [
                    (r.num_speculative_tokens, r.speedup or 0.0, r.speedup_interval)
                    for r in sorted(found, key=lambda r: r.num_speculative_tokens)
                ],
                any(r.is_drafter for r in found),
            )
            for method, found in methods.items()
        ]
        note = f"over no speculation, {records[0].concurrency} at a time, with 95 % interval"
        yield lines(f"speedup-{suite}", f"Speed-up by number of drafts, {suite}", note, "drafts a round", drawn, 1.0)


def _by_concurrency(records: Sequence[EvaluationRecord]) -> Iterator[Drawing]:
    for suite in dict.fromkeys(record.suite for record in records):
        best: dict[str, dict[int, EvaluationRecord]] = defaultdict(dict)
        for record in records:
            if record.suite == suite:
                found = best[record.method].get(record.concurrency)
                if found is None or record.output_tokens_per_s > found.output_tokens_per_s:
                    best[record.method][record.concurrency] = record
        if max((len(by_size) for by_size in best.values()), default=0) < 2:
            continue
        drawn = [
            Line(
                _short(method),
                [(size, record.output_tokens_per_s, None) for size, record in sorted(by_size.items())],
                any(record.is_drafter for record in by_size.values()),
            )
            for method, by_size in best.items()
        ]
        note = "tokens/s of each method with its best number of drafts"
        yield lines(f"concurrency-{suite}", f"Throughput by concurrency, {suite}", note, "at a time", drawn, log=True)


def _rounds(records: Sequence[EvaluationRecord]) -> Iterator[Drawing]:
    for suite in dict.fromkeys(record.suite for record in records):
        rows = []
        for record in records:
            if record.suite != suite or record.draft_s_per_round is None or record.verify_s_per_round is None:
                continue
            name = f"{_short(record.method)}, n = {record.num_speculative_tokens}"
            rows.append((name, (record.draft_s_per_round, record.verify_s_per_round, _rest_s(record))))
        if rows:
            parts = ("drafting", "verification", "rest")
            yield stacked_rounds(f"rounds-{suite}", f"Where a round's time goes, {suite}", rows, parts)


def _memory(records: Sequence[EvaluationRecord]) -> Iterator[Drawing]:
    most: dict[str, tuple[int, bool]] = {}
    for record in records:
        if record.peak_memory_bytes is not None:
            known, _ = most.get(record.method, (0, False))
            most[record.method] = max(known, record.peak_memory_bytes), record.is_drafter
    if most:
        rows = [(_short(method), peak / 1e9, main) for method, (peak, main) in most.items()]
        note = "of the process, on the target's device, with the weights of all drafters of the sweep"
        yield bars("memory", "Peak memory by method", note, "GB", rows)


def _rest_s(record: EvaluationRecord) -> float:
    """Seconds of a batch's round that are neither drafting nor verification: prefill, and what is around the loop."""
    rounds = sum(prompt.rounds for prompt in record.prompts) + record.cut_rounds
    seconds = sum(prompt.seconds for prompt in record.prompts)
    spent = (record.draft_s_per_round or 0.0) + (record.verify_s_per_round or 0.0)
    return max(0.0, record.concurrency * seconds / rounds - spent) if rounds else 0.0


def _short(method: str) -> str:
    return measured_label(method).removesuffix(" drafter")
