"""Generation that captures: the target runs once over every token, and what it computed while it generated is kept.

The engine generates as always, on a service with a connector; the last turn of each conversation carries the
description of its document.
Its shards stay in the incoming folder: they enter the store in the stage ``capture``, where they must match the stored
responses id for id. So a kill between a shard and its responses leaves nothing wrong, and whatever is missing, such as
a conversation that was cut before its last turn, is captured there like any other document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from spectrain.console import say
from spectrain.data.hidden_states import StoreMeta
from spectrain.engines.conversations import Dialogue
from spectrain.engines.vllm.adopt_states import Session
from spectrain.engines.vllm.capture_states import CapturePlan, VLLMCapture, await_arrival, describe
from spectrain.engines.vllm.requests import Answer, Request, VLLMClient


def states_for(dialogue: Dialogue) -> dict[str, Any] | None:
    """What the connector is told of the turn that is about to be answered: of the last one, the whole document."""
    if dialogue.turn + 1 < len(dialogue.conversation.turns):
        return None
    return describe(dialogue.key, dialogue.split, dialogue.generated_ranges())


class OnePass:
    """``open_vllm`` for a ``VLLMEngine`` whose generation is to be captured into ``folder``, the states of the run.

    ``prompts``: (name, ids) of the prompts, the shortest of which check the service.
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

    def open_vllm(self, purpose: str, extra_args: Mapping[str, Any]) -> VLLMClient:
        return _CapturingClient(self._capturing, self._plan, self._folder, purpose, self._prompts)


class _CapturingClient:
    """A service that, when all is answered, waits for the states to arrive before it closes."""

    def __init__(
        self,
        capturing: VLLMCapture,
        plan: CapturePlan,
        folder: Path,
        purpose: str,
        prompts: Sequence[tuple[str, list[int]]],
    ) -> None:
        self._stack = ExitStack()
        self._client: VLLMClient
        self._session: Session
        self._client, self._session = self._stack.enter_context(capturing.running(plan, folder, purpose, prompts))
        self._described: dict[str, str] = {}  # request -> key of its document, while it is under way
        self._under_way = 0
        self._expected: set[str] = set()

    @property
    def capacity(self) -> int:
        return self._client.capacity  # less when a server is lost

    def submit(self, request: Request) -> None:
        if request.states is not None:
            self._described[request.id] = request.states["spectrain"]["key"]
        self._client.submit(request)
        self._under_way += 1

    def collect(self, timeout_s: float) -> list[Answer]:
        answers = self._client.collect(timeout_s)
        self._under_way -= len(answers)
        self._expected.update(self._described.pop(answer.id) for answer in answers if answer.id in self._described)
        self._session.check()
        return answers

    def close(self) -> None:
        with self._stack:
            if self._under_way == 0 and self._expected:
                missing = await_arrival(self._session, self._expected)
                if missing:
                    say(f"note: the states of {len(missing)} documents did not arrive; they are captured separately")
