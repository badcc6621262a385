"""``eval serving``: vLLM's server as its clients see it, with the drafter and without speculation.

The servers are those of ``spectrain serve``; vLLM's own benchmark client asks them, warmed up, under each load
(requests under way, or arriving in a second). Methods take turns: load by load where all servers run at the same time,
else server by server, there and back (A B, B A, …), so that a machine that becomes slower counts against nobody. Each
measurement of the client is a file, so what was stopped goes on; a record is made when all repeats of its load are
there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from spectrain.console import say, stdout
from spectrain.data.prompts import Conversation
from spectrain.engines.vllm.args import environment, is_cpu_build
from spectrain.engines.vllm.bench_client import BenchClient, Load
from spectrain.errors import InputError, RunError
from spectrain.evaluation.records import EvaluationRecord, read_records
from spectrain.evaluation.report.serving_report import serving_drawings, serving_table
from spectrain.evaluation.serving_figures import ClientRun
from spectrain.evaluation.serving_record import serving_record
from spectrain.files import check_digest, comparable, digest_strings, with_digest, without_digest, write_atomically
from spectrain.stages.answer_suite import (
    Method,
    answer_limit,
    conditions,
    measured_inputs,
    note_fewer_prompts,
    suite_prompts,
)
from spectrain.stages.context import Context
from spectrain.stages.eval_vllm import engine_version
from spectrain.stages.run_report import write_run_report
from spectrain.stages.served_methods import NONE, ServedMethod, Servers, served_methods, servers

_RUNS = "runs"  # the folder of single measurements


@dataclass(frozen=True)
class _Turn:
    """One measurement: the ``repeat``-th of a method under a load."""

    method: ServedMethod
    concurrency: int | None
    request_rate: float | None
    repeat: int

    @property
    def load(self) -> str:
        if self.request_rate is None:
            return f"{self.concurrency} at a time"
        return f"{self.request_rate:g} a second"

    @property
    def file_name(self) -> str:
        load = f"c{self.concurrency}" if self.request_rate is None else f"r{self.request_rate:g}"
        return f"{self.method.name}-n{self.method.num_speculative_tokens}-{load}-{self.repeat}.json"


def measure_serving(context: Context) -> float | None:
    """Measure what is missing. Returns the best speed-up."""
    config = context.config
    methods = served_methods(context)
    conversations = _prompts(context)
    note_fewer_prompts(context)
    asked = [conversations[number % len(conversations)] for number in range(config.serving.requests)]
    folder = context.run_dir.eval / "serving"
    (folder / _RUNS).mkdir(parents=True, exist_ok=True)
    turns = list(_turns(context, methods))
    inputs = {method.name: _inputs(context, method) for method in methods}
    todo = [turn for turn in turns if _stored(folder, turn, inputs[turn.method.name]) is None]
    say(f"serving: {len(turns)} measurements, {len(turns) - len(todo)} of them made already")
    if todo:
        _measure(context, asked, todo, folder, inputs)
    records = _records(context, turns, asked, folder, inputs)
    for record in records:
        record.write(folder)
    for drawing in serving_drawings(records):
        drawing.write(folder / "pictures")
    if todo:
        write_run_report(context, read_records(context.run_dir.eval), ())
    stdout.print(serving_table(records))
    say(f"serving: {folder}")
    return max((record.speedup for record in records if record.speedup is not None), default=None)


def _prompts(context: Context) -> list[Conversation]:
    """What is asked: the first turns."""
    conversations = suite_prompts(context)
    with_tools = next((c for c in conversations if c.tools), None)
    if with_tools is not None:
        raise InputError(f"{with_tools.where}: eval serving sends no tools: choose another suite")
    if any(len(c.turns) > 1 for c in conversations):
        say("note: of conversations with several turns eval serving asks the first")
    return conversations


def _turns(context: Context, methods: Sequence[ServedMethod]) -> Iterator[_Turn]:
    """In the order in which they are measured."""
    serving = context.config.serving
    loads: list[tuple[int | None, float | None]] = [(size, None) for size in serving.concurrency]
    loads += [(None, rate) for rate in serving.request_rates]
    together = serving.servers == "together" or (serving.servers == "auto" and is_cpu_build())
    if together:
        for load in loads:
            for repeat in range(serving.repeats):
                for method in methods:
                    yield _Turn(method, load[0], load[1], repeat)
        return
    for repeat in range(serving.repeats):
        for method in methods[:: 1 if repeat % 2 == 0 else -1]:
            for load in loads:
                yield _Turn(method, load[0], load[1], repeat)


def _inputs(context: Context, method: ServedMethod) -> str:
    """Digest of all that a method's figures depend on, but for the load."""
    config = context.config
    serving = config.serving
    known: dict[str, Any] = {
        **measured_inputs(context, with_drafter=method.is_drafter),
        "method": method.name,
        "drafts": method.num_speculative_tokens,
        "sampling": [config.decoding.temperature, config.decoding.top_p, config.decoding.top_k],
        "requests": [serving.requests, serving.warmups],
        "command": [] if method.command is None else [*method.command.arguments[3:], *config.engine.urls],
        "engine version": engine_version(context),
    }
    return digest_strings(comparable(known))


