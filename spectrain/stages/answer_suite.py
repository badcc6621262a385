"""What evaluations share, whoever decodes, our loop or vLLM: the suite's prompts, its answers on the clock, what
simulation predicts for them, and the conditions that go into a record.

Conversations are answered with all their turns, in groups. A group is decoded together; its seconds are shared evenly
among its conversations.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from spectrain.config.folders import prompt_roots
from spectrain.console import ProgressBar, say
from spectrain.data.hidden_states import INDEX_NAME, HiddenStateSource
from spectrain.data.prompts import Conversation
from spectrain.data.responses import response_key
from spectrain.decoding.acceptance import AcceptanceStats
from spectrain.decoding.loop import GenerationResult, LoopTiming, Prompt
from spectrain.decoding.scheduler import FIXED, THRESHOLD
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.drafter_folder import load_drafter
from spectrain.drafters.registry import find_method
from spectrain.drafters.serving_config import drafter_digest
from spectrain.errors import InputError, RunError
from spectrain.evaluation.code_execution import docstring_tests, passes_tests
from spectrain.evaluation.grading import is_right
from spectrain.evaluation.lossless import OutputDifference, first_difference
from spectrain.evaluation.records import Conditions, EvaluationRecord, PromptResult
from spectrain.evaluation.same_distribution import DistributionTest
from spectrain.evaluation.suites import lengthened, load_suite, right_answers, source_size
from spectrain.files import digest_strings
from spectrain.stages import capture, state_sources
from spectrain.stages.context import Context
from spectrain.stages.run_report import Answer
from spectrain.target.head import TargetHead
from spectrain.training.simulated_acceptance import SimulatedAcceptance, simulate_heldout

_WARM_UP_TOKENS = 8
# What is named among the inputs only where it is set, so that measurements without it remain valid.
_WHERE_SET = ("execute_code", "lossless_seeds")
_THINKING = ("enable_thinking", "thinking")  # what templates call it


class Decode(Protocol):
    """Answers prompts together; the callable is told how many tokens are new."""

    def __call__(
        self, prompts: list[Prompt], on_tokens: Callable[[int], None], /
    ) -> tuple[list[GenerationResult], LoopTiming]: ...


def suite_prompts(context: Context) -> list[Conversation]:
    """What the suite asks."""
    suite = context.config.suite
    heldout = context.prompts.heldout if suite.uses_heldout else []
    asked = load_suite(suite, heldout, prompt_roots(), context.config.data.system)
    if suite.context_tokens is None:
        return asked
    return lengthened(asked, suite.context_tokens, lambda text: len(context.tokenizer(text).input_ids))


def note_fewer_prompts(context: Context) -> None:
    """Say so where a suite has fewer prompts than the command line asks for."""
    suite = context.config.suite
    if "suite.max_prompts" in context.given:
        heldout = context.prompts.heldout if suite.uses_heldout else []
        size = source_size(suite, heldout, prompt_roots())
        if size < suite.max_prompts:
            fewer = f"fewer than suite.max_prompts={suite.max_prompts}"
            say(f"note: suite {suite.name} has {size} prompts, {fewer}: all are asked")


def note_substitute_tests(context: Context) -> None:
    """Say so where code is not graded by the tests of its suite, because the prompts bring none."""
    suite = context.config.suite
    if suite.grading != "tests" or not suite.execute_code:
        return
    asked = load_suite(suite, (), prompt_roots(), context.config.data.system)
    graded = right_answers(suite, prompt_roots(), context.config.data.system)
    examples = sum(docstring_tests(c.turns[-1]) == graded.get(c.prompt_digest(), "") for c in asked)
    lacking = len(asked) - len(graded)
    if examples or lacking:
        say(
            f"note: suite {suite.name}: {examples + lacking} of {len(asked)} prompts bring no tests: {examples} of "
            f"them are graded by the examples in their docstrings, which are easier, {lacking} not at all"
        )


def max_new_tokens(context: Context) -> int:
    """The most tokens of an answer."""
    return context.config.suite.max_new_tokens or context.config.sampling.max_new_tokens


@dataclass(frozen=True)
class Method:
    """Something to measure: "none" (no speculation), "ngram", or a drafter. ``policy``: the name of the rule for how
    many drafts are verified.
    """

    name: str
    is_drafter: bool = False
    policy: str = FIXED


@dataclass(frozen=True)
class Measurement:
    """What an evaluation made: the records of all its methods, and of the drafter's first one the answers.
    differences: of answers from those without speculation; sampled: tests of sampled ones; each with the method.
    """

    records: list[EvaluationRecord]
    record: EvaluationRecord
    answers: list[Answer]
    differences: tuple[tuple[str, OutputDifference], ...] = ()
    sampled: tuple[tuple[str, DistributionTest], ...] = ()


def conditions(context: Context, method: Method, size: int, engine_version: str) -> Conditions:
    """What a record says of the measurement of ``method`` with ``size`` conversations at a time."""
    config = context.config
    return Conditions(
        target=context.target.id,
        target_revision=context.target.revision,
        drafter=context.measured_drafter_name if method.is_drafter else None,
        method=method.name,
        engine=config.engine.name,
        engine_version=engine_version,
        suite=config.suite.name,
        num_speculative_tokens=0 if method.name == "none" else config.decoding.num_speculative_tokens,
        temperature=config.decoding.temperature,
        top_p=config.decoding.top_p,
        top_k=config.decoding.top_k,
        proposal_policy=config.decoding.proposal_policy,
        concurrency=size,
        thinking=any(bool(config.target.template_kwargs.get(name)) for name in _THINKING),
        template_kwargs=json.dumps(config.target.template_kwargs, sort_keys=True),
        max_new_tokens=max_new_tokens(context),
        draft_policy=method.policy,
        draft_threshold=config.decoding.threshold if method.policy == THRESHOLD else None,
        context_tokens=config.suite.context_tokens,
    )


def measured_inputs(context: Context, with_drafter: bool = True) -> dict[str, Any]:
    """Fixed inputs of every stage that runs the drafter, or another method, on the suite."""
    prompts = [conversation.prompt_digest() for conversation in suite_prompts(context)]
    return {
        **context.target_inputs(),
        **({"drafter": drafter_digest(context.measured_drafter)} if with_drafter else {}),
        "prompts of the suite": digest_strings(prompts),
        "suite.max_new_tokens": max_new_tokens(context),
        **{f"suite.{name}": value for name in _WHERE_SET if (value := getattr(context.config.suite, name))},
    }


def load_measured_drafter(context: Context, device: torch.device) -> Drafter:
    """The drafter that is measured, on ``device``, with the target's embedding and head."""
    length = context.config.target.max_length
    drafter = load_drafter(context.measured_drafter, context.spec.default_taps(), length)
    trusted = context.config.target.trust_remote_code
    drafter.attach(TargetHead.from_checkpoint(context.target.folder, device=device, trust_remote_code=trusted))
    return drafter.to(device)


