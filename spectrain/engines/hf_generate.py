"""Answers from the target in this process: continuous batching over the slot cache.

Decoding is bound by reading the weights, so sixteen rows cost little more than one, and the batch is kept full: a conversation that is
done leaves at once, and when a quarter of the places is free, waiting ones are prefilled together and join. Waiting conversations
are taken by length, longest first, so that those prefilled together need little padding and memory peaks early.

Every conversation draws from random numbers of its own, seeded by ``sampling.seed``, its prompt and the turn; a token is drawn by inverse
transform from one uniform. So its answer does not depend on which other conversations there are, nor on a resumed run, beyond what
rounding does to the logits.

A conversation of several turns goes back to the queue after each answer, with the template's ids for the next user turn appended.

Legend: B rows decoded together, T columns, H hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from spectrain.console import say
from spectrain.data.chat import ChatTemplate
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling
from spectrain.decoding.verify import Law, sample, truncated_log_probs
from spectrain.errors import InputError
from spectrain.target.cache import TargetCache, open_cache
from spectrain.target.cpu_attention import cpu_attention
from spectrain.target.model import TargetModel


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
    uniforms: Tensor = field(default_factory=lambda: torch.empty(0))  # one for each token of the turn, [limit] float64
    finish_reason: str = ""  # of the current turn; empty while it is being answered

    def begin_turn(self, limit: int, seed: int) -> None:
        """Get ready to answer the turn whose prompt the ids end with, in at most ``limit`` tokens."""
        digest = hashlib.sha256(f"{seed}/{self.conversation.prompt_digest()}/{self.turn}".encode()).digest()
        random = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # manual_seed takes 63 bits
        self.uniforms = torch.rand(limit, generator=random, dtype=torch.float64)
        self.room, self.finish_reason = limit, ""

    def next_uniform(self) -> Tensor:
        return self.uniforms[len(self.uniforms) - self.room]

    def commit(self, token: int, end_ids: frozenset[int]) -> None:
        """Take a generated token. An answer cut by the limit is never closed with an end token that the target did not generate."""
        self.ids.append(token)
        self.mask.append(1)
        self.room -= 1
        if token in end_ids:
            self.finish_reason = "stop"
        elif self.room == 0:
            self.finish_reason = "length"

    def response(self, sampling: Sampling) -> Response:
        ids, mask = np.array(self.ids, dtype=np.int32), np.array(self.mask, dtype=np.uint8)
        return Response(self.conversation, ids, mask, self.finish_reason, sampling, self.conversation.domain, self.split, self.key)


class ResponseGenerator:
    """Answers conversations under one ``Sampling``: ``run(prepare(conversations, keys))``.

    ``batch_size`` rows decode together; at most ``prefill_tokens`` (or one prompt) are prefilled at a time, which bounds memory.
    """

    def __init__(
        self,
        target: TargetModel,
        template: ChatTemplate,
        end_ids: Sequence[int],
        sampling: Sampling,
        max_length: int,
        batch_size: int,
        prefill_tokens: int,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self._target, self._template, self._end_ids = target, template, frozenset(end_ids)
        self._sampling, self._law = sampling, Law(sampling.temperature, sampling.top_p, sampling.top_k)
        self._max_length, self._batch_size, self._prefill_tokens, self._on_tokens = max_length, batch_size, prefill_tokens, on_tokens

    def prepare(self, conversations: Sequence[tuple[Conversation, str]], keys: Sequence[str]) -> list[Dialogue]:
        """Tokenise all conversations, so that every one that cannot be answered is found before the first token is generated.

        Raises ``InputError`` naming the first prompt that leaves no room for an answer within ``max_length``.
        """
        dialogues, too_long, cut = [], [], 0
        for (conversation, split), key in zip(conversations, keys, strict=True):
            if conversation.answers is not None:
                ids, mask = self._template.render_answered(conversation)
                cut += len(ids) > self._max_length
                dialogue = Dialogue(conversation, split, key, ids[: self._max_length], mask[: self._max_length], finish_reason="imported")
                has_room = any(dialogue.mask)
            else:
                ids = self._template.first_prompt_ids(conversation)
                dialogue = Dialogue(conversation, split, key, ids, [0] * len(ids))
                has_room = len(ids) < self._max_length
            dialogues.append(dialogue)
            if not has_room:
                too_long.append((conversation, len(ids)))
        if too_long:
            conversation, length = too_long[0]
            raise InputError(
                f"{conversation.where}: prompt {conversation.id} is too long, with its answer it takes more than "
                f"target.max_length={self._max_length} tokens ({length} without); {len(too_long)} such prompts: raise target.max_length or "
                f"remove them"
            )
        if cut:
            say(f"note: {cut} imported conversations are longer than target.max_length={self._max_length} tokens and are cut there")
        return dialogues

    def run(self, dialogues: Sequence[Dialogue]) -> Iterator[Response]:
        """Yields each response when it is done."""
        waiting: list[Dialogue] = []  # ascending by length: the longest is taken first, from the end
        for dialogue in dialogues:
            if dialogue.finish_reason == "imported":
                yield dialogue.response(self._sampling)
            else:
                self._enqueue(waiting, dialogue)
        rows: list[Dialogue] = []
        cache: TargetCache | None = None
        while waiting or rows:
            free = self._batch_size - len(rows)
            if waiting and (not rows or 4 * free >= self._batch_size):
                # Longest first, so the first one sets the width. Prompts that do not fit now join in the next round.
                fitting = max(1, self._prefill_tokens // len(waiting[-1].ids))
                joining = [waiting.pop() for _ in range(min(free, fitting, len(waiting)))]
                cache = self._prefill(joining, cache)
                rows += joining
            elif cache is not None:
                self._decode(rows, cache)
            finished = [row for row in rows if row.finish_reason]
            if finished:
                alive = [b for b, row in enumerate(rows) if not row.finish_reason]
                rows = [rows[b] for b in alive]
                cache = _selected(cache, alive)
            for dialogue in finished:
                if self._continues(dialogue):
                    self._enqueue(waiting, dialogue)
                else:
                    yield dialogue.response(self._sampling)

    def _enqueue(self, waiting: list[Dialogue], dialogue: Dialogue) -> None:
        limit = min(self._sampling.max_new_tokens, self._max_length - len(dialogue.ids))
        dialogue.begin_turn(limit, self._sampling.seed)
        insort(waiting, dialogue, key=lambda other: len(other.ids))

    def _continues(self, dialogue: Dialogue) -> bool:
        """Append the next user turn, if there is one and the document has room for it and an answer."""
        if dialogue.finish_reason != "stop" or dialogue.turn + 1 == len(dialogue.conversation.turns):
            return False
        ids = self._template.next_prompt_ids(dialogue.conversation, dialogue.turn + 1, dialogue.ids)
        if len(dialogue.ids) + len(ids) >= self._max_length:
            return False
        dialogue.turn += 1
        dialogue.ids += ids
        dialogue.mask += [0] * len(ids)
        return True

    def _prefill(self, joining: list[Dialogue], cache: TargetCache | None) -> TargetCache:
        """Run whole prompts, draw the first token of each, and append the rows to the cache."""
        lengths = [len(dialogue.ids) for dialogue in joining]
        ids_BT = torch.zeros(len(joining), max(lengths), dtype=torch.long)
        for ids_T, dialogue in zip(ids_BT, joining, strict=True):
            ids_T[: len(dialogue.ids)] = torch.tensor(dialogue.ids)
        joined = open_cache(self._target, len(joining))
        with cpu_attention(self._target.model):
            output = joined.forward(ids_BT.to(self._target.device), lengths, ())
        joined.keep(lengths)
        ends_B = torch.tensor(lengths, device=self._target.device) - 1
        self._draw(joining, output.last_hidden_BSH[torch.arange(len(joining), device=ends_B.device), ends_B])
        if cache is None:
            return joined
        cache.extend(joined)
        return cache

    def _decode(self, rows: list[Dialogue], cache: TargetCache) -> None:
        """One more token for every row."""
        ids_B1 = torch.tensor([row.ids[-1:] for row in rows], device=self._target.device)
        ones = [1] * len(rows)
        with cpu_attention(self._target.model):
            output = cache.forward(ids_B1, ones, ())
        cache.keep(ones)
        self._draw(rows, output.last_hidden_BSH[:, -1])

    def _draw(self, rows: list[Dialogue], last_hidden_BH: Tensor) -> None:
        logits_BV = self._target.logits(last_hidden_BH)
        if self._law.greedy:
            tokens_B = logits_BV.argmax(-1)
        else:
            uniforms_B = torch.stack([row.next_uniform() for row in rows]).to(logits_BV.device)
            tokens_B = sample(truncated_log_probs(logits_BV, self._law).exp(), uniforms_B)
        for row, token in zip(rows, tokens_B.tolist(), strict=True):
            row.commit(token, self._end_ids)
        if self._on_tokens is not None:
            self._on_tokens(len(rows))


def _selected(cache: TargetCache | None, rows: list[int]) -> TargetCache | None:
    """The cache of some rows; None if there are none."""
    if cache is None or not rows:
        return None
    cache.select(rows)
    return cache
