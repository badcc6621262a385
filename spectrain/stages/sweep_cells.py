"""The cells of a sweep: which there are, what each was made from, and which are there already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from spectrain.config.engine_schema import EngineConfig
from spectrain.config.evaluation_schema import BASELINES, SuiteConfig
from spectrain.config.folders import group_options
from spectrain.config.overrides import build, suggest
from spectrain.config.schema import SpectrainConfig
from spectrain.console import say
from spectrain.errors import ConfigError, InputError
from spectrain.evaluation.records import EvaluationRecord, read_record
from spectrain.files import comparable, digest_strings
from spectrain.stages.answer_suite import (
    Method,
    answer_limit,
    conditions,
    measured_inputs,
    note_fewer_prompts,
    note_substitute_tests,
    suite_prompts,
)
from spectrain.stages.context import Context
from spectrain.stages.drafter_checks import check_baselines, check_drafts
from spectrain.stages.eval_vllm import engine_version
from spectrain.stages.swept_drafters import SweptDrafter

NONE = "none"


@dataclass(frozen=True)
class Cell:
    """One measurement of a sweep, and the command's context with its settings."""

    method: str
    is_drafter: bool
    context: Context = field(compare=False)
    name: str = ""

    @property
    def n(self) -> int:
        return 0 if self.method == NONE else self.context.config.decoding.num_speculative_tokens


def sweep_cells(context: Context, drafters: Mapping[str, SweptDrafter]) -> list[Cell]:
    """In the order in which they are measured; ``drafters``: by kind.

    Raises for a method, a suite or a prompt that cannot be measured.
    """
    config = context.config
    methods = config.sweep.methods or (NONE, "ngram", "suffix", *drafters)
    known = (*BASELINES, *drafters)
    for method in methods:
        if method not in known:
            close = suggest(method, known)
            hint = f"did you mean {close[0]}?" if close else f"use some of {', '.join(known)}"
            raise ConfigError(
                f"sweep.methods: {method} is neither a method without a drafter nor a drafter's of this sweep "
                f"(sweep.drafters names further ones): {hint}"
            )
    counts = {method: _counts(config.sweep.num_speculative_tokens, drafters.get(method)) for method in methods}
    measured = [(engine, _had_by(engine, config, counts, drafters)) for engine in config.swept_engines]
    suites = [_suite(context, name) for name in config.sweep.suites] or [config.suite]
    cells: list[Cell] = []
    for suite in suites:
        for tokens in config.sweep.context_tokens or (suite.context_tokens,):
            asked = context.under(suite=replace(suite, context_tokens=tokens, batches=(), policies=()))
            note_fewer_prompts(asked)
            note_substitute_tests(asked)
            for conversation in suite_prompts(asked):
                answer_limit(asked, conversation, asked.template.first_prompt_ids(conversation))
            for temperature in config.sweep.temperatures or (config.decoding.temperature,):
                for size in config.sweep.concurrency:
                    for engine, had in measured:
                        cells += _group(asked.under(engine=engine), had, drafters, temperature, size)
    names = [cell.name for cell in cells]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"sweep.suites: two suites are called alike ({twice}): give each a name of its own, NAME:FILE"
        )
    return cells


def _had_by(
    engine: EngineConfig,
    config: SpectrainConfig,
    counts: Mapping[str, Sequence[int]],
    drafters: Mapping[str, SweptDrafter],
) -> dict[str, Sequence[int]]:
    """The methods that an engine has. ConfigError for one that it has not, unless others are measured with it, too."""
    had = {}
    for method, numbers in counts.items():
        try:
            check_baselines(replace(config, engine=engine), [method])
            if engine.name != "hf" and method in drafters and not drafters[method].known_to_vllm:
                raise ConfigError(f"vLLM has no {method} drafters: leave {method} out, or use engine=hf")
        except ConfigError as error:
            if engine.name == "hf" or len(config.swept_engines) == 1:
                raise
            say(f"note: {error}; {method} is left out with engine={engine.name}")
        else:
            had[method] = numbers
    return had