def load_untuned(context: Context, drafter: Drafter) -> Drafter | None:
    """What the target brings along of this kind, to be measured beside what was tuned from it."""
    method, folder = find_method(drafter.method), context.target.folder
    return method.untuned(drafter, context.spec, folder) if method.comes_with(drafter.shape, folder) else None


def simulate_same_prompts(
    context: Context, conversations: Sequence[Conversation], drafter: Drafter
) -> AcceptanceStats | None:
    """What simulation predicts for the suite's prompts, on their stored texts; None unless those were sampled as they
    are decoded now.
    """
    config = context.config
    sampling = (config.decoding.temperature, config.decoding.top_p, config.decoding.top_k)
    if context.prompts_or_none is None:
        return None
    sampled = (context.sampling.temperature, context.sampling.top_p, context.sampling.top_k)
    if (sampling != sampled and (sampling[0] or sampled[0])) or max_new_tokens(
        context
    ) != config.sampling.max_new_tokens:
        return None
    keys = [
        response_key(
            conversation, context.sampling, context.target.id, context.target.revision, config.target.template_kwargs
        )
        for conversation in conversations
    ]
    found: tuple[HiddenStateSource, list[int]] | None
    if (context.data_dir.hidden_states / INDEX_NAME).is_file():
        found = capture.open_store(context, drafter.taps, drafter.kv_layers, keys)
    else:
        found = state_sources.computed_for(context, drafter, keys)
    if found is None:
        return None
    return simulate_documents(context, drafter, *found).stats


