"""The engine for a target that vLLM runs, in a child process or on servers: conversations in, responses out.

A vLLM is opened when it is needed, kept supplied with as many requests as it can use, and closed when the last response
is out, so its memory is free for what comes next. Prompts and answers are token ids throughout.

Generation that captures: the target runs once over every token, and what it computed while it generated is kept.

The engine generates as always, on a vLLM with a connector; the last turn of each conversation carries the description
of its document. Its shards stay in the incoming folder: they enter the store in the stage ``capture``, where they must
match the stored responses id for id. So a kill between a shard and its responses leaves nothing wrong, and whatever is
missing, such as a conversation that was cut before its last turn, is captured there like any other document.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from spectrain.console import say
from spectrain.data.chat import ChatTemplate
from spectrain.data.hidden_states import StoreMeta, TargetStates
from spectrain.data.loss_mask import generated_ranges
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling, response_key
from spectrain.engines.conversations import Dialogue, Turns
from spectrain.engines.vllm.adopt_states import Session
from spectrain.engines.vllm.capture_plan import describe
from spectrain.engines.vllm.capture_states import VLLMCapture, await_arrival
from spectrain.engines.vllm.requests import Completion, OpenVLLM, Request, VLLMClient, completions
from spectrain.errors import RunError
from spectrain.target.resolve import ResolvedTarget

StatesFor = Callable[[Dialogue], dict[str, Any] | None]


class VLLMEngine:
    """``Engine`` on vLLMs that ``open_vllm`` opens. ``max_length`` bounds prompt and answers together, in tokens."""

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

    stored_together = 1  # vLLM makes its batches itself

    def response_key(self, conversation: Conversation, sampling: Sampling) -> str:
        return response_key(conversation, sampling, self.resolved.id, self.resolved.revision, self.template.variables)

    def generate(
        self,
        conversations: Sequence[tuple[Conversation, str]],
        sampling: Sampling,
        on_tokens: Callable[[int], None] | None = None,
        states_for: StatesFor | None = None,
    ) -> Iterator[Response]:
        """See ``Engine.generate``. ``on_tokens`` hears of an answer's tokens when the answer is done.

        states_for: called when a turn is about to be asked; what it returns is handed to the connector with the request
        (``Request.states``).
        """
        turns = Turns(Dialogue, self.template, self.end_ids, sampling, self.max_length)
        keys = [self.response_key(conversation, sampling) for conversation, _ in conversations]
        dialogues = turns.prepare(conversations, keys)
        return self._run(turns, dialogues, sampling, on_tokens, states_for)

    @property
    def capturing(self) -> VLLMCapture:
        if self._capturing is None:
            raise ValueError("this engine was made without a VLLMCapture")
        return self._capturing

    def capture(
        self,
        responses: Sequence[Response],
        tap_ids: Sequence[int],
        states_dtype: str = "float32",
        stored: Collection[str] = (),
        kv_layers: Sequence[int] = (),
    ) -> Iterator[TargetStates]:
        """See ``Engine.capture``; there are no ``kv_layers`` to be had from vLLM. The row of a document's last token is
        zeros. A store is filled faster by ``VLLMCapture.shards``.
        """
        missing = [response for response in responses if response.key not in stored]
        with tempfile.TemporaryDirectory(prefix="spectrain-states-") as folder:
            yield from self.capturing.documents(tuple(tap_ids), states_dtype, missing, Path(folder))

    def _run(
        self,
        turns: Turns[Dialogue],
        dialogues: Sequence[Dialogue],
        sampling: Sampling,
        on_tokens: Callable[[int], None] | None,
        states_for: StatesFor | None,
    ) -> Iterator[Response]:
        asked = [dialogue for dialogue in dialogues if dialogue.finish_reason != "imported"]
        for dialogue in dialogues:
            if dialogue.finish_reason == "imported":
                yield from dialogue.responses(sampling)
        if not asked:
            return
        with self.open_vllm("generate", {}) as client:
            for dialogue in answered(client, turns, asked, sampling, on_tokens, states_for):
                yield from dialogue.responses(sampling)


def answered(
    client: VLLMClient,
    turns: Turns[Dialogue],
    dialogues: Sequence[Dialogue],
    sampling: Sampling,
    on_tokens: Callable[[int], None] | None = None,
    states_for: StatesFor | None = None,
) -> Iterator[Dialogue]:
    """Answers dialogues to their ends; yields each when it is done.

    A further turn goes to the front of the queue, while vLLM still has the conversation in its cache.
    """
    waiting = deque(dialogues)
    under_way: dict[str, Dialogue] = {}

    def requests() -> Iterator[Request | None]:
        for number in count():
            if waiting:
                dialogue = waiting.popleft()
                turns.begin(dialogue)
                states = None if states_for is None else states_for(dialogue)
                request = _request(str(number), dialogue, turns, sampling, states)
                under_way[request.id] = dialogue
                yield request
            else:
                yield None  # until an answer lets a further turn be asked

    for completion in completions(client, requests()):
        dialogue = under_way.pop(completion.id)
        _take(dialogue, completion, turns.end_ids)
        if on_tokens is not None:
            on_tokens(len(completion.ids))
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


def _take(dialogue: Dialogue, completion: Completion, end_ids: frozenset[int]) -> None:
    """Append an answer. Raises ``RunError`` for one that does not end where our own rules say: it could not be trained
    on.
    """
    where = dialogue.conversation.where
    for number, token in enumerate(completion.ids):
        dialogue.commit(token, end_ids)
        if dialogue.finish_reason and number + 1 < len(completion.ids):
            raise RunError(
                f"{where}: vLLM went on after the end of the answer (token {number + 1} of {len(completion.ids)})"
            )
    if dialogue.finish_reason != completion.finish_reason:
        raise RunError(
            f"{where}: vLLM ended an answer of {len(completion.ids)} tokens with {completion.finish_reason!r} where "
            f"{dialogue.finish_reason!r} was due: it may have been aborted, or the server has end tokens or a length "
            f"limit of its own"
        )


class OnePass:
    """What a ``VLLMEngine`` needs so that its generation is captured into ``folder``, the hidden states of the run:
    ``open_vllm`` for the engine, ``states_for`` for ``generate``.

    ``prompts``: (name, ids) of the prompts, the shortest of which are used to check vLLM.
    """

    def __init__(
        self,
        capturing: VLLMCapture,
        meta: StoreMeta,
        shard_bytes: int,
        folder: Path,
        prompts: Sequence[tuple[str, list[int]]],
    ) -> None:
        self._capturing = capturing
        self._plan = capturing.plan(meta, shard_bytes)
        self._folder = folder
        self._prompts = prompts
        self._session: Session | None = None
        self._described: set[str] = set()  # keys of the documents that are asked for

    @contextmanager
    def open_vllm(self, purpose: str, extra_args: Mapping[str, Any]) -> Iterator[VLLMClient]:
        """A vLLM that captures. Once everything is answered it is closed only when the hidden states have arrived."""
        with self._capturing.running(self._plan, self._folder, purpose, self._prompts) as (client, session):
            self._session = session
            yield client  # an error, or an end before everything is answered, does not come back from here
            missing = await_arrival(session, self._described)
            if missing:
                say(f"note: hidden states of {len(missing)} documents did not arrive; they are captured separately")

    def states_for(self, dialogue: Dialogue) -> dict[str, Any] | None:
        """What the connector is told of the turn that is about to be answered: of the last one, its whole document.

        Raises ``RunError`` if the hidden states of earlier ones could not be written.
        """
        if self._session is not None:
            self._session.check()
        if dialogue.turn + 1 < len(dialogue.conversation.turns):
            return None
        self._described.add(dialogue.document_key)
        return describe(dialogue.document_key, dialogue.split, generated_ranges(dialogue.mask))
