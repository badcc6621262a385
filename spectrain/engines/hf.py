"""The embedded engine: the target in this process, run by transformers. No server, no network; one CPU or one GPU.

Answers come by continuous batching over the slot cache.

Decoding is bound by reading the weights, so sixteen rows cost little more than one, and the batch is kept full: a
conversation that is done leaves at once, and when a quarter of the rows is free, waiting ones are prefilled together
and join. Waiting conversations are taken by length, longest first, so that those prefilled together need little padding
and memory peaks early.

Every turn draws from random numbers of its own (``conversations.py``); a token is drawn by inverse transform from one
uniform. So an answer does not depend on its company, beyond what rounding does to the logits. A conversation of several
turns goes back to the queue after each answer.

Hidden states are captured of whole documents, laid end to end in one row, without padding; masks made from their
positions, which restart at 0, keep them apart. Hybrid targets run one document at a time, because a recurrent state
would flow from one document into the next.

The first batch is checked against the unmodified model before any of it is handed out (``check_states.py``).

Legend: B rows decoded together, T columns, H hidden, V vocabulary, S tokens of one document, T of all documents of a
batch, A taps.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

from spectrain import signals
from spectrain.config.schema import EngineConfig
from spectrain.data.chat import ChatTemplate
from spectrain.data.hidden_states import TargetStates
from spectrain.data.loss_mask import predicts_generated
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling, response_key
from spectrain.data.state_types import as_stored
from spectrain.data.stored_responses import longest_first
from spectrain.decoding.sampling import SamplingParams, sample, truncated_log_probs
from spectrain.engines.check_states import check_states
from spectrain.engines.conversations import Dialogue, Turns
from spectrain.target.cpu_kernels import cpu_attention
from spectrain.target.head import TargetHead
from spectrain.target.kv_cache import TargetCache, open_cache
from spectrain.target.model import TargetModel
from spectrain.target.resolve import ResolvedTarget
from spectrain.target.spec import end_token_ids


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
    """Answers conversations under one ``Sampling``.

    ``batch_size`` rows decode together; at most ``prefill_tokens`` (or one prompt) are prefilled at a time, which
    bounds memory. ``group`` conversations, in their order, share batches with one another alone.
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
        group: int,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self._target = target
        self._turns = Turns(DrawnDialogue, template, end_ids, sampling, max_length)
        self._sampling = sampling
        self._params = SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k)
        self._batch_size = batch_size
        self._prefill_tokens = prefill_tokens
        self._group = group
        self._on_tokens = on_tokens

    def answer(
        self, conversations: Sequence[tuple[Conversation, str]], key_of: Callable[[Conversation], str]
    ) -> Iterator[Response]:
        """Yields each response when it is done, group after group. All conversations are checked before
        (``Turns.check``); only those of a group are in memory as tokens.
        """
        self._turns.check(conversation for conversation, _ in conversations)
        return self._answers(conversations, key_of)

    def _answers(
        self, conversations: Sequence[tuple[Conversation, str]], key_of: Callable[[Conversation], str]
    ) -> Iterator[Response]:
        for first in range(0, len(conversations), self._group):
            group = conversations[first : first + self._group]
            keys = [key_of(conversation) for conversation, _ in group]
            yield from self._run_group(self._turns.prepare(group, keys, quiet=True))

    def _run_group(self, dialogues: Sequence[DrawnDialogue]) -> Iterator[Response]:
        waiting: list[DrawnDialogue] = []  # ascending by length: the longest is taken first, from the end
        for dialogue in dialogues:
            if dialogue.finish_reason == "imported":
                yield from dialogue.responses(self._sampling)
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
            with signals.held():  # what is finished reaches whoever keeps it
                for dialogue in finished:
                    if self._turns.advance(dialogue):
                        self._enqueue(waiting, dialogue)
                    else:
                        yield from dialogue.responses(self._sampling)

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


