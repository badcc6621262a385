"""Answers from the target in this process: continuous batching over the slot cache.

Decoding is bound by reading the weights, so sixteen rows cost little more than one, and the batch is kept full: a
conversation that is done leaves at once, and when a quarter of the rows is free, waiting ones are prefilled together
and join. Waiting conversations are taken by length, longest first, so that those prefilled together need little padding
and memory peaks early.

Every turn draws from random numbers of its own (``conversations.py``); a token is drawn by inverse transform from one
uniform. So an answer does not depend on its company, beyond what rounding does to the logits. A conversation of several
turns goes back to the queue after each answer.

Legend: B rows decoded together, T columns, H hidden, V vocabulary.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectrain.data.chat import ChatTemplate
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling
from spectrain.decoding.sampling import SamplingParams, sample, truncated_log_probs
from spectrain.engines.conversations import Dialogue, Turns
from spectrain.target.cpu_kernels import cpu_attention
from spectrain.target.kv_cache import TargetCache, open_cache
from spectrain.target.model import TargetModel


@dataclass
class DrawnDialogue(Dialogue):
    """A conversation with the random numbers that its current turn is drawn by."""

    uniforms: Tensor = field(default_factory=lambda: torch.empty(0))  # one for each token of the turn, [limit] float64

    def begin_turn(self, limit: int, seed: int) -> None:
        super().begin_turn(limit, seed)
        random = torch.Generator().manual_seed(self.turn_seed(seed))
        self.uniforms = torch.rand(limit, generator=random, dtype=torch.float64)

    def next_uniform(self) -> Tensor:
        return self.uniforms[len(self.uniforms) - self.room]


class ResponseGenerator:
    """Answers conversations under one ``Sampling``: ``run(prepare(conversations, keys))``.

    ``batch_size`` rows decode together; at most ``prefill_tokens`` (or one prompt) are prefilled at a time, which
    bounds memory.
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
        self._target = target
        self._turns = Turns(DrawnDialogue, template, end_ids, sampling, max_length)
        self._sampling = sampling
        self._params = SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k)
        self._batch_size = batch_size
        self._prefill_tokens = prefill_tokens
        self._on_tokens = on_tokens

    def prepare(self, conversations: Sequence[tuple[Conversation, str]], keys: Sequence[str]) -> list[DrawnDialogue]:
        """Tokenise all conversations; see ``Turns.prepare``."""
        return self._turns.prepare(conversations, keys)

    def run(self, dialogues: Sequence[DrawnDialogue]) -> Iterator[Response]:
        """Yields each response when it is done."""
        waiting: list[DrawnDialogue] = []  # ascending by length: the longest is taken first, from the end
        for dialogue in dialogues:
            if dialogue.finish_reason == "imported":
                yield dialogue.response(self._sampling)
            else:
                self._enqueue(waiting, dialogue)
        rows: list[DrawnDialogue] = []
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
                if self._turns.advance(dialogue):
                    self._enqueue(waiting, dialogue)
                else:
                    yield dialogue.response(self._sampling)

    def _enqueue(self, waiting: list[DrawnDialogue], dialogue: DrawnDialogue) -> None:
        self._turns.begin(dialogue)
        insort(waiting, dialogue, key=lambda other: len(other.ids))

    def _prefill(self, joining: list[DrawnDialogue], cache: TargetCache | None) -> TargetCache:
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

    def _decode(self, rows: list[DrawnDialogue], cache: TargetCache) -> None:
        """One more token for every row."""
        ids_B1 = torch.tensor([row.ids[-1:] for row in rows], device=self._target.device)
        ones = [1] * len(rows)
        with cpu_attention(self._target.model):
            output = cache.forward(ids_B1, ones, ())
        cache.keep(ones)
        self._draw(rows, output.last_hidden_BSH[:, -1])

    def _draw(self, rows: list[DrawnDialogue], last_hidden_BH: Tensor) -> None:
        logits_BV = self._target.logits(last_hidden_BH)
        if self._params.greedy:
            tokens_B = logits_BV.argmax(-1)
        else:
            uniforms_B = torch.stack([row.next_uniform() for row in rows]).to(logits_BV.device)
            tokens_B = sample(truncated_log_probs(logits_BV, self._params).exp(), uniforms_B)
        for row, token in zip(rows, tokens_B.tolist(), strict=True):
            row.commit(token, self._turns.end_ids)
        if self._on_tokens is not None:
            self._on_tokens(len(rows))


def _selected(cache: TargetCache | None, rows: list[int]) -> TargetCache | None:
    """The cache of some rows; None if there are none."""
    if cache is None or not rows:
        return None
    cache.select(rows)
    return cache
