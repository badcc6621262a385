"""Requests and conversations through vLLM: what is asked when, and what is made of the answers. vLLM is a stand-in,
without a model.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_tokenizer

from spectrain.data.chat import ChatTemplate
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Sampling
from spectrain.engines.vllm.engine import VLLMEngine
from spectrain.engines.vllm.requests import Completion, Request, VLLMClient, completions, completions_in_order
from spectrain.errors import InputError, RunError

END = tiny_tokenizer().convert_tokens_to_ids("<|im_end|>")
TARGET: Any = SimpleNamespace(id="target", revision="1", folder=Path("none"))
SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=6, seed=3)


def said(request: Request) -> tuple[list[int], str]:
    """An answer that depends on the prompt alone: some tokens and an end, or as many as allowed."""
    draw = random.Random(str(request.prompt_ids))
    ids = [draw.randrange(10, 250) for _ in range(draw.randrange(1, 9))] + [END]
    return (ids, "stop") if len(ids) <= request.max_tokens else (ids[: request.max_tokens], "length")


class Stub(VLLMClient):
    """Answers in random order, a few at a time."""

    def __init__(self, capacity: int = 3, answer: Callable[[Request], tuple[list[int], str]] = said) -> None:
        self.free = capacity
        self._answer = answer
        self.asked: list[Request] = []
        self.open: list[Request] = []
        self.most_open = self.closed = self.opened = 0
        self.random = random.Random(0)

    @property
    def capacity(self) -> int:
        return self.free

    def __call__(self, purpose: str, extra_args: Any) -> Stub:
        self.opened += 1
        assert (purpose, extra_args) == ("generate", {})
        return self

    def submit(self, request: Request) -> None:
        self.asked.append(request)
        self.open.append(request)
        self.most_open = max(self.most_open, len(self.open))

    def collect(self, timeout_s: float) -> list[Completion]:
        done = [
            self.open.pop(self.random.randrange(len(self.open)))
            for _ in range(self.random.randrange(len(self.open) + 1))
        ]
        return [Completion(request.id, *self._answer(request), seconds=0.1) for request in done]

    def close(self) -> None:
        self.closed += 1


# --- the pump -------------------------------------------------------------------------------------------------------


def ask(numbers: range) -> list[Request]:
    return [Request(f"r{number}", [number], 5) for number in numbers]


def test_a_request_is_taken_only_when_it_can_be_sent() -> None:
    stub, taken = Stub(capacity=3), []

    def requests() -> Iterator[Request]:
        for request in ask(range(10)):
            taken.append(request)
            assert len(stub.open) < 3
            yield request

    found = []
    for completion in completions(stub, requests()):
        found.append(completion)
        assert len(taken) <= len(found) + 3
    assert sorted(completion.id for completion in found) == [f"r{number}" for number in range(10)]
    assert stub.asked == taken and stub.most_open == 3


def test_requests_that_come_of_completions_are_sent_before_the_end() -> None:
    """As long as there is none, the source says so; the end is when nothing can bring another one."""
    stub, waiting, asks = Stub(capacity=2), deque(ask(range(3))), 0

    def requests() -> Iterator[Request | None]:
        nonlocal asks
        while True:
            asks += 1
            yield waiting.popleft() if waiting else None

    found = []
    for completion in completions(stub, requests()):
        found.append(completion.id)
        if len(completion.id) < 4:
            waiting.appendleft(Request(f"{completion.id}x", [len(found)], 5))
    assert sorted(found) == sorted(f"r{number}{'x' * more}" for number in range(3) for more in range(3))
    assert asks < 50 and list(completions(stub, [])) == []


def test_a_capacity_that_falls_is_kept_to() -> None:
    stub = Stub(capacity=6)
    under_way = []
    for _ in completions(stub, ask(range(30))):
        stub.free = 2
        under_way.append(len(stub.open))
    assert max(under_way[8:]) <= 2


def test_completions_in_the_order_of_their_requests() -> None:
    heard: list[str] = []
    found = completions_in_order(Stub(), ask(range(20)), lambda completion: heard.append(completion.id))
    assert [completion.id for completion in found] == [f"r{number}" for number in range(20)]
    assert sorted(heard) == sorted(completion.id for completion in found) and heard != sorted(heard)


# --- conversations --------------------------------------------------------------------------------------------------


def engine(stub: Stub, max_length: int = 300) -> VLLMEngine:
    return VLLMEngine(TARGET, ChatTemplate(tiny_tokenizer(), [END]), (END,), max_length, stub)


def conversations(count: int, turns: int = 1) -> list[tuple[Conversation, str]]:
    return [
        (Conversation(f"c{n}", tuple(f"question {n} {turn}" for turn in range(turns))), "train") for n in range(count)
    ]


def test_every_conversation_is_answered_once_and_vllm_is_kept_full() -> None:
    stub = Stub(capacity=4)
    tokens: list[int] = []
    found = list(engine(stub).generate(conversations(30, turns=3), SAMPLING, tokens.append))
    assert sorted(response.conversation.id for response in found if "-" not in response.key) == sorted(
        f"c{n}" for n in range(30)
    )
    assert (stub.most_open, stub.opened, stub.closed) == (4, 1, 1)
    assert len({request.id for request in stub.asked}) == len(stub.asked) > 30
    assert sum(tokens) == sum(int(response.loss_mask.sum()) for response in found)
    assert {response.finish_reason for response in found} == {"stop", "length"}
    documents = {response.key: list(response.input_ids) for response in found}
    template = engine(stub).template
    for response in found:  # the documents of each conversation, replayed turn by turn
        if "-" in response.key:
            continue
        key, texts = response.key, list[str]()
        at, turn = template.first_prompt_ids(response.conversation), 0
        while True:
            start = len(at)
            answer, reason = said(Request("", at, min(6, 300 - len(at))))
            at = at + answer
            if reason == "length" or turn == 2:
                break
            turn += 1
            texts.append(template.answer_text(at, start))
            following = template.next_prompt(response.conversation, texts, at)
            if not following.continues:
                assert documents.pop(key) == at
                key = f"{response.key}-{turn + 1}"
            at = at * following.continues + following.ids
        assert documents.pop(key) == at
        assert next(other for other in found if other.key == key).finish_reason == reason
    assert documents == {}


def test_order_and_company_change_nothing() -> None:
    whole = {
        response.key: response.input_ids.tolist()
        for response in engine(Stub(7)).generate(conversations(20, 2), SAMPLING)
    }
    part = {
        response.key: response.input_ids.tolist()
        for response in engine(Stub(1)).generate(conversations(20, 2)[5:9], SAMPLING)
    }
    assert len({key.partition("-")[0] for key in whole}) == 20
    assert part.items() <= whole.items()


def test_requests_carry_the_sampling_and_a_seed_of_their_own() -> None:
    stub = Stub()
    list(engine(stub).generate(conversations(5, 2), SAMPLING))
    for request in stub.asked:
        assert (request.temperature, request.top_p, request.top_k, request.stop_ids) == (0.7, 0.9, 5, (END,))
    assert len({request.seed for request in stub.asked}) == len(stub.asked)
    again, other, greedy = Stub(), Stub(), Stub()
    list(engine(again).generate(conversations(5, 2), SAMPLING))
    list(engine(other).generate(conversations(5, 2), replace(SAMPLING, seed=4)))
    list(engine(greedy).generate(conversations(5, 2), replace(SAMPLING, temperature=0.0)))
    assert {request.seed for request in again.asked} == {request.seed for request in stub.asked}
    assert not {request.seed for request in other.asked} & {request.seed for request in stub.asked}
    assert {request.seed for request in greedy.asked} == {None}


def test_a_further_turn_goes_before_conversations_that_have_not_begun() -> None:
    stub = Stub(capacity=1, answer=lambda request: ([11, END], "stop"))
    list(engine(stub).generate(conversations(3, 2), SAMPLING))
    text = [tiny_tokenizer().decode(request.prompt_ids) for request in stub.asked]
    assert [max(n for n in range(3) if f"question {n} 0" in line) for line in text] == [0, 0, 1, 1, 2, 2]


def test_states_are_asked_for_with_the_turn_that_is_under_way() -> None:
    stub = Stub(answer=lambda request: ([11, END], "stop"))
    list(
        engine(stub).generate(
            conversations(4, 2), SAMPLING, states_for=lambda dialogue: {"turn": dialogue.turn, "key": dialogue.key}
        )
    )
    states = [request.states for request in stub.asked if request.states is not None]
    assert sorted(state["turn"] for state in states) == [0] * 4 + [1] * 4
    assert len({state["key"] for state in states}) == 4


def test_imported_answers_need_no_vllm() -> None:
    stub = Stub()
    imported = Conversation("i", ("question",), answers=("answer",))
    (response,) = engine(stub).generate([(imported, "train")], SAMPLING)
    assert response.finish_reason == "imported"
    assert (stub.opened, stub.asked) == (0, [])


def test_a_prompt_without_room_is_named_before_vllm_is_opened() -> None:
    stub = Stub()
    with pytest.raises(InputError, match="too long"):
        engine(stub, max_length=5).generate(conversations(1), SAMPLING)
    assert stub.opened == 0


@pytest.mark.parametrize(
    ("ids", "reason", "match"),
    [
        ([10, 11], "stop", "with 'stop' where '' was due"),
        ([10, END], "length", "with 'length' where 'stop' was due"),
        ([10, END, 11], "stop", "went on after the end"),
        ([10, 11], "length", "with 'length' where '' was due"),
        ([], "abort", "with 'abort' where '' was due"),
        ([10] * 7, "length", "went on after the end"),
    ],
)
def test_an_answer_that_ends_otherwise_than_it_should_is_refused(ids: list[int], reason: str, match: str) -> None:
    stub = Stub(answer=lambda request: (ids, reason))
    with pytest.raises(RunError, match=match):
        list(engine(stub).generate(conversations(2), SAMPLING))
    assert stub.closed == 1


def test_vllm_is_closed_when_nobody_wants_more() -> None:
    stub = Stub()
    answers = engine(stub).generate(conversations(9), SAMPLING)
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert stub.closed == 1