def simulate_documents(
    context: Context,
    drafter: Drafter,
    store: HiddenStateSource,
    documents: Sequence[int],
    most_tokens: int | None = None,
) -> SimulatedAcceptance:
    """``simulate_heldout`` under the configured decoding, with a bar."""
    config = context.config
    with torch.no_grad(), ProgressBar("simulate", total=len(documents), unit="documents") as bar:
        return simulate_heldout(
            drafter,
            store,
            documents,
            config.decoding,
            context.eos_ids,
            config.trainer.packed_length,
            most_tokens=most_tokens,
            advance=bar.advance,
        )


def answer_all(
    context: Context, conversations: Sequence[Conversation], decode: Decode, size: int, name: str, servers: int = 1
) -> tuple[list[Answer], LoopTiming]:
    """Answers of one method to all conversations, ``size`` of them decoded together, and where the time went. ``name``:
    of the method.

    servers: that share the work. Each is warmed up, for a server's first answer may take a hundred times as long as the
    next.
    """
    return answer_in_turns(context, conversations, [decode], size, name, servers)[0]


def answer_in_turns(
    context: Context,
    conversations: Sequence[Conversation],
    decodes: Sequence[Decode],
    size: int,
    name: str,
    servers: int = 1,
) -> list[tuple[list[Answer], LoopTiming]]:
    """``answer_all`` for several methods that take turns: each answers a group before the next group begins, so that
    what else the machine does meets all of them alike.
    """
    for conversation in conversations:  # before the first answer
        context.template.require_embedded(conversation, context.template.first_prompt_ids(conversation))
    warm_up = Prompt(context.template.first_prompt_ids(conversations[0]), _WARM_UP_TOKENS, stream=0)
    for decode in decodes:
        decode([warm_up] * servers, lambda tokens: None)  # memory and kernels, off the clock
    found: list[tuple[list[Answer], LoopTiming]] = [([], LoopTiming()) for _ in decodes]
    right = right_answers(context.config.suite, prompt_roots(), context.config.data.system)
    limit = len(decodes) * sum(len(conversation.turns) for conversation in conversations) * max_new_tokens(context)
    with ProgressBar(f"eval {name}", total=limit, unit="tokens") as bar:
        for batch, first in enumerate(range(0, len(conversations), size)):
            group = conversations[first : first + size]
            for decode, (answers, total) in zip(decodes, found, strict=True):
                made = _answer_group(context, decode, group, first, batch if size > 1 else None, bar.advance, total)
                answers += [_graded(context, answer, right) for answer in made]
    return found


def _graded(context: Context, answer: Answer, right: Mapping[str, str]) -> Answer:
    """The answer, with whether it is right, where the suite says what is."""
    expected = right.get(answer.result.key)
    if expected is None:
        return answer
    given = ""
    if len(answer.turns) == len(answer.conversation.turns):
        given = context.tokenizer.decode(answer.turns[-1][1].ids, skip_special_tokens=True)
    grading = context.config.suite.grading
    if grading == "tests":
        correct = passes_tests(answer.conversation.turns[-1], given, expected)
    else:
        correct = is_right(given, expected, grading)
    return replace(answer, result=replace(answer.result, correct=correct))


def output_differences(
    context: Context, plain: Sequence[Answer], speculative: Sequence[Answer]
) -> list[OutputDifference]:
    """Where answers part from those without speculation, one a conversation at most, each explained."""
    found = []
    for ours, theirs in zip(plain, speculative, strict=True):
        for (prompt, plain_result), (_, result) in zip(ours.turns, theirs.turns, strict=False):
            difference = first_difference(context.model, ours.conversation.id, prompt, plain_result.ids, result.ids)
            if difference is not None:
                found.append(difference)
                break
    return found