def capture_states(
    target: TargetModel,
    head: TargetHead,
    responses: Sequence[Response],
    tap_ids: tuple[int, ...],
    kv_layers: tuple[int, ...],
    batch_tokens: int,
    states_dtype: str,
    stored: Collection[str] = (),
) -> Iterator[TargetStates]:
    """Yields the hidden states of each response, the longest first: if memory does not suffice, that shows at once.

    Batches are those of all ``responses``; of what is ``stored`` nothing is yielded, and whole batches of it do not
    run. So a capture that goes on after an interruption computes every document in the company, and to the bit, that it
    would have had without.
    """
    capture = BatchCapture(target, head, tap_ids, kv_layers, states_dtype)
    for batch in capture_batches(target, responses, batch_tokens):
        if all(response.key in stored for response in batch):
            continue
        yield from (document for document in capture(batch) if document.key not in stored)


def capture_batches(target: TargetModel, responses: Sequence[Response], batch_tokens: int) -> Iterator[list[Response]]:
    """Which documents run together, the longest first: neighbours of ``batch_tokens`` at most; a longer document is a
    batch by itself, and so is any of a hybrid target.
    """
    batch_tokens = 1 if target.spec.hybrid else batch_tokens
    batch: list[Response] = []
    tokens = 0
    for response in longest_first(responses):
        if batch and tokens + len(response.input_ids) > batch_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(response)
        tokens += len(response.input_ids)
    if batch:
        yield batch


class BatchCapture:
    """The hidden states of batches of documents. Those of the first batch are compared with what the unmodified model
    computes (``check_states``).
    """

    def __init__(
        self,
        target: TargetModel,
        head: TargetHead,
        tap_ids: tuple[int, ...],
        kv_layers: tuple[int, ...],
        states_dtype: str,
    ) -> None:
        self._target = target
        self._head = head
        self._asked = (tap_ids, kv_layers, states_dtype)
        self._checked = False

    def __call__(self, batch: Sequence[Response]) -> list[TargetStates]:
        """Of documents that run together, in their order. Raises ``NotFiniteError``, and ``RunError`` where the check
        fails.
        """
        states = capture_batch(self._target, self._head, batch, *self._asked)
        if not self._checked:
            check_states(self._target, self._head, states)
            self._checked = True
        return states


def capture_batch(
    target: TargetModel,
    head: TargetHead,
    batch: Sequence[Response],
    tap_ids: tuple[int, ...],
    kv_layers: tuple[int, ...],
    states_dtype: str,
) -> list[TargetStates]:
    """The hidden states of documents that run together, in their order. Raises ``NotFiniteError``."""
    lengths = [len(response.input_ids) for response in batch]
    ids_T = torch.from_numpy(np.concatenate([response.input_ids for response in batch]))
    loss_mask_T = torch.from_numpy(np.concatenate([response.loss_mask for response in batch]))
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    ids_1T, positions_1T = ids_T[None].long().to(target.device), positions_T[None].to(target.device)
    with cpu_attention(target.model, lengths):
        mask = _masks(target, positions_1T) if len(batch) > 1 else None
        output = target.run(ids_1T, positions_1T, attention_mask=mask, tap_ids=tap_ids, kv_layers=kv_layers)
    target.require_finite(output.last_hidden_BSH, "last hidden states")
    if output.taps_BSAH is not None:
        target.require_finite(output.taps_BSAH, "taps")
    needed_T = torch.cat([predicts_generated(mask_S) for mask_S in loss_mask_T.split(lengths)])
    normalizer_T = stored_log_normalizer(head, output.last_hidden_BSH[0], needed_T, states_dtype)
    last_hidden_TH = output.last_hidden_BSH[0].cpu()
    taps_TAH = last_hidden_TH[:, None][:, :0] if output.taps_BSAH is None else output.taps_BSAH[0].cpu()
    # Rotary phases are those of positions within a document, so each document's keys are as it has them alone.
    kv = {
        layer: (keys[0].transpose(0, 1).cpu(), values[0].transpose(0, 1).cpu())
        for layer, (keys, values) in (output.target_kv or {}).items()
    }
    states, start = [], 0
    for response, length in zip(batch, lengths, strict=True):
        rows = slice(start, start + length)
        document = (ids_T[rows], loss_mask_T[rows], taps_TAH[rows], last_hidden_TH[rows], normalizer_T[rows])
        own_kv = {layer: (keys_TGd[rows], values_TGd[rows]) for layer, (keys_TGd, values_TGd) in kv.items()}
        states.append(TargetStates(*document, key=response.key, split=response.split, target_kv=own_kv))
        start += length
    return states


