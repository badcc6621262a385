"""DFlash, DSpark and DFlash2 behind the interface of every drafter.

One pass of the backbone gives all slots; then drafts are chosen from left to right, because a Markov head or a selector
needs the token before. The distribution that is reported for a slot is the distribution its draft was drawn from, given
the drafts before it.

Legend: B rows, n drafts, T tokens, A taps, H hidden, D draft vocabulary, V target vocabulary, C candidates of the
selector, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.data.packing import PackedBatch
from spectrain.data.vocab import DraftVocab
from spectrain.decoding.proposers import Observation, Proposal
from spectrain.decoding.sampling import SamplingParams, sample, truncated_log_probs
from spectrain.drafters.block import block_decode as decode
from spectrain.drafters.block.block_model import BlockBody
from spectrain.drafters.block.block_shape import BlockShape
from spectrain.drafters.drafter import Advance, Batches, Drafter, DraftScores
from spectrain.drafters.drafter_cache import KeyValueCache, draft_uniforms
from spectrain.drafters.layers import Rotary
from spectrain.drafters.losses import LossSums
from spectrain.target.cpu_kernels import linear
from spectrain.target.families import at_least_float32


class BlockDrafter(Drafter):
    """``temperatures``: calibration of the confidence head, one a slot; empty: none."""

    has_closed_form = True
    shape: BlockShape
    body: BlockBody

    def __init__(self, shape: BlockShape, vocab: DraftVocab, config: DrafterConfig | None = None) -> None:
        super().__init__(shape, vocab, config)
        self.body = BlockBody(shape)
        self.rotary = Rotary(shape.layer)

    @property
    def method(self) -> str:
        return self.shape.method

    @property
    def training_steps(self) -> int:
        """Tokens that a whole block drafts; a shorter block drafts fewer, a longer one was never trained."""
        return self.shape.num_drafts

    @property
    def length_matters(self) -> bool:
        """In a bidirectional block every slot sees all others, and a server that is asked for fewer drafts runs a
        shorter block.
        """
        return not self.shape.causal

    @property
    def loss_terms(self) -> list[str]:
        return [*super().loss_terms, *(["confidence"] if self.shape.confidence else [])]

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Random layers; fresh heads change (next to) nothing."""
        super().reset(generator)
        self.body.reset_heads(generator)

    def closed_form_init(self, batches: Batches, advance: Advance = lambda percent: None) -> int:
        from spectrain.drafters.block.block_init import init_blocks

        return init_blocks(self, batches, advance)

    def train_losses(self, batch: PackedBatch) -> LossSums:
        from spectrain.drafters.block.block_training import block_losses

        return block_losses(self, batch)

    @torch.no_grad()
    def score(
        self, batch: PackedBatch, num_tokens: int, sampling: SamplingParams, draft_sampling: SamplingParams
    ) -> DraftScores:
        from spectrain.drafters.block.block_scores import block_scores

        return block_scores(self, batch, num_tokens, sampling, draft_sampling)

    def new_cache(self, batch_size: int) -> KeyValueCache:
        return decode.new_cache(self.body, batch_size)

    @torch.no_grad()
    def observe(self, cache: KeyValueCache, observation: Observation) -> None:
        decode.observe(self.body, self.rotary, cache, observation)

    @torch.no_grad()
    def propose(
        self,
        cache: KeyValueCache,
        anchor_B: Tensor,
        n: int,
        sampling: SamplingParams,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Proposal:
        if n > self.training_steps:
            raise ValueError(f"this drafter's blocks give {self.training_steps} drafts, {n} were asked for")
        hidden_BnH = decode.draft_block(self.body, self.rotary, self.head, cache, anchor_B, n)
        uniforms_Bn = None if sampling.greedy else draft_uniforms(generators, n, anchor_B)
        chooser = _DraftChooser(self, hidden_BnH, anchor_B, sampling)
        for slot in range(n):
            chooser.step(slot, None if uniforms_Bn is None else uniforms_Bn[:, slot])
        return Proposal(
            ids=torch.stack(chooser.ids, dim=1),
            log_probs=torch.stack(chooser.log_probs, dim=1) if chooser.log_probs else None,
            confidence=torch.stack(chooser.confidences, dim=1) if chooser.confidences else None,
        )

    def select(self, cache: KeyValueCache, rows: Tensor) -> KeyValueCache:
        cache.select(rows)
        return cache

    def calibrated(self, logits: Tensor, slot: int) -> Tensor:
        """Confidence logits of a slot -> probabilities, under the slot's temperature."""
        return (
            torch.sigmoid(logits / self.temperatures[slot]) if slot < len(self.temperatures) else torch.sigmoid(logits)
        )


@dataclass
class _Scores:
    """Logits of a slot: over the draft vocabulary, or over candidates of the selector. ``target_ids``: [D] or
    [B, C].
    """

    logits: Tensor
    target_ids: Tensor


class _DraftChooser:
    """Chooses the drafts of a block from left to right."""

    def __init__(self, drafter: BlockDrafter, hidden_BnH: Tensor, anchor_B: Tensor, sampling: SamplingParams) -> None:
        self.drafter = drafter
        self.body = drafter.body
        self.sampling = sampling
        self.hidden_BnH = hidden_BnH
        self.base_BnD = at_least_float32(linear(hidden_BnH, drafter.lm_head_DH.to(hidden_BnH.dtype)))
        self.prev_B = anchor_B
        self.carry_Br: Tensor | None = None  # what an rnn Markov head carries from slot to slot
        self.ids: list[Tensor] = []
        self.log_probs: list[Tensor] = []
        self.confidences: list[Tensor] = []

    def step(self, slot: int, uniform_B: Tensor | None) -> None:
        scores = self._scores(slot)
        if uniform_B is None:
            chosen_B = scores.logits.argmax(-1)
        else:
            log_p = truncated_log_probs(scores.logits, self.sampling)
            chosen_B = sample(log_p.exp(), uniform_B)
            full_BV = log_p.new_full((len(log_p), self.drafter.vocab.target_size), float("-inf"))
            self.log_probs.append(full_BV.scatter_(1, scores.target_ids.expand(len(log_p), -1), log_p))
        self.prev_B = scores.target_ids.expand(len(chosen_B), -1).gather(1, chosen_B[:, None])[:, 0]
        self.ids.append(self.prev_B)

    def _scores(self, slot: int) -> _Scores:
        """The slot's logits given the token before it; notes the confidence, which depends on that token too."""
        hidden_BH, logits_BD = self.hidden_BnH[:, slot], self.base_BnD[:, slot]
        embedding_Br = None
        if self.body.markov_head is not None:
            embedding_Br = self.body.markov_head.embed(self.prev_B)
            state_Br, self.carry_Br = self.body.markov_head.step(embedding_Br, hidden_BH, self.carry_Br)
            logits_BD = logits_BD + self.body.markov_head.markov_w2(state_Br)
        confidence_B = self.body.confidence_logits(hidden_BH, embedding_Br)
        if confidence_B is not None:
            self.confidences.append(self.drafter.calibrated(confidence_B, slot))
        selector = self.body.candidate_selector
        if selector is None:
            return _Scores(logits_BD, self.drafter.draft_ids_D)
        top = logits_BD.topk(min(selector.shape.top_k, logits_BD.shape[1]), dim=-1)
        edges_BC = selector.edges(selector.query(self.prev_B, hidden_BH), top.indices)
        return _Scores(top.values + edges_BC, top.indices)
