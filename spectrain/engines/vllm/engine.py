"""The engine for a target that vLLM runs, in a child process or on servers: conversations in, responses out.

A service is opened when it is needed, kept supplied with as many requests as it can use, and closed when the last
response is out, so its memory is free for what comes next. Prompts and answers are token ids throughout.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from spectrain.data.chat import ChatTemplate
from spectrain.data.hidden_states import TargetStates
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling, response_key
from spectrain.engines.conversations import Dialogue, Turns
from spectrain.engines.vllm.capture_states import VLLMCapture
from spectrain.engines.vllm.requests import Answer, Request, VLLMClient
from spectrain.errors import RunError
from spectrain.target.resolve import ResolvedTarget

_WAIT_S = 1.0

StatesFor = Callable[[Dialogue], dict[str, Any] | None]


class OpenVLLM(Protocol):
    """Opens a service for a purpose (a word, for the name of its log) with further engine arguments."""

    def __call__(self, purpose: str, extra_args: Mapping[str, Any]) -> VLLMClient: ...


class VLLMEngine:
    """``Engine`` on services that ``open_vllm`` opens. ``max_length`` bounds prompt and answers together, in tokens."""

    def __init__(
        self,
        resolved: ResolvedTarget,
        template: ChatTemplate,
        end_ids: Sequence[int],
        max_length: int,
        open_vllm: OpenVLLM,
        capturing: VLLMCapture | None = None,
    ) -> None:
        """``capturing`` None: an engine that only generates."""
        self.resolved = resolved
        self.template = template
        self.end_ids = tuple(end_ids)
        self.max_length = max_length
        self.open_vllm = open_vllm
        self._capturing = capturing

    def response_key(self, conversation: Conversation, sampling: Sampling) -> str:
        return response_key(conversation, sampling, self.resolved.id, self.resolved.revision)

    def generate(
        self,
        conversations: Sequence[tuple[Conversation, str]],
        sampling: Sampling,
        on_tokens: Callable[[int], None] | None = None,
        extra_args: Mapping[str, Any] | None = None,
        states_for: StatesFor | None = None,
    ) -> Iterator[Response]:
        """See ``Engine.generate``. ``on_tokens`` hears of an answer's tokens when the answer is done.

        extra_args: engine arguments beyond the configured ones. states_for: called when a turn is about to be asked;
        what it returns is handed to the connector with the request (``Request.states``).
        """
        turns = Turns(Dialogue, self.template, self.end_ids, sampling, self.max_length)
        keys = [self.response_key(conversation, sampling) for conversation, _ in conversations]
        dialogues = turns.prepare(conversations, keys)
        return self._run(turns, dialogues, sampling, on_tokens, extra_args or {}, states_for)

    @property
    def capturing(self) -> VLLMCapture:
        if self._capturing is None:
            raise ValueError("this engine was made without a VLLMCapture")
        return self._capturing

    def capture(
        self, responses: Sequence[Response], tap_ids: Sequence[int], states_dtype: str = "float32"
    ) -> Iterator[TargetStates]:
        """See ``Engine.capture``. The row of a document's last token is zeros. A store is filled faster by
        ``VLLMCapture.shards``.
        """
        with tempfile.TemporaryDirectory(prefix="spectrain-states-") as folder:
            yield from self.capturing.documents(tuple(tap_ids), states_dtype, responses, Path(folder))

    def _run(
        self,
        turns: Turns[Dialogue],
        dialogues: Sequence[Dialogue],
        sampling: Sampling,
        on_tokens: Callable[[int], None] | None,
        extra_args: Mapping[str, Any],
        states_for: StatesFor | None,
    ) -> Iterator[Response]:
        asked = [dialogue for dialogue in dialogues if dialogue.finish_reason != "imported"]
        yield from (dialogue.response(sampling) for dialogue in dialogues if dialogue.finish_reason == "imported")
        if not asked:
            return
        client = self.open_vllm("generate", extra_args)
        try:
            for dialogue in answered(client, turns, asked, sampling, on_tokens, states_for):
                yield dialogue.response(sampling)
        finally:
            client.close()


def answered(
    client: VLLMClient,
    turns: Turns[Dialogue],
    dialogues: Sequence[Dialogue],
    sampling: Sampling,
    on_tokens: Callable[[int], None] | None = None,
    states_for: StatesFor | None = None,
) -> Iterator[Dialogue]:
    """Answers dialogues to their ends, through any service; yields each when it is done.

    A further turn goes to the front of the queue, while the service still has the conversation in its cache.
    """
    waiting = deque(dialogues)
    under_way: dict[str, Dialogue] = {}
    asked = 0
    while waiting or under_way:
        while waiting and len(under_way) < client.capacity:
            dialogue = waiting.popleft()
            turns.begin(dialogue)
            request = _request(
                f"{asked}", dialogue, turns, sampling, None if states_for is None else states_for(dialogue)
            )
            under_way[request.id] = dialogue
            asked += 1
            client.submit(request)
        for answer in client.collect(_WAIT_S):
            dialogue = under_way.pop(answer.id)
            _take(dialogue, answer, turns.end_ids)
            if on_tokens is not None:
                on_tokens(len(answer.ids))
            if turns.advance(dialogue):
                waiting.appendleft(dialogue)
            else:
                yield dialogue


def _request(
    name: str, dialogue: Dialogue, turns: Turns[Dialogue], sampling: Sampling, states: dict[str, Any] | None
) -> Request:
    return Request(
        id=name,
        prompt_ids=list(dialogue.ids),
        max_tokens=dialogue.room,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=None if sampling.temperature == 0 else dialogue.turn_seed(sampling.seed),
        stop_ids=tuple(sorted(turns.end_ids)),
        states=states,
    )


def _take(dialogue: Dialogue, answer: Answer, end_ids: frozenset[int]) -> None:
    """Append an answer. Raises ``RunError`` for one that does not end where our own rules say: it could not be trained
    on.
    """
    where = dialogue.conversation.where
    for number, token in enumerate(answer.ids):
        dialogue.commit(token, end_ids)
        if dialogue.finish_reason and number + 1 < len(answer.ids):
            raise RunError(
                f"{where}: vLLM went on after the end of the answer (token {number + 1} of {len(answer.ids)})"
            )
    if dialogue.finish_reason != answer.finish_reason:
        raise RunError(
            f"{where}: vLLM ended an answer of {len(answer.ids)} tokens with {answer.finish_reason!r} where "
            f"{dialogue.finish_reason!r} was due: it may have been aborted, or the server has end tokens or a length "
            f"limit of its own"
        )
