"""Answering a suite's conversations with whatever decodes: all turns, in groups, on the clock.

Legend: a group is decoded together; its seconds are shared evenly among its conversations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from spectrain.config.folders import prompt_roots
from spectrain.console import ProgressBar
from spectrain.data.prompts import Conversation
from spectrain.decoding.loop import GenerationResult, LoopTiming
from spectrain.errors import InputError
from spectrain.evaluation.records import PromptResult
from spectrain.evaluation.suites import HELDOUT, load_suite
from spectrain.stages.context import Context
from spectrain.stages.run_report import Answer

_WARM_UP_TOKENS = 8


class Decode(Protocol):
    """Answers prompts together: their ids, the most tokens of each answer, the number of each random stream, whom to
    tell of new tokens.
    """

    def __call__(
        self, prompts: list[list[int]], limits: list[int], streams: list[int], on_tokens: Callable[[int], None], /
    ) -> tuple[list[GenerationResult], LoopTiming]: ...


def suite_prompts(context: Context) -> list[Conversation]:
    """What the suite asks."""
    heldout = context.prompts.heldout if context.config.suite.prompts == HELDOUT else []
    return load_suite(context.config.suite, heldout, prompt_roots(), context.config.data.system)


def max_new_tokens(context: Context) -> int:
    """The most tokens of an answer."""
    return context.config.suite.max_new_tokens or context.config.sampling.max_new_tokens


def answer_all(
    context: Context, conversations: Sequence[Conversation], decode: Decode, size: int, name: str, servers: int = 1
) -> tuple[list[Answer], LoopTiming]:
    """Answers of one method to all conversations, ``size`` of them decoded together, and where the time went. ``name``:
    of the method.

    servers: that share the work. Each is warmed up, for a server's first answer may take a hundred times as long as the
    next.
    """
    first_ids = context.template.first_prompt_ids(conversations[0])
    decode(
        [first_ids] * servers, [_WARM_UP_TOKENS] * servers, [0] * servers, lambda tokens: None
    )  # memory and kernels, off the clock
    answers: list[Answer] = []
    total = LoopTiming()
    limit = sum(len(conversation.turns) for conversation in conversations) * max_new_tokens(context)
    with ProgressBar(f"eval {name}", total=limit, unit="tokens") as bar:
        for batch, first in enumerate(range(0, len(conversations), size)):
            group = conversations[first : first + size]
            answers += _answer_group(context, decode, group, first, batch if size > 1 else None, bar.advance, total)
    return answers, total


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
    turns: list[list[tuple[list[int], GenerationResult]]] = [[] for _ in group]
    seconds = 0.0
    for turn in range(max(len(conversation.turns) for conversation in group)):
        rows = [
            row
            for row, conversation in enumerate(group)
            if turn < len(conversation.turns) and (turn == 0 or _goes_on(turns[row]))
        ]
        if not rows:
            break
        if turn > 0:
            for row in rows:
                ids[row] = ids[row] + context.template.next_prompt_ids(group[row], turn, ids[row])
        limits = [answer_limit(context, group[row], ids[row]) for row in rows]
        start_s = time.perf_counter()
        results, timing = decode([ids[row] for row in rows], limits, [first + row for row in rows], on_tokens)
        seconds += time.perf_counter() - start_s
        for name, value in vars(timing).items():
            setattr(total, name, getattr(total, name) + value)
        for row, result in zip(rows, results, strict=True):
            turns[row].append((ids[row], result))
            ids[row] = ids[row] + result.ids
    return [_answer(conversation, turns[row], seconds / len(group), batch) for row, conversation in enumerate(group)]


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
    )
    return Answer(conversation, turns, figures)


def _goes_on(turns: list[tuple[list[int], GenerationResult]]) -> bool:
    return bool(turns) and turns[-1][1].finish_reason == "stop"


def answer_limit(context: Context, conversation: Conversation, prompt: list[int]) -> int:
    """The most tokens that this prompt's answer may have. Raises InputError for a prompt that leaves no room."""
    room = context.config.target.max_length - len(prompt)
    if room < 1:
        longest = context.config.target.max_length
        raise InputError(
            f"{conversation.where}: the prompt of {len(prompt)} tokens leaves no room for an answer in "
            f"target.max_length={longest}: "
            "raise it, or take the prompt out of the suite"
        )
    return min(room, max_new_tokens(context))
