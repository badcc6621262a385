"""Drafting with a small model of its own: any causal language model that shares the target's tokenizer (Leviathan et
al. 2023, arXiv 2211.17192; vLLM's ``draft_model``).

The draft model reads the verified text, which its key/value cache holds, and goes on by itself for n tokens; what it
wrote is then taken out of the cache again.

Legend: B batch, T tokens, n drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectrain.decoding.proposers import Observation, Proposal
from spectrain.decoding.sampling import SamplingParams, sample, truncated_log_probs
from spectrain.errors import InputError
from spectrain.target.model import TargetModel
from spectrain.target.slot_cache import SlotCache


@dataclass
class _Texts:
    """A batch of texts: the draft model's cache, and of each row the verified tokens that it has not read yet."""

    cache: SlotCache
    unread: list[list[int]] = field(default_factory=list)


class DraftModelProposer:
    """Drafts by a language model. ``InputError`` for one with recurrent layers, or of another vocabulary."""

    taps: tuple[int, ...] = ()
    reads_last_hidden = False
    kv_layers: tuple[int, ...] = ()

    def __init__(self, model: TargetModel, vocab_size: int) -> None:
        if model.spec.hybrid:
            raise InputError(
                "decoding.draft_model has recurrent layers, from which drafts cannot be taken back: use another"
            )
        if model.spec.vocab_size < vocab_size:
            # Larger is padding: its extra tokens are never drafted.
            raise InputError(
                f"decoding.draft_model has a vocabulary of {model.spec.vocab_size} tokens, the target one of "
                f"{vocab_size}: use a model of the target's family"
            )
        self._model = model
        self._vocab_size = vocab_size

    def new_cache(self, batch_size: int) -> _Texts:
        return _Texts(SlotCache(self._model, batch_size), [[] for _ in range(batch_size)])

    def observe(self, cache: _Texts, observation: Observation) -> None:
        rows = zip(cache.unread, observation.ids_BT.tolist(), observation.lengths_B.tolist(), strict=True)
        for unread, ids, length in rows:
            unread.extend(ids[:length])

    def propose(
        self,
        cache: _Texts,
        anchor_B: Tensor,
        n: int,
        sampling: SamplingParams,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Proposal:
        read = [len(unread) for unread in cache.unread]
        logits_BV = self._run(cache, [[*unread, a] for unread, a in zip(cache.unread, anchor_B.tolist(), strict=True)])
        drafts, log_probs = [], []
        for step in range(n):
            if sampling.greedy:
                draft_B = logits_BV.argmax(-1)
            else:
                log_probs.append(truncated_log_probs(logits_BV, sampling))
                draft_B = sample(log_probs[-1].exp().cpu(), _uniforms(generators, len(read)))
            drafts.append(draft_B)
            if step < n - 1:
                logits_BV = self._run(cache, [[token] for token in draft_B.tolist()])
        # The anchor is observed with the next round's tokens; what was read before it stays.
        cache.cache.take_back([n] * len(read))
        for unread, count in zip(cache.unread, read, strict=True):
            del unread[:count]
        ids_Bn = torch.stack(drafts, dim=1).to(anchor_B.device)
        return Proposal(ids=ids_Bn, log_probs=torch.stack(log_probs, dim=1) if log_probs else None)

    def _run(self, cache: _Texts, tokens: list[list[int]]) -> Tensor:
        """Logits [B, V] after these further tokens of each row."""
        lengths = [len(row) for row in tokens]
        ids_BT = torch.zeros(len(tokens), max(lengths), dtype=torch.long)
        for ids, row in zip(ids_BT, tokens, strict=True):
            ids[: len(row)] = torch.tensor(row)
        output = cache.cache.forward(ids_BT.to(self._model.device), lengths, ())
        cache.cache.keep(lengths)
        last_BH = output.last_hidden_BSH[torch.arange(len(tokens)), torch.tensor(lengths) - 1]
        return self._model.logits(last_BH)[:, : self._vocab_size]

    def select(self, cache: _Texts, rows: Tensor) -> _Texts:
        kept = rows.tolist()
        cache.cache.select(kept)
        return _Texts(cache.cache, [cache.unread[row] for row in kept])


def _uniforms(generators: Sequence[torch.Generator] | None, rows: int) -> Tensor:
    if generators is None:
        raise ValueError("sampled drafts need a generator for each row")
    return torch.cat([torch.rand(1, generator=generators[row], dtype=torch.float64) for row in range(rows)])