def refuse_wrong_output(differences: Sequence[tuple[str, OutputDifference]]) -> None:
    """Raises RunError where a difference is no tie."""
    wrong = [(name, difference) for name, difference in differences if not difference.tie]
    if wrong:
        raise RunError(
            f"{len(wrong)} answers differ from decoding without speculation where no two tokens tie, the first with "
            f"{wrong[0][0]}: {wrong[0][1]}; report this, with the target's name"
        )


def _answer_group(
    context: Context,
    decode: Decode,
    group: Sequence[Conversation],
    first: int,
    batch: int | None,
    on_tokens: Callable[[int], None],
    total: LoopTiming,
) -> list[Answer]:
    """All turns of a few conversations. A conversation ends early when an answer was cut off: there is no turn after
    it.
    """
    ids = [context.template.first_prompt_ids(conversation) for conversation in group]
    texts: list[list[str]] = [[] for _ in group]  # the answers so far, as a chat server returns them
    turns: list[list[tuple[list[int], GenerationResult]]] = [[] for _ in group]
    seconds = 0.0
    for turn in range(max(len(conversation.turns) for conversation in group)):
        rows = [
            row
            for row, conversation in enumerate(group)
            if turn == 0 or (len(turns[row]) == turn < len(conversation.turns) and _goes_on(turns[row]))
        ]
        for row in rows if turn else ():
            ids[row] = _next_prompt(context, group[row], texts[row], ids[row], len(turns[row][-1][0]))
        rows = [row for row in rows if ids[row]]
        if not rows:
            break
        prompts = [Prompt(ids[row], answer_limit(context, group[row], ids[row]), stream=first + row) for row in rows]
        start_s = time.perf_counter()
        results, timing = decode(prompts, on_tokens)
        seconds += time.perf_counter() - start_s
        for name, value in vars(timing).items():
            setattr(total, name, getattr(total, name) + value)
        for row, result in zip(rows, results, strict=True):
            turns[row].append((ids[row], result))
            ids[row] = ids[row] + result.ids
    return [_answer(conversation, turns[row], seconds / len(group), batch) for row, conversation in enumerate(group)]


def _next_prompt(
    context: Context, conversation: Conversation, texts: list[str], ids: list[int], start: int
) -> list[int]:
    """The whole prompt of the turn after the answer that begins at ``ids[start]``, which is added to ``texts``; empty
    if the template cannot show that answer, or there is no room for another.
    """
    texts.append(context.template.answer_text(ids, start))
    try:
        following = context.template.next_prompt(conversation, texts, ids)
    except InputError:
        return []
    prompt = ids + following.ids if following.continues else following.ids
    return prompt if len(prompt) < context.config.target.max_length else []


def _answer(
    conversation: Conversation, turns: list[tuple[list[int], GenerationResult]], seconds: float, batch: int | None
) -> Answer:
    results = [result for _, result in turns]
    figures = PromptResult(
        key=conversation.prompt_digest(),
        rounds=[round_ for result in results for round_ in result.rounds],
        output_ids=[token for result in results for token in result.ids],
        seconds=seconds,
        batch=batch,
        domain=conversation.domain,
    )
    return Answer(conversation, turns, figures)


def _goes_on(turns: list[tuple[list[int], GenerationResult]]) -> bool:
    return bool(turns) and turns[-1][1].finish_reason == "stop"


def answer_limit(context: Context, conversation: Conversation, prompt: list[int]) -> int:
    """The most tokens that this prompt's answer may have. Raises InputError for a prompt that leaves no room."""
    context.template.require_embedded(conversation, prompt)
    room = context.config.target.max_length - len(prompt)
    if room < 1:
        longest = context.config.target.max_length
        raise InputError(
            f"{conversation.where}: the prompt of {len(prompt)} tokens leaves no room for an answer in "
            f"target.max_length={longest}: "
            "raise it, or take the prompt out of the suite"
        )
    return min(room, max_new_tokens(context))
