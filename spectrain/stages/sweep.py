"""``eval sweep``: number of drafts × method × suite × concurrency × temperature × context length, a cell a file, and
what they recommend.

Target and drafters are loaded once. A cell that is there, made from the same inputs, is not measured again, so a sweep
that was killed goes on with the cell it was at. With vLLM each method and number of drafts is a configuration of its
own, which is opened once for all its cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from spectrain.console import say
from spectrain.decoding.proposers import Proposer
from spectrain.drafters.drafter import Drafter
from spectrain.engines.vllm.args import is_cpu_build
from spectrain.engines.vllm.requests import VLLMClient
from spectrain.errors import ConfigError, RunError
from spectrain.evaluation.lossless import OutputDifference
from spectrain.evaluation.records import EvaluationRecord, PromptResult, build_record, read_records
from spectrain.evaluation.report.sweep_report import SUMMARY, write_summary
from spectrain.evaluation.sweep_predictions import Asked
from spectrain.stages.answer_suite import (
    Decode,
    answer_in_turns,
    conditions,
    load_measured_drafter,
    output_differences,
    refuse_wrong_output,
    simulate_same_prompts,
    suite_prompts,
)
from spectrain.stages.baselines import baseline_proposer
from spectrain.stages.context import Context
from spectrain.stages.eval import LoopMethod, decode_in_loop
from spectrain.stages.eval_vllm import VLLMMethod, decoder_of, engine_version, vllm_method
from spectrain.stages.peak_memory import forget_peak, peak_memory_bytes
from spectrain.stages.run_report import Answer, write_run_report
from spectrain.stages.sweep_cells import NONE, Cell, cell_inputs, measured_cell, sweep_cells
from spectrain.stages.swept_drafters import step_by_step, swept_drafters
from spectrain.target.cpu_kernels import speed_up


def sweep(context: Context) -> float | None:
    """Measure what is missing, then say what all of it recommends. Returns the best speed-up."""
    engines = context.config.swept_engines
    if any(engine.name == "vllm_server" and engine.urls for engine in engines):
        raise ConfigError(
            "eval sweep starts vLLM itself, once for each method and number of drafts: leave engine.urls empty"
        )
    drafters = swept_drafters(context)
    cells = sweep_cells(context, drafters)
    folder = context.run_dir.eval / "sweep"
    folder.mkdir(parents=True, exist_ok=True)
    inputs = [cell_inputs(cell) for cell in cells]
    done = [measured_cell(folder, cell, wanted) for cell, wanted in zip(cells, inputs, strict=True)]
    say(f"sweep: {len(cells)} cells, {sum(record is not None for record in done)} of them measured already")
    todo = [(cell, wanted) for cell, wanted, record in zip(cells, inputs, done, strict=True) if record is None]
    if not context.config.sweep.measure:
        if len(todo) == len(cells):
            raise ConfigError("sweep.measure=false: none of these cells is there: leave it out, and they are measured")
        todo = []
    failed: dict[str, RunError] = {}
    differences, shown = _measure(context, todo, folder, failed)
    for name, difference in differences:
        say(f"sweep: {name}: {difference}")
    records = [
        made for cell, wanted in zip(cells, inputs, strict=True) if (made := measured_cell(folder, cell, wanted))
    ]
    swept = context.config.sweep
    asked: Asked = {"concurrency": swept.concurrency, "context_tokens": swept.context_tokens}
    best = write_summary(folder, records, swept.shares, step_by_step(drafters), asked)
    if todo:
        write_run_report(context, read_records(context.run_dir.eval), shown)
    say(f"sweep: {folder / SUMMARY}")
    refuse_wrong_output(differences)
    if failed:
        method, error = next(iter(failed.items()))
        raise RunError(
            f"sweep: {', '.join(failed)} was not measured to the end in vLLM, {method} because of: {error}; what was "
            "measured is kept, and the same command goes on"
        )
    return best


# --- measuring -------------------------------------------------------------------------------------------------------

# A cell, its record, the answers without speculation, and its own.
Measured = tuple[Cell, EvaluationRecord, list[Answer], list[Answer]]


def _measure(
    context: Context, todo: Sequence[tuple[Cell, str]], folder: Path, failed: dict[str, RunError]
) -> tuple[list[tuple[str, OutputDifference]], list[Answer]]:
    """Writes the cells' records. Returns where answers differ from those without speculation, and answers to show: a
    drafter's, if there are any.
    """
    differences: list[tuple[str, OutputDifference]] = []
    shown: list[Answer] = []
    drafted = any(cell.is_drafter for cell, _ in todo)
    engines = context.config.swept_engines
    for engine in sorted(engines, key=lambda engine: engine.name == "hf"):  # vLLM before our weights are loaded
        parted = []
        own = [(cell, wanted) for cell, wanted in todo if cell.context.config.engine.name == engine.name]
        for cell, record, plain, answers in _measured(context, own, failed):
            record.write(folder)
            if record.output_identical is False:
                parted.append((cell, plain, answers))
            shown = answers if record.is_drafter or (not drafted and record.method != NONE) else shown
        if engine.name == "hf" or engine.quantization is None:  # else the target here is not what the engine runs
            differences += [found for measurement in parted for found in _explained(*measurement)]
    return differences, shown


def _measured(context: Context, todo: Sequence[tuple[Cell, str]], failed: dict[str, RunError]) -> Iterator[Measured]:
    """The cells of one engine."""
    if not todo:
        return iter(())
    return _in_loop(context, todo) if todo[0][0].context.config.engine.name == "hf" else _in_vllm(todo, failed)


def _explained(cell: Cell, plain: list[Answer], answers: list[Answer]) -> list[tuple[str, OutputDifference]]:
    """Why answers differ from those without speculation, by the target's logits here, whoever decoded."""
    name = cell.name.removesuffix(".json")
    return [(name, difference) for difference in output_differences(cell.context, plain, answers)]


