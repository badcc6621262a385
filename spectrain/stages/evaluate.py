"""Stage ``eval``: the drafter in the speculative loop, beside no speculation and n-gram lookup. Writes ``eval/`` and ``report.html``.

All methods answer the same prompts in the same process, one after the other, so that throughputs can be compared; the baseline is
measured again for every record. At temperature 0 the outputs must be the same, token for token, and the record says whether they are.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

import torch

from spectrain.console import ProgressBar, say, stdout
from spectrain.data.prompts import Conversation
from spectrain.data.responses import response_key
from spectrain.data.states import INDEX_NAME
from spectrain.decoding.loop import GenerationResult, LoopTiming, speculative_generate
from spectrain.decoding.proposers import NGramProposer, Proposer
from spectrain.drafters.base import Drafter
from spectrain.drafters.folder import CONFIG, WEIGHTS, load_drafter
from spectrain.errors import InputError
from spectrain.evaluation.metrics import AcceptanceStats
from spectrain.evaluation.record import Conditions, EvaluationRecord, PromptResult, build_record, read_records
from spectrain.evaluation.suites import HELDOUT, load_suite
from spectrain.evaluation.table import evaluation_table
from spectrain.run_dir import Decision, Inputs, digest_strings, file_digest
from spectrain.share import prompt_roots
from spectrain.stages import capture
from spectrain.stages.context import Context
from spectrain.stages.report import Answer, write_run_report
from spectrain.target.cpu_linear import speed_up
from spectrain.target.head import TargetHead
from spectrain.training.walk_eval import evaluate_by_walk, serving_laws

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class _Method:
    """Something to measure. ``proposer`` None: no speculation."""

    name: str
    proposer: Proposer | None
    drafter: str | None = None


def decide(context: Context) -> Decision:
    """Whether this measurement has been made already."""
    config = context.config
    folder = context.measured_drafter
    fixed = {
        **context.target_inputs(),
        "drafter": digest_strings([file_digest(folder / name) for name in (CONFIG, WEIGHTS)]),
        "prompts of the suite": digest_strings([conversation.prompt_digest() for conversation in suite_prompts(context)]),
        "suite.max_new_tokens": _max_new_tokens(context),
        "suite.concurrency": config.suite.concurrency,
        "suite.baselines": list(config.suite.baselines),
        **{f"decoding.{name}": value for name, value in vars(config.decoding).items()},
    }
    name = f"eval/{config.suite.name}-n{config.decoding.num_speculative_tokens}-t{config.decoding.temperature:g}"
    record = context.run_dir.path / context.run_dir.outputs(name).get("record", "")
    return context.run_dir.decide(name, Inputs(fixed, {}), whole=record.is_file() and context.run_dir.report.is_file())


def evaluate(context: Context) -> float | None:
    """Measure unless that has been done. Returns the drafter's acceptance length."""
    run_dir = context.run_dir
    decision = decide(context)
    if decision.skip:
        say(str(decision))
        stdout.print(evaluation_table(read_records(run_dir.eval)))
        return run_dir.outputs(decision.name).get("acceptance_length")
    for conversation in suite_prompts(context):
        _limit(context, conversation, context.template.first_prompt_ids(conversation))  # raises for a prompt without room for an answer
    with run_dir.running(decision) as outputs:
        record, answers = _measure(context)
        outputs |= {"acceptance_length": record.acceptance_length, "record": f"eval/{record.file_name()}"}
    records = read_records(run_dir.eval)
    write_run_report(context, records, answers)
    stdout.print(evaluation_table(records))
    if record.output_identical is False:
        say(
            "eval: the drafter's output differs from plain greedy decoding; in float32 only ties should do that, see examples in the report"
        )
    say(f"eval: {run_dir.report}")
    return record.acceptance_length


def suite_prompts(context: Context) -> list[Conversation]:
    """What the suite asks."""
    heldout = context.prompts.heldout if context.config.suite.prompts == HELDOUT else []
    return load_suite(context.config.suite, heldout, prompt_roots(), context.config.data.system)


