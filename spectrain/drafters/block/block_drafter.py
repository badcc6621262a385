"""DFlash, DSpark and DFlash2 behind the interface of every drafter.

One pass of the backbone gives all slots; then drafts are chosen from left to right, because a Markov head or a selector
needs the token before. The distribution that is reported for a slot is the distribution its draft was drawn from, given
the drafts before it.

Drafting with a block drafter, as a server does it.

The cache holds keys and values of verified tokens, made from the target's taps; column number = position. A draft runs
a block behind them whose own keys are never kept, so drafting leaves no trace. Each round the cache grows by the
accepted tokens and their anchor.

Acceptance of every block of a text, for the simulation.

A slot is looked at only where all slots before it can be accepted: what follows a certain rejection is never seen by a
simulation, and at temperature 0 that is most of the slots. So the head, nearly all of the cost, runs on about as many
rows an anchor as a server gains tokens.

Legend: B rows, n drafts, T tokens, A taps, H hidden, D draft vocabulary, V target vocabulary, C or N candidates of the
selector, r rank, S slots of the block (in scores: blocks that are still alive), J slots that draft, N heads (in
attention), G key-value heads, d size of a head, R blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.data.packing import PackedBatch
from spectrain.data.vocab import DraftVocab
from spectrain.decoding.proposers import Observation, Proposal
from spectrain.decoding.sampling import SamplingParams, sample, truncated_log_probs
from spectrain.drafters.block.block_attention import own_block_mask
from spectrain.drafters.block.block_model import BlockBody
from spectrain.drafters.block.block_shape import BlockShape, blocks_together
from spectrain.drafters.block.block_training import all_anchors, previous_tokens, run_blocks, tokens_ahead
from spectrain.drafters.drafter import Advance, Batches, Drafter, DraftScores, KeyValueCache, draft_uniforms
from spectrain.drafters.layers import Rotary
from spectrain.drafters.losses import LossSums
from spectrain.drafters.teacher_forced import acceptance, target_log_probs
from spectrain.target.cpu_kernels import linear
from spectrain.target.families import at_least_float32
from spectrain.target.head import TargetHead


class BlockDrafter(Drafter):
    """``temperatures``: calibration of the confidence head, one a slot; empty: none."""

    has_closed_form = solves_together = True
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
        from spectrain.drafters.block.block_drafter import block_scores

        return block_scores(self, batch, num_tokens, sampling, draft_sampling)

    def new_cache(self, batch_size: int) -> KeyValueCache:
        return make_cache(self.body, batch_size)

    @torch.no_grad()
    def observe(self, cache: KeyValueCache, observation: Observation) -> None:
        observe_context(self.body, self.rotary, cache, observation)

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
        hidden_BnH = draft_block(self.body, self.rotary, self.head, cache, anchor_B, n)
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


def make_cache(body: BlockBody, batch_size: int) -> KeyValueCache:
    return KeyValueCache(body.shape.layer, body.shape.num_layers, batch_size, body.fc.weight)


def observe_context(body: BlockBody, rotary: Rotary, cache: KeyValueCache, observation: Observation) -> None:
    """Taps of verified tokens become context columns. Columns behind a row's length are scratch, overwritten by
    the next call.
    """
    taps_BTAH = observation.taps_BTAH
    if taps_BTAH is None:
        raise ValueError("a block drafter observes taps of the target")
    rows_B1 = torch.arange(len(taps_BTAH), device=taps_BTAH.device)[:, None]
    positions_BT = cache.columns_B[:, None] + torch.arange(taps_BTAH.shape[1], device=taps_BTAH.device)
    cache.reserve(int(positions_BT.max()) + 1)
    context_BTH, cos_sin = body.fuse(taps_BTAH), rotary.cos_sin(positions_BT)
    for layer, keys, values in zip(body.layers, cache.keys, cache.values, strict=True):
        keys[rows_B1, positions_BT], values[rows_B1, positions_BT] = layer.context_kv(context_BTH, cos_sin)
    cache.columns_B = cache.columns_B + observation.lengths_B


def draft_block(
    body: BlockBody, rotary: Rotary, head: TargetHead, cache: KeyValueCache, anchor_B: Tensor, num_drafts: int
) -> Tensor:
    """Normed hidden states [B, J, H] of the slots that draft ``num_drafts`` tokens behind the anchor."""
    shape = body.shape
    slots = shape.slots(num_drafts)
    positions_BS = cache.columns_B[:, None] + torch.arange(slots, device=anchor_B.device)
    end = int(cache.columns_B.max())
    own_SS = own_block_mask(slots, shape.sliding_window, shape.causal, anchor_B.device)
    context_BSK = _context_mask(shape, positions_BS, cache.columns_B, end)
    visible_B1SK = torch.cat([context_BSK, own_SS.expand(len(context_BSK), -1, -1)], dim=-1)[:, None]

    def attend(index: int, q_BSNd: Tensor, k_BSGd: Tensor, v_BSGd: Tensor) -> Tensor:
        k = torch.cat([cache.keys[index][:, :end], k_BSGd], dim=1).transpose(1, 2)
        v = torch.cat([cache.values[index][:, :end], v_BSGd], dim=1).transpose(1, 2)
        return F.scaled_dot_product_attention(
            q_BSNd.transpose(1, 2), k, v, attn_mask=visible_B1SK, enable_gqa=True
        ).transpose(1, 2)

    hidden_BSH = body(body.block_input(anchor_B, head, slots), rotary.cos_sin(positions_BS), attend)
    return hidden_BSH[:, shape.first_slot :]


def _context_mask(shape: BlockShape, positions_BS: Tensor, columns_B: Tensor, end: int) -> Tensor:
    """[B, S, end]: a slot sees the row's own columns, those inside the window if there is one."""
    column_K = torch.arange(end, device=columns_B.device)
    visible_BSK = (column_K < columns_B[:, None, None]).expand(-1, positions_BS.shape[1], -1)
    if shape.sliding_window is not None:
        visible_BSK = visible_BSK & (positions_BS[..., None] - column_K < shape.sliding_window)
    return visible_BSK