def _counts(asked: Sequence[int], drafter: SweptDrafter | None) -> tuple[int, ...]:
    """The numbers of drafts that a method is measured with: those that its drafter can give."""
    if drafter is None or drafter.most_drafts is None or max(asked) <= drafter.most_drafts:
        return tuple(asked)
    most = drafter.most_drafts
    if len(asked) == 1 or min(asked) > most:
        check_drafts(drafter.folder, min(asked))
    say(f"note: the drafter in {drafter.folder} gives {most} drafts a round: it is not measured with more")
    return tuple(n for n in asked if n <= most)


def _group(
    context: Context,
    counts: Mapping[str, Sequence[int]],
    drafters: Mapping[str, SweptDrafter],
    temperature: float,
    size: int,
) -> Iterator[Cell]:
    suite = replace(context.config.suite, concurrency=size)
    for method, numbers in counts.items():
        drafter = drafters.get(method)
        named = {} if drafter is None else {"drafter": drafter.config}
        for n in numbers if method != NONE else numbers[:1]:
            decoding = replace(context.config.decoding, num_speculative_tokens=n, temperature=temperature)
            own = context.under(suite=suite, decoding=decoding, **named)
            described = conditions(own, Method(method, drafter is not None), size, "")
            name = EvaluationRecord(**vars(described), **_NOTHING_MEASURED).file_name()
            yield Cell(method, drafter is not None, own, name)


_NOTHING_MEASURED: dict[str, Any] = {
    **dict.fromkeys(("num_prompts", "rounds", "cut_rounds", "drafted_tokens", "accepted_tokens", "output_tokens"), 0),
    **dict.fromkeys(("acceptance_length", "acceptance_length_interval", "acceptance_rate")),
    "acceptance_per_position": (),
    "conditional_acceptance_per_position": (),
    "output_tokens_per_s": 0.0,
}


def _suite(context: Context, entry: str) -> SuiteConfig:
    """``NAME``, ``FILE`` or ``NAME:FILE``, with what the command line sets of all suites."""
    name, _, path = entry.partition(":")
    options = group_options("suite")
    if name == context.config.suite.name and not path:
        return context.config.suite
    if name in options:
        values = yaml.safe_load(options[name].read_text(encoding="utf-8"))
        suite = build({"suite": values | ({"path": path} if path else {})}).suite
    elif path or Path(name).expanduser().is_file():
        suite = SuiteConfig(name=name if path else Path(name).stem, prompts=path or name)
    else:
        close = suggest(name, options)
        hint = f"did you mean {close[0]}?" if close else f"use a file, or some of {', '.join(sorted(options))}"
        raise ConfigError(f"sweep.suites: there is no suite {name}: {hint}")
    if suite.uses_heldout and context.prompts_or_none is None:
        raise InputError(f"sweep.suites: {name} asks this run's held-out prompts, but there are none: add data=...")
    given = {
        key: getattr(context.config.suite, key)
        for key in (
            "max_prompts",
            "max_new_tokens",
            "categories",
            *(("execute_code",) if suite.grading == "tests" else ()),
        )
        if f"suite.{key}" in context.given
    }
    return replace(suite, **given)


def cell_inputs(cell: Cell) -> str:
    """Digest of all that the cell's figures depend on."""
    config = cell.context.config
    decoding = {key: value for key, value in vars(config.decoding).items() if key not in ("draft_policy", "threshold")}
    known: dict[str, Any] = {
        **measured_inputs(cell.context, with_drafter=cell.is_drafter),
        **decoding,
        "method": cell.method,
        "concurrency": config.suite.concurrency,
        "baseline": config.sweep.baseline,
    }
    if cell.method == NONE:
        known.pop("num_speculative_tokens")
    if config.engine.name != "hf":
        known |= {"engine": asdict(config.engine), "engine version": engine_version(cell.context)}
    return digest_strings(comparable(known))


def measured_cell(folder: Path, cell: Cell, inputs: str) -> EvaluationRecord | None:
    """The cell's record, if it is there, whole, and made from these inputs."""
    file = folder / cell.name
    if not file.is_file():
        return None
    try:
        record = read_record(file)
    except InputError as error:
        say(f"sweep: {error}")
        return None
    return record if record.inputs == inputs else None