def _max_new_tokens(context: Context) -> int:
    return context.config.suite.max_new_tokens or context.config.sampling.max_new_tokens


# --- measuring -------------------------------------------------------------------------------------------------------------------


def _measure(context: Context) -> tuple[EvaluationRecord, list[Answer]]:
    """Run every method, write its record; returns the drafter's record and its answers."""
    config = context.config
    conversations = suite_prompts(context)
    folder = context.measured_drafter
    drafter = load_drafter(folder)
    drafter.attach(TargetHead.from_checkpoint(context.target.folder, device=context.model.device)).to(context.model.device)
    speed_up(drafter)
    methods = [_Method("none", None)] if "none" in config.suite.baselines else []
    if "ngram" in config.suite.baselines:
        methods.append(_Method("ngram", NGramProposer(config.decoding.ngram_max, config.decoding.ngram_min)))
    methods.append(_Method(config.drafter.method, drafter, str(folder)))
    walked = walk_same_prompts(context, conversations, drafter)
    baseline: list[PromptResult] | None = None
    for method in methods:
        answers, timing = _answer_all(context, conversations, method)
        results = [answer.result for answer in answers]
        record = build_record(
            _conditions(context, method),
            results,
            baseline,
            walked if method.drafter is not None else None,
            draft_s_per_round=timing.draft_s / timing.rounds if method.proposer is not None and timing.rounds else None,
            verify_s_per_round=timing.verify_s / timing.rounds if timing.rounds else None,
            peak_memory_bytes=_peak_memory_bytes(context),
        )
        record.write(context.run_dir.eval)
        if method.name == "none":
            baseline = results
    return record, answers


def _conditions(context: Context, method: _Method) -> Conditions:
    config = context.config
    return Conditions(
        target=context.target.id,
        target_revision=context.target.revision,
        drafter=method.drafter,
        method=method.name,
        engine="hf",
        engine_version=f"transformers {metadata.version('transformers')}",
        suite=config.suite.name,
        num_speculative_tokens=config.decoding.num_speculative_tokens if method.proposer is not None else 0,
        temperature=config.decoding.temperature,
        top_p=config.decoding.top_p,
        top_k=config.decoding.top_k,
        proposal_policy=config.decoding.proposal_policy,
        concurrency=config.suite.concurrency,
        max_new_tokens=_max_new_tokens(context),
    )


def _answer_all(context: Context, conversations: Sequence[Conversation], method: _Method) -> tuple[list[Answer], LoopTiming]:
    """Answers of one method to all conversations, ``suite.concurrency`` of them decoded together, and where the time went."""
    first_ids = context.template.first_prompt_ids(conversations[0])
    _decode(context, method, [first_ids], [_WARM_UP_TOKENS], [0], lambda tokens: None)  # memory and kernels, off the clock
    size = context.config.suite.concurrency
    answers: list[Answer] = []
    total = LoopTiming()
    limit = sum(len(conversation.turns) for conversation in conversations) * _max_new_tokens(context)
    with ProgressBar(f"eval {method.name}", total=limit, unit="tokens") as bar:
        for batch, first in enumerate(range(0, len(conversations), size)):
            group = conversations[first : first + size]
            answers += _answer_group(context, method, group, first, batch if size > 1 else None, bar.advance, total)
    return answers, total