class _Baselines:
    """Answers without speculation that are shared by the cells of a group."""

    def __init__(self) -> None:
        self._found: dict[Any, list[Answer]] = {}

    def put(self, cell: Cell, answers: list[Answer]) -> None:
        self._found[self._key(cell)] = answers

    def get(self, cell: Cell) -> list[Answer] | None:
        return self._found.get(self._key(cell))

    @staticmethod
    def _key(cell: Cell) -> Any:
        config = cell.context.config
        return repr(config.suite), config.decoding.temperature


def _in_loop(context: Context, todo: Sequence[tuple[Cell, str]]) -> Iterator[Measured]:
    loaded: dict[str, Drafter] = {}
    for cell, _ in todo:
        if cell.is_drafter and cell.method not in loaded:
            loaded[cell.method] = load_measured_drafter(cell.context, context.model.device)
            speed_up(loaded[cell.method])
    baselines = _Baselines()
    shared = context.config.sweep.baseline == "shared"
    version = engine_version_in_loop()
    for number, (cell, inputs) in enumerate(todo, start=1):
        say(f"sweep: {number} of {len(todo)}, {cell.name.removesuffix('.json')}")
        conversations = suite_prompts(cell.context)
        plain = baselines.get(cell) if shared and cell.method != NONE else None
        drafter = loaded.get(cell.method)
        methods = [] if plain is not None else [LoopMethod(NONE)]
        if cell.method != NONE:
            proposer: Proposer | None = drafter if drafter is not None else baseline_proposer(cell.context, cell.method)
            methods.append(LoopMethod(cell.method, cell.is_drafter, proposer=proposer))
        size = cell.context.config.suite.concurrency
        decodes: list[Decode] = [partial(decode_in_loop, cell.context, method) for method in methods]
        forget_peak(context.model.device)
        found = answer_in_turns(cell.context, conversations, decodes, size, cell.method)
        if plain is None:
            plain = found[0][0]
            if shared:
                baselines.put(cell, plain)
        answers, timing = found[-1]
        simulated = None if drafter is None else simulate_same_prompts(cell.context, conversations, drafter)
        record = build_record(
            conditions(cell.context, methods[-1], size, version),
            _results(answers),
            None if cell.method == NONE else _results(plain),
            simulated,
            draft_s_per_round=timing.draft_s / timing.rounds if cell.method != NONE and timing.rounds else None,
            verify_s_per_round=timing.verify_s / timing.rounds if timing.rounds else None,
            peak_memory_bytes=peak_memory_bytes(context.model.device),
            inputs=inputs,
        )
        yield cell, record, plain, answers


