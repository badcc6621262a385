"""Conversations under way: what every engine does alike, whoever draws the tokens.

Each answer is appended to the ids of its document exactly as it was generated. A further user turn goes on that
document where a chat server would show the same, and begins a document of its own elsewhere (``data/chat.py``). A turn
is answered with a seed of its own, made from ``sampling.seed``, the prompt and the number of the turn, so the random
numbers of an answer depend neither on which other conversations there are nor on a resumed run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from spectrain.console import say
from spectrain.data.chat import ChatTemplate
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling, document_key
from spectrain.errors import InputError


@dataclass
class Dialogue:
    """A conversation under way: the ids of its current document, the mask of those the target generated, and the turn
    being answered.
    """

    conversation: Conversation
    split: str
    key: str  # of the conversation's first document
    ids: list[int]
    mask: list[int]
    turn: int = 0
    room: int = 0  # tokens this turn may still generate
    finish_reason: str = ""  # of the current turn; empty while it is being answered
    first_turn: int = 0  # of the current document
    answer_start: int = 0  # in ids, of the current turn's answer
    answers: list[str] = field(default_factory=list)  # to earlier turns, as a chat server returns them
    finished: list[Response] = field(default_factory=list)  # earlier documents

    @property
    def document_key(self) -> str:
        return document_key(self.key, self.first_turn)

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
        self.answer_start = len(self.ids)

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

    def begin_document(self, first_turn: int, ids: Sequence[int], sampling: Sampling) -> None:
        """Close the current document, and open the one of ``first_turn`` with its prompt."""
        self.finished.append(self.response(sampling))
        self.first_turn = first_turn
        self.ids, self.mask = list(ids), [0] * len(ids)

    def responses(self, sampling: Sampling) -> list[Response]:
        """All documents. The one with the conversation's own key comes last: where it is stored, all of them are."""
        return [self.response(sampling), *reversed(self.finished)]

    def response(self, sampling: Sampling) -> Response:
        """The current document."""
        ids, mask = np.array(self.ids, dtype=np.int32), np.array(self.mask, dtype=np.uint8)
        domain, key = self.conversation.domain, self.document_key
        return Response(self.conversation, ids, mask, self.finish_reason, sampling, domain, self.split, key)


Kind = TypeVar("Kind", bound=Dialogue)


class _Rooms:
    """Which conversations leave no room for an answer, and how many imported ones are cut."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._first: tuple[Conversation, int] | None = None
        self._too_long = self._cut = 0

    def add(self, conversation: Conversation, length: int, has_answer: bool) -> None:
        """``length``: in tokens, without an answer unless it is imported; ``has_answer``: within the limit."""
        imported = conversation.answers is not None
        self._cut += imported and length > self._max_length
        if not (has_answer if imported else length < self._max_length):
            self._first = self._first or (conversation, length)
            self._too_long += 1

    def report(self, quiet: bool) -> None:
        if self._first is not None:
            conversation, length = self._first
            raise InputError(
                f"{conversation.where}: prompt {conversation.id} is too long, with its answer it takes more than "
                f"target.max_length={self._max_length} tokens ({length} without); {self._too_long} such prompts: raise "
                f"target.max_length or "
                f"remove them"
            )

        if self._cut and not quiet:
            say(
                f"note: {self._cut} imported conversations are longer than target.max_length={self._max_length} tokens "
                f"and are cut there"
            )


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
        self._rejected = False  # whether an answer was, by the template

    def prepare(
        self, conversations: Sequence[tuple[Conversation, str]], keys: Sequence[str], quiet: bool = False
    ) -> list[Kind]:
        """Tokenise conversations. Those with answers are rendered whole and have the finish reason "imported". Errors
        and note as ``check``.
        """
        dialogues, rooms = [], _Rooms(self._max_length)
        for (conversation, split), key in zip(conversations, keys, strict=True):
            dialogue, length = self._opened(conversation, split, key)
            rooms.add(conversation, length, conversation.answers is None or any(dialogue.mask))
            dialogues.append(dialogue)
        rooms.report(quiet)
        return dialogues

    def check(self, conversations: Iterable[Conversation], quiet: bool = False) -> None:
        """Tokenise all conversations and keep none, so that every one that cannot be answered is found before the first
        token is generated. Raises ``InputError`` naming the first prompt that leaves no room for an answer within
        ``max_length``, or has a token that the target does not embed. Unless ``quiet``, a note tells how many imported
        ones are cut.
        """
        rooms = _Rooms(self._max_length)
        for conversation in conversations:
            if conversation.answers is None:
                length, greatest = self._template.first_prompt_size(conversation)
                self._template.require_embedded(conversation, [greatest])
                rooms.add(conversation, length, True)
            else:
                dialogue, length = self._opened(conversation, "train", "")
                rooms.add(conversation, length, any(dialogue.mask))
        rooms.report(quiet)

    def _opened(self, conversation: Conversation, split: str, key: str) -> tuple[Kind, int]:
        """The dialogue of a conversation, and the tokens of its longest document, uncut."""
        if conversation.answers is not None:
            dialogue, ids = self._imported(conversation, split, key)
        else:
            ids = self._template.first_prompt_ids(conversation)
            dialogue = self._kind(conversation, split, key, ids, [0] * len(ids))
        self._template.require_embedded(conversation, dialogue.ids)
        return dialogue, len(ids)

    def _imported(self, conversation: Conversation, split: str, key: str) -> tuple[Kind, list[int]]:
        """The dialogue of a conversation that has answers, and the ids of its longest document, uncut. A further
        document without room for an answer is left out, as a further turn is.
        """
        documents = self._template.answered_documents(conversation)
        cut = [(d.first_turn, d.ids[: self._max_length], d.mask[: self._max_length]) for d in documents]
        (_, ids, mask), *further = cut
        dialogue = self._kind(conversation, split, key, ids, mask, finish_reason="imported")
        for first_turn, ids, mask in further:
            if any(mask) and any(dialogue.mask):
                dialogue.begin_document(first_turn, ids, self._sampling)
                dialogue.mask = mask
        return dialogue, max((document.ids for document in documents), key=len)

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
        """Append the next user turn, or begin its document, if there is one and room for it and an answer."""
        if dialogue.finish_reason != "stop" or self.is_last(dialogue):
            return False
        answers = [*dialogue.answers, self._template.answer_text(dialogue.ids, dialogue.answer_start)]
        try:
            prompt = self._template.next_prompt(dialogue.conversation, answers, dialogue.ids)
        except InputError as error:  # what is answered so far is right; a server could not go on either
            if not self._rejected:
                say(f"note: {error}; this conversation, and others like it, end there")
            self._rejected = True
            return False
        if len(prompt.ids) + prompt.continues * len(dialogue.ids) >= self._max_length:
            return False
        dialogue.turn += 1
        dialogue.answers = answers
        if prompt.continues:
            dialogue.ids += prompt.ids
            dialogue.mask += [0] * len(prompt.ids)
        else:
            dialogue.begin_document(dialogue.turn, prompt.ids, self._sampling)
        return True