def _answer_group(
    context: Context,
    method: _Method,
    group: Sequence[Conversation],
    first: int,
    batch: int | None,
    on_tokens: Callable[[int], None],
    total: LoopTiming,
) -> list[Answer]:
    """All turns of a few conversations. A conversation ends early when an answer was cut off: there is no turn after it."""
    ids = [context.template.first_prompt_ids(conversation) for conversation in group]
    turns: list[list[tuple[list[int], GenerationResult]]] = [[] for _ in group]
    seconds = 0.0
    for turn in range(max(len(conversation.turns) for conversation in group)):
        rows = [row for row, conversation in enumerate(group) if turn < len(conversation.turns) and (turn == 0 or _goes_on(turns[row]))]
        if not rows:
            break
        if turn > 0:
            for row in rows:
                ids[row] = ids[row] + context.template.next_prompt_ids(group[row], turn, ids[row])
        limits = [_limit(context, group[row], ids[row]) for row in rows]
        start_s = time.perf_counter()
        results, timing = _decode(context, method, [ids[row] for row in rows], limits, [first + row for row in rows], on_tokens)
        seconds += time.perf_counter() - start_s
        for name, value in vars(timing).items():
            setattr(total, name, getattr(total, name) + value)
        for row, result in zip(rows, results, strict=True):
            turns[row].append((ids[row], result))
            ids[row] = ids[row] + result.ids
    return [_answer(conversation, turns[row], seconds / len(group), batch) for row, conversation in enumerate(group)]


def _answer(conversation: Conversation, turns: list[tuple[list[int], GenerationResult]], seconds: float, batch: int | None) -> Answer:
    results = [result for _, result in turns]
    figures = PromptResult(
        key=conversation.prompt_digest(),
        rounds=[round_ for result in results for round_ in result.rounds],
        output_ids=[token for result in results for token in result.ids],
        seconds=seconds,
        batch=batch,
    )
    return Answer(conversation, turns, figures)


def _goes_on(turns: list[tuple[list[int], GenerationResult]]) -> bool:
    return bool(turns) and turns[-1][1].finish_reason == "stop"


def _limit(context: Context, conversation: Conversation, prompt: list[int]) -> int:
    room = context.config.target.max_length - len(prompt)
    if room < 1:
        longest = context.config.target.max_length
        raise InputError(
            f"{conversation.where}: the prompt of {len(prompt)} tokens leaves no room for an answer in target.max_length={longest}: "
            "raise it, or take the prompt out of the suite"
        )
    return min(room, _max_new_tokens(context))


def _decode(
    context: Context,
    method: _Method,
    prompts: list[list[int]],
    limits: list[int],
    streams: list[int],
    on_tokens: Callable[[int], None],
) -> tuple[list[GenerationResult], LoopTiming]:
    decoding = context.config.decoding
    law, draft_law = serving_laws(decoding)
    generation = speculative_generate(
        context.model,
        method.proposer,
        prompts,
        limits,
        decoding.num_speculative_tokens,
        law,
        context.eos_ids,
        decoding.seed,
        draft_law=draft_law,
        streams=streams,
        on_tokens=on_tokens,
    )
    return generation.results, generation.timing


def walk_same_prompts(context: Context, conversations: Sequence[Conversation], drafter: Drafter) -> AcceptanceStats | None:
    """What the walk promises for the suite's prompts, on their stored texts; None unless those were sampled as the loop samples."""
    config = context.config
    law = (config.decoding.temperature, config.decoding.top_p, config.decoding.top_k)
    if context.prompts_or_none is None or not (context.data_dir.states / INDEX_NAME).is_file():
        return None
    sampled = (context.sampling.temperature, context.sampling.top_p, context.sampling.top_k)
    if (law != sampled and (law[0] or sampled[0])) or _max_new_tokens(context) != config.sampling.max_new_tokens:
        return None
    store = capture.open_store(context, drafter.taps)
    if store is None:
        return None
    number = {key: index for index, key in enumerate(store.keys)}
    keys = [response_key(conversation, context.sampling, context.target.id, context.target.revision) for conversation in conversations]
    if any(key not in number for key in keys):
        return None
    documents = [number[key] for key in keys]
    return evaluate_by_walk(drafter, store, documents, config.decoding, context.eos_ids, config.trainer.row_tokens).stats


def _peak_memory_bytes(context: Context) -> int:
    """Of this process so far, on the device that holds the target."""
    if context.model.device.type == "cuda":
        return torch.cuda.max_memory_allocated(context.model.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
