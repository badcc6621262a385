"""What a server answered, in the terms of our own loop: rounds placed in the text, complete or cut by the
length limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from spectrain.decoding.acceptance import Round
from spectrain.engines.vllm.requests import Answer, Request, VLLMClient
from spectrain.errors import RunError

_WAIT_S = 1.0


def placed_rounds(prompt_length: int, answer: Answer) -> list[Round]:
    """The rounds of an answer, as the loop would have reported them for the same text.

    A server counts every draft that its target accepted, also those that no longer fit into the answer; here a draft
    counts as accepted only if it became text. Servers report no round for a token decoded without drafts (n-gram lookup
    without a match, no room left for drafts): such rounds are added in front, where they are is not known, so that
    tokens per pass of the target stays what it is.

    Raises RunError if the rounds hold more than the text.
    """
    tokens = len(answer.ids)
    reported = sum(min(round_.accepted, round_.drafted) + 1 for round_ in answer.rounds)
    silent = max(0, tokens - 1 - reported)  # the prefill made the first token
    rounds = [Round(anchor=prompt_length + i, drafted=0, accepted=0) for i in range(silent)]
    made = 1 + silent
    for round_ in answer.rounds:
        kept = min(round_.accepted + 1, tokens - made)
        if kept < 1:
            raise RunError(
                f"the server reports {len(answer.rounds)} rounds with {reported} tokens for an answer of {tokens}: no "
                f"such text"
            )
        accepted = min(kept, round_.accepted)
        cut = answer.finish_reason == "length" and made + kept == tokens and kept == accepted < round_.drafted
        rounds.append(Round(prompt_length + made - 1, round_.drafted, accepted, cut, round_.drafts))
        made += kept
    return rounds


def answer_all(
    client: VLLMClient, requests: Sequence[Request], on_answer: Callable[[Answer], None] | None = None
) -> list[Answer]:
    """Answers in the order of the requests; as many are under way together as the service takes."""
    waiting = deque(requests)
    answers: dict[str, Answer] = {}
    under_way = 0
    while len(answers) < len(requests):
        while waiting and under_way < client.capacity:
            client.submit(waiting.popleft())
            under_way += 1
        for answer in client.collect(_WAIT_S):
            answers[answer.id] = answer
            under_way -= 1
            if on_answer is not None:
                on_answer(answer)
    return [answers[request.id] for request in requests]