def block_scores(
    drafter: BlockDrafter, batch: PackedBatch, num_drafts: int, sampling: SamplingParams, draft_sampling: SamplingParams
) -> DraftScores:
    """Acceptance of all anchors' blocks of ``num_drafts`` drafts, as a server runs them when it is asked for
    so many. Blocks see nothing of each other, so they are run some at a time: memory does not grow with their number.
    """
    anchor_R = all_anchors(batch)
    device = batch.input_ids_T.device
    if len(anchor_R) == 0:
        return DraftScores(anchor_R, torch.zeros(0, num_drafts, device=device))
    ahead_T = tokens_ahead(batch, num_drafts)
    log_q_T = None if draft_sampling.greedy else _log_q(drafter, batch, anchor_R, ahead_T[anchor_R], sampling)
    accepted, confidences = [], []
    for some_R in anchor_R.split(blocks_together(drafter.shape.slots(num_drafts))):
        slots = _SlotLogits(drafter, batch, some_R, num_drafts)
        accepted.append(_accepted(drafter, batch, slots, some_R, ahead_T[some_R], log_q_T, draft_sampling))
        confidences.append(slots.confidence())
    said = [confidence_RJ for confidence_RJ in confidences if confidence_RJ is not None]
    return DraftScores(anchor_R.to(device), torch.cat(accepted), torch.cat(said) if said else None)


def _accepted(
    drafter: BlockDrafter,
    batch: PackedBatch,
    slots: _SlotLogits,
    anchor_R: Tensor,
    ahead_R: Tensor,
    log_q_T: Tensor | None,
    draft_sampling: SamplingParams,
) -> Tensor:
    """[R, J]: acceptance of these blocks' drafts."""
    num_drafts, device = slots.hidden_RJH.shape[1], batch.input_ids_T.device
    anchor_R, ahead_R = anchor_R.to(device), ahead_R.to(device)
    accept_RJ = torch.zeros(len(anchor_R), num_drafts, device=anchor_R.device)
    alive_S = torch.arange(len(anchor_R), device=anchor_R.device)
    for k in range(num_drafts):
        alive_S = alive_S[ahead_R[alive_S] > k]
        teacher_S = anchor_R[alive_S] + k
        accept_S = acceptance(
            partial(slots, alive_S, k),
            drafter.lm_head_DH,
            drafter.target_to_draft_V[batch.input_ids_T[teacher_S + 1]],
            None if log_q_T is None else log_q_T[teacher_S],
            draft_sampling,
        )
        accept_RJ[alive_S, k] = accept_S
        alive_S = alive_S[accept_S > 0]
    return accept_RJ


def _log_q(
    drafter: BlockDrafter, batch: PackedBatch, anchor_R: Tensor, ahead_R: Tensor, sampling: SamplingParams
) -> Tensor:
    """log q of the document's own token behind every position that some slot asks about, [T]; others hold 0."""
    asked_T = torch.zeros(batch.num_tokens, dtype=torch.bool)
    for k in range(int(ahead_R.max())):
        asked_T[anchor_R[ahead_R > k] + k] = True
    teacher_U = asked_T.nonzero()[:, 0].to(batch.input_ids_T.device)
    log_q_U = target_log_probs(drafter.teacher(batch, teacher_U), batch.input_ids_T[teacher_U + 1], sampling)
    return log_q_U.new_zeros(batch.num_tokens).index_copy_(0, teacher_U, log_q_U)


class _SlotLogits:
    """Logits [S, D] of draft k of some blocks, teacher forced; -inf where a selector leaves a token out."""

    def __init__(self, drafter: BlockDrafter, batch: PackedBatch, anchor_R: Tensor, num_drafts: int) -> None:
        self.body = drafter.body
        self.hidden_RJH = run_blocks(drafter, batch, anchor_R, num_drafts)
        self.prev_RJ = previous_tokens(batch, anchor_R, num_drafts)
        self.matrix_DH = drafter.lm_head_DH.to(self.hidden_RJH.dtype)
        markov = self.body.markov_head
        self.embedding_RJr = self.states_RJr = None
        if markov is not None:
            self.embedding_RJr = markov.embed(self.prev_RJ)
            self.states_RJr = markov.states(self.embedding_RJr, self.hidden_RJH)

    def confidence(self) -> Tensor | None:
        """What the confidence head says [R, J] before calibration, where there is one."""
        logits_RJ = self.body.confidence_logits(self.hidden_RJH, self.embedding_RJr)
        return None if logits_RJ is None else logits_RJ.sigmoid()

    def __call__(self, block_S: Tensor, k: int, part: slice) -> Tensor:
        block_S = block_S[part]
        hidden_SH = self.hidden_RJH[block_S, k]
        logits_SD = linear(hidden_SH, self.matrix_DH)
        if self.states_RJr is not None and self.body.markov_head is not None:
            logits_SD = logits_SD + self.body.markov_head.markov_w2(self.states_RJr[block_S, k])
        selector = self.body.candidate_selector
        if selector is None:
            return logits_SD
        top = logits_SD.topk(min(selector.shape.top_k, logits_SD.shape[1]), dim=-1)
        scores_SN = top.values + selector.edges(selector.query(self.prev_RJ[block_S, k], hidden_SH), top.indices)
        return torch.full_like(logits_SD, float("-inf")).scatter_(1, top.indices, scores_SN)