def _stored(folder: Path, turn: _Turn, inputs: str) -> ClientRun | None:
    """The measurement, if it is there, whole, and made from these inputs."""
    file = folder / _RUNS / turn.file_name
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        check_digest(values, file, "it is measured again")
        run = ClientRun.stored(values["run"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, InputError):
        say(f"serving: {file} is damaged: it is measured again")
        return None
    return run if without_digest(values).get("inputs") == inputs else None


def _measure(
    context: Context, asked: Sequence[Conversation], todo: Sequence[_Turn], folder: Path, inputs: dict[str, str]
) -> None:
    config = context.config
    limits = [answer_limit(context, c, context.template.first_prompt_ids(c)) for c in asked]
    messages = [_messages(conversation) for conversation in asked]
    client = BenchClient(environment(config.engine), context.logs / "vllm-bench.log")
    try:
        with servers(context) as opened:
            methods = list({turn.method.name: turn.method for turn in todo}.values())
            for number, turn in enumerate(todo, start=1):
                url = opened.url(turn.method, methods)
                say(f"serving: {number} of {len(todo)}, {turn.method.name}, {turn.load}")
                load = Load(
                    url=url,
                    model=turn.method.model,
                    messages=messages,
                    max_tokens=min(limits),
                    warmups=config.serving.warmups,
                    concurrency=turn.concurrency,
                    request_rate=turn.request_rate,
                    temperature=config.decoding.temperature,
                    top_p=config.decoding.top_p,
                    top_k=config.decoding.top_k,
                    seed=config.decoding.seed,
                )
                run = _run(client, opened, turn, load, config.engine.request_timeout_s)
                content = {"inputs": inputs[turn.method.name], "run": json.loads(json.dumps(asdict(run)))}
                write_atomically(folder / _RUNS / turn.file_name, json.dumps(with_digest(content)) + "\n")
    finally:
        client.close()


def _run(client: BenchClient, opened: Servers, turn: _Turn, load: Load, timeout_s: float) -> ClientRun:
    try:
        run = ClientRun.read(client.measure(load, timeout_s))
    except RunError as error:
        why = opened.why_ended(turn.method)
        if why:
            raise RunError(f"vLLM's server ({turn.method.name}) has ended; {why}; the same command goes on") from error
        raise
    if turn.method.num_speculative_tokens and not run.rounds:
        raise RunError(f"eval serving: the server of {turn.method.name} reports no rounds of speculation at {load.url}")
    return run


def _messages(conversation: Conversation) -> list[dict[str, str]]:
    system = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    return [*system, {"role": "user", "content": conversation.turns[0]}]


def _say_drift(baselines: Sequence[Sequence[ClientRun]]) -> None:
    """How much the machine has changed from the first measurement without speculation to the last, of each load."""
    changes = [found[-1].tokens_per_s / found[0].tokens_per_s - 1.0 for found in baselines if len(found) > 1]
    if changes:
        say(
            f"serving: from its first measurement to its last, no speculation changed by {min(changes):+.1%} to "
            f"{max(changes):+.1%} in tokens/s, load by load: so much does the machine change by itself"
        )


def _records(
    context: Context, turns: Sequence[_Turn], asked: Sequence[Conversation], folder: Path, inputs: dict[str, str]
) -> list[EvaluationRecord]:
    """One for each method and load, without speculation first."""
    runs: dict[tuple[str, str], list[ClientRun]] = {}
    first: dict[tuple[str, str], _Turn] = {}
    for turn in sorted(turns, key=lambda turn: turn.repeat):
        found = _stored(folder, turn, inputs[turn.method.name])
        if found is None:
            raise RunError(f"{folder / _RUNS / turn.file_name} is gone: the same command measures it again")
        runs.setdefault((turn.method.name, turn.load), []).append(found)
        first.setdefault((turn.method.name, turn.load), turn)
    _say_drift([found for (name, _), found in runs.items() if name == NONE])
    keys = [conversation.prompt_digest() for conversation in asked]
    version = engine_version(context)
    records = []
    for (name, load), turn in first.items():
        method = turn.method
        measured = replace(
            conditions(context, Method(name, method.is_drafter), turn.concurrency or 1, version),
            engine="vllm_server",
            num_speculative_tokens=method.num_speculative_tokens,
            request_rate=turn.request_rate,
        )
        plain = None if name == NONE else runs.get((NONE, load))
        records.append(serving_record(measured, keys, runs[name, load], plain, context.config.serving, inputs[name]))
    return sorted(records, key=lambda r: (r.request_rate is not None, r.request_rate or 0.0, r.concurrency))
