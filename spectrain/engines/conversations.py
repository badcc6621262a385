"""Conversations under way: what every engine does alike, whoever draws the tokens.

A conversation is tokenised once. Each answer is appended to its ids exactly as it was generated, followed by the
template's ids for the next user turn; nothing is ever decoded and tokenised again. A turn is answered with a seed of
its own, made from ``sampling.seed``, the prompt and the number of the turn, so an answer depends neither on which other
conversations there are nor on a resumed run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from spectrain.console import say
from spectrain.data.chat import ChatTemplate
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling
from spectrain.errors import InputError


@dataclass
class Dialogue:
    """A conversation under way: its ids so far, the mask of those the target generated, and the turn being answered."""

    conversation: Conversation
    split: str
    key: str
    ids: list[int]
    mask: list[int]
    turn: int = 0
    room: int = 0  # tokens this turn may still generate
    finish_reason: str = ""  # of the current turn; empty while it is being answered

    def turn_seed(self, seed: int) -> int:
        """What the current turn is drawn with: 63 bits from ``seed``, the prompt and the number of the turn."""
        digest = hashlib.sha256(f"{seed}/{self.conversation.prompt_digest()}/{self.turn}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def begin_turn(self, limit: int, seed: int) -> None:
        """Get ready to answer the turn whose prompt the ids end with, in at most ``limit`` tokens. ``seed``: of the
        sampling.
        """
        self.room = limit
        self.finish_reason = ""

    def commit(self, token: int, end_ids: frozenset[int]) -> None:
        """Take a generated token. An answer cut by the limit is never closed with an end token that the target did not
        generate.
        """
        self.ids.append(token)
        self.mask.append(1)
        self.room -= 1
        if token in end_ids:
            self.finish_reason = "stop"
        elif self.room == 0:
            self.finish_reason = "length"

    def response(self, sampling: Sampling) -> Response:
        ids, mask = np.array(self.ids, dtype=np.int32), np.array(self.mask, dtype=np.uint8)
        return Response(
            self.conversation, ids, mask, self.finish_reason, sampling, self.conversation.domain, self.split, self.key
        )


Kind = TypeVar("Kind", bound=Dialogue)


class Turns(Generic[Kind]):
    """The course of conversations under one ``Sampling``. kind: the class of its dialogues; max_length: of a document,
    in tokens.
    """

    def __init__(
        self, kind: type[Kind], template: ChatTemplate, end_ids: Iterable[int], sampling: Sampling, max_length: int
    ) -> None:
        self._kind = kind
        self._template = template
        self.end_ids = frozenset(end_ids)
        self._sampling = sampling
        self._max_length = max_length

    def prepare(self, conversations: Sequence[tuple[Conversation, str]], keys: Sequence[str]) -> list[Kind]:
        """Tokenise all conversations, so that every one that cannot be answered is found before the first token is
        generated.

        Those with answers are rendered whole and have the finish reason "imported". Raises ``InputError`` naming the
        first prompt that leaves no room for an answer within ``max_length``.
        """
        dialogues, too_long, cut = [], [], 0
        for (conversation, split), key in zip(conversations, keys, strict=True):
            if conversation.answers is not None:
                ids, mask = self._template.render_answered(conversation)
                cut += len(ids) > self._max_length
                dialogue = self._kind(
                    conversation,
                    split,
                    key,
                    ids[: self._max_length],
                    mask[: self._max_length],
                    finish_reason="imported",
                )
                has_room = any(dialogue.mask)
            else:
                ids = self._template.first_prompt_ids(conversation)
                dialogue = self._kind(conversation, split, key, ids, [0] * len(ids))
                has_room = len(ids) < self._max_length
            dialogues.append(dialogue)
            self._template.require_embedded(conversation, dialogue.ids)
            if not has_room:
                too_long.append((conversation, len(ids)))
        if too_long:
            conversation, length = too_long[0]
            raise InputError(
                f"{conversation.where}: prompt {conversation.id} is too long, with its answer it takes more than "
                f"target.max_length={self._max_length} tokens ({length} without); {len(too_long)} such prompts: raise "
                f"target.max_length or "
                f"remove them"
            )
        if cut:
            say(
                f"note: {cut} imported conversations are longer than target.max_length={self._max_length} tokens and "
                f"are cut there"
            )
        return dialogues

    def begin(self, dialogue: Kind) -> None:
        """Open the turn whose prompt the ids end with."""
        self._template.require_embedded(dialogue.conversation, dialogue.ids)
        dialogue.begin_turn(
            min(self._sampling.max_new_tokens, self._max_length - len(dialogue.ids)), self._sampling.seed
        )

    def is_last(self, dialogue: Kind) -> bool:
        """Whether the turn being answered is surely the conversation's last one (an earlier one is, too, if its answer
        is cut).
        """
        return dialogue.turn + 1 == len(dialogue.conversation.turns)

    def advance(self, dialogue: Kind) -> bool:
        """Append the next user turn, if there is one and the document has room for it and an answer."""
        if dialogue.finish_reason != "stop" or self.is_last(dialogue):
            return False
        ids = self._template.next_prompt_ids(dialogue.conversation, dialogue.turn + 1, dialogue.ids)
        if len(dialogue.ids) + len(ids) >= self._max_length:
            return False
        dialogue.turn += 1
        dialogue.ids += ids
        dialogue.mask += [0] * len(ids)
        return True