def engine_version_in_loop() -> str:
    from importlib import metadata

    return f"transformers {metadata.version('transformers')}"


def _in_vllm(todo: Sequence[tuple[Cell, str]], failed: dict[str, RunError]) -> Iterator[Measured]:
    """Configuration by configuration. A method whose vLLM does not start, or dies, is put into ``failed``, and the
    others go on. Two vLLMs share a CPU, one of them at work; a GPU holds one alone.
    """
    interleaved = todo[0][0].context.config.sweep.baseline == "interleaved"
    return _taking_turns(todo, failed) if interleaved and is_cpu_build() else _one_by_one(todo, failed, interleaved)


def _taking_turns(todo: Sequence[tuple[Cell, str]], failed: dict[str, RunError]) -> Iterator[Measured]:
    """The vLLM without speculation stays open beside each other one, and both answer a group before the next begins."""
    version = engine_version(todo[0][0].context)
    with _clients() as plainly, _clients() as clients:
        for cell, inputs in _by_configuration(todo):
            if cell.method in failed:
                continue
            plainly.open(_without_speculation(cell))
            try:
                method = clients.open(cell) if cell.method != NONE else plainly.method
                decodes = [plainly.decode(cell), *([clients.decode(cell)] if cell.method != NONE else [])]
                found = _answered(cell, decodes)
            except RunError as error:
                _note_failure(cell, error, failed)
                if clients.is_open:  # while they answered: either may be the one that died
                    plainly.close()
                clients.close()
                continue
            plain = None if cell.method == NONE else found[0]
            yield _measured_in_vllm(cell, method, found[-1], plain, version, inputs)


def _one_by_one(todo: Sequence[tuple[Cell, str]], failed: dict[str, RunError], again: bool) -> Iterator[Measured]:
    """No speculation first, which the other cells are compared with. ``again``: and once more after them, to say how
    much the machine has changed meanwhile.
    """
    needed = {cell.method: cell for cell, _ in todo}
    if not needed.keys() <= {NONE} and NONE not in needed:
        say("sweep: no speculation is measured again, for this run's other cells to be compared with")
    order = _by_configuration(todo)
    baselines = _Baselines()
    version = engine_version(todo[0][0].context)
    plain_of = [_without_speculation(cell) for cell, _ in order if cell.method != NONE]
    asked: list[tuple[Cell, str | None]] = [(cell, None) for cell in _once(plain_of, order)]
    asked += [(cell, inputs) for cell, inputs in order]
    asked.sort(key=lambda pair: pair[0].method != NONE)
    with _clients() as clients:
        for cell, inputs in asked:
            if cell.method in failed:
                continue
            try:
                method = clients.open(cell)
                (answers,) = _answered(cell, [clients.decode(cell)])
            except RunError as error:
                _note_failure(cell, error, failed)
                continue
            if cell.method == NONE:
                baselines.put(cell, answers)
            if inputs is not None:
                plain = None if cell.method == NONE else baselines.get(cell)
                yield _measured_in_vllm(cell, method, answers, plain, version, inputs)
        first, last = asked[0][0], asked[-1][0]
        before = baselines.get(first)
        if again and last.method != NONE and before is not None:
            clients.open(first)
            (after,) = _answered(first, [clients.decode(first)])
            say(f"sweep: {_drift(first, before, after)}")


