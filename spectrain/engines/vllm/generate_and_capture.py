"""Generation that captures: the target runs once over every token, and what it computed while it generated is kept.

The engine generates as always, on a vLLM with a connector; the last turn of each conversation carries the description
of its document. Its shards stay in the incoming folder: they enter the store in the stage ``capture``, where they must
match the stored responses id for id. So a kill between a shard and its responses leaves nothing wrong, and whatever is
missing, such as a conversation that was cut before its last turn, is captured there like any other document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spectrain.console import say
from spectrain.data.hidden_states import StoreMeta
from spectrain.data.loss_mask import generated_ranges
from spectrain.engines.conversations import Dialogue
from spectrain.engines.vllm.adopt_states import Session
from spectrain.engines.vllm.capture_states import VLLMCapture, await_arrival, describe
from spectrain.engines.vllm.requests import VLLMClient


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
        """What the connector is told of the turn that is about to be answered: of the last one, the whole document.

        Raises ``RunError`` if the hidden states of earlier ones could not be written.
        """
        if self._session is not None:
            self._session.check()
        if dialogue.turn + 1 < len(dialogue.conversation.turns):
            return None
        self._described.add(dialogue.key)
        return describe(dialogue.key, dialogue.split, generated_ranges(dialogue.mask))