def _masks(target: TargetModel, positions_1T: Tensor) -> Any:
    """Masks [1, 1, T, T] that keep documents apart, one for each kind of layer; None for kernels that go by the
    positions themselves.

    Made here because some models of transformers (gpt-oss) do not look at the positions when they make their own.
    """
    config = target.model.config.get_text_config(decoder=True)
    like_embeddings = torch.empty(*positions_1T.shape, 0, dtype=target.dtype, device=target.device)
    masks = create_masks_for_generate(
        config, like_embeddings, attention_mask=None, past_key_values=None, position_ids=positions_1T
    )
    return next(iter(masks.values())) if isinstance(masks, dict) and len(masks) == 1 else masks


def stored_log_normalizer(head: TargetHead, last_hidden_TH: Tensor, needed_T: Tensor, states_dtype: str) -> Tensor:
    """Of the last hidden states as they will be stored, at the needed positions; NaN elsewhere."""
    normalizer_T = torch.full(needed_T.shape, torch.nan)
    needed_MH = as_stored(last_hidden_TH[needed_T.to(last_hidden_TH.device)], states_dtype)
    weight = head.lm_head_weight
    normalizer_T[needed_T] = head.log_normalizer(needed_MH.to(weight.device, weight.dtype)).cpu()
    return normalizer_T


# Batches that a group of conversations fills. A kill loses at most a group; between groups the batch runs empty, which
# costs about a twentieth of the time on a CPU.
_GROUP_BATCHES = 4


class HFEngine:
    """``Engine`` on a loaded target. ``max_length`` bounds prompt and answers together, in tokens
    (``target.max_length``).
    """

    def __init__(
        self,
        target: TargetModel,
        resolved: ResolvedTarget,
        config: EngineConfig,
        max_length: int,
        template: ChatTemplate | None = None,
    ) -> None:
        """``template``: the target's, where somebody has looked at prompts with it already."""
        self.target = target
        self.resolved = resolved
        self.config = config
        self.max_length = max_length
        self.end_ids = end_token_ids(target.tokenizer, target.generation_config)
        self.template = template or ChatTemplate(target.tokenizer, self.end_ids, target.spec.vocab_size)

    @property
    def stored_together(self) -> int:
        return _GROUP_BATCHES * self.config.batch_size

    def response_key(self, conversation: Conversation, sampling: Sampling) -> str:
        return response_key(conversation, sampling, self.resolved.id, self.resolved.revision, self.template.variables)

    def generate(
        self,
        conversations: Sequence[tuple[Conversation, str]],
        sampling: Sampling,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[Response]:
        limits = (self.max_length, self.config.batch_size, self.config.capture_tokens, self.stored_together)
        generator = ResponseGenerator(self.target, self.template, self.end_ids, sampling, *limits, on_tokens)
        return generator.answer(conversations, lambda conversation: self.response_key(conversation, sampling))

    def capture(
        self,
        responses: Sequence[Response],
        tap_ids: Sequence[int],
        states_dtype: str = "float32",
        stored: Collection[str] = (),
        kv_layers: Sequence[int] = (),
    ) -> Iterator[TargetStates]:
        # The trainer's head, not the model's: the log-normalizer must be that of the logits the trainer will compute.
        head = TargetHead.from_checkpoint(
            self.resolved.folder, torch.float32, self.target.device, self.target.has_own_code
        )
        most = self.config.capture_tokens
        asked = (tuple(tap_ids), tuple(kv_layers))
        return capture_states(self.target, head, responses, *asked, most, states_dtype, stored)