def _by_configuration(todo: Sequence[tuple[Cell, str]]) -> list[tuple[Cell, str]]:
    return sorted(todo, key=lambda pair: (pair[0].method != NONE, pair[0].method, pair[0].n))


def _answered(cell: Cell, decodes: Sequence[Decode]) -> list[list[Answer]]:
    size, name = cell.context.config.suite.concurrency, f"{cell.method} (vLLM)"
    return [answers for answers, _ in answer_in_turns(cell.context, suite_prompts(cell.context), decodes, size, name)]


def _note_failure(cell: Cell, error: RunError, failed: dict[str, RunError]) -> None:
    if cell.method == NONE:  # what all others are compared with
        raise error
    say(f"sweep: {cell.name.removesuffix('.json')}: {error}")
    failed[cell.method] = error


def _measured_in_vllm(
    cell: Cell, method: VLLMMethod, answers: list[Answer], plain: list[Answer] | None, version: str, inputs: str
) -> Measured:
    record = build_record(
        conditions(cell.context, method, cell.context.config.suite.concurrency, version),
        _results(answers),
        None if plain is None else _results(plain),
        inputs=inputs,
    )
    return cell, record, plain or [], answers


def _drift(cell: Cell, before: Sequence[Answer], after: Sequence[Answer]) -> str:
    """How much faster the same is measured after the others than before them."""
    rates = [
        sum(len(answer.result.output_ids) for answer in answers) / sum(answer.result.seconds for answer in answers)
        for answers in (before, after)
    ]
    return (
        f"no speculation, measured before the others and after them ({cell.context.config.suite.name}): "
        f"{rates[0]:.1f} and {rates[1]:.1f} tokens/s, {rates[1] / rates[0] - 1:+.1%}; speed-ups, all over the first, "
        "are off by up to as much"
    )


def _without_speculation(cell: Cell) -> Cell:
    return Cell(NONE, False, cell.context, cell.name)


def _once(wanted: Sequence[Cell], order: Sequence[tuple[Cell, str]]) -> list[Cell]:
    """One of each group of ``wanted`` for which ``order`` measures no speculation anyway."""
    known = {
        repr((c.context.config.suite, c.context.config.decoding.temperature)) for c, _ in order if c.method == NONE
    }
    found = []
    for cell in wanted:
        key = repr((cell.context.config.suite, cell.context.config.decoding.temperature))
        if key not in known:
            known.add(key)
            found.append(cell)
    return found


class _Clients:
    """The vLLM that is open, and the method that it is open for."""

    method: VLLMMethod
    _current: VLLMClient | None = None
    _opened: tuple[str, int] | None = None

    def open(self, cell: Cell) -> VLLMMethod:
        """Opens the cell's, unless it is open already."""
        if (cell.method, cell.n) != self._opened:
            self.close()
            self.method = vllm_method(cell.context, cell.method, cell.is_drafter)
            self._current = cell.context.open_vllm(f"sweep-{cell.method}-n{cell.n}", self.method.args)
            self._opened = cell.method, cell.n
        return self.method

    @property
    def is_open(self) -> bool:
        return self._current is not None

    def decode(self, cell: Cell) -> Decode:
        assert self._current is not None
        return decoder_of(cell.context, self._current)

    def close(self) -> None:
        current, self._current, self._opened = self._current, None, None
        if current is not None:
            current.close()


@contextmanager
def _clients() -> Iterator[_Clients]:
    clients = _Clients()
    try:
        yield clients
    finally:
        clients.close()


def _results(answers: Sequence[Answer]) -> list[PromptResult]:
    if not answers:
        raise RunError("a cell has no answers")
    return [answer.result for answer in answers]
