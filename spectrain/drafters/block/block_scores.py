"""Acceptance of every block of a text, for the simulation.

A slot is looked at only where all slots before it can be accepted: what follows a certain rejection is never seen by a
simulation, and at temperature 0 that is most of the slots. So the head, nearly all of the cost, runs on about as many
rows an anchor as a server gains tokens.

Legend: R blocks, J drafts of a block, S blocks that are still alive, H hidden, D draft vocabulary, N candidates.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectrain.data.packing import PackedBatch
from spectrain.decoding.sampling import SamplingParams
from spectrain.drafters.block.anchors import all_anchors, tokens_ahead
from spectrain.drafters.block.block_training import previous_tokens, run_blocks
from spectrain.drafters.drafter import DraftScores
from spectrain.drafters.teacher_forced import acceptance, target_log_probs
from spectrain.target.cpu_kernels import linear

if TYPE_CHECKING:
    from spectrain.drafters.block.block_drafter import BlockDrafter


def block_scores(
    drafter: BlockDrafter, batch: PackedBatch, num_drafts: int, sampling: SamplingParams, draft_sampling: SamplingParams
) -> DraftScores:
    """Acceptance of all anchors' blocks of ``num_drafts`` drafts, as a server runs them when it is asked for
    so many.
    """
    anchor_R = all_anchors(batch)
    accept_RJ = torch.zeros(len(anchor_R), num_drafts, device=anchor_R.device)
    if len(anchor_R) == 0:
        return DraftScores(anchor_R, accept_RJ)
    ahead_R = tokens_ahead(batch, num_drafts)[anchor_R]
    slots = _SlotLogits(drafter, batch, anchor_R, num_drafts)
    log_q_T = None if draft_sampling.greedy else _log_q(drafter, batch, anchor_R, ahead_R, sampling)
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
    return DraftScores(anchor_R, accept_RJ, slots.confidence())


def _log_q(
    drafter: BlockDrafter, batch: PackedBatch, anchor_R: Tensor, ahead_R: Tensor, sampling: SamplingParams
) -> Tensor:
    """log q of the document's own token behind every position that some slot asks about, [T]; others hold 0."""
    asked_T = torch.zeros(batch.num_tokens, dtype=torch.bool, device=anchor_R.device)
    for k in range(int(ahead_R.max())):
        asked_T[anchor_R[ahead_R > k] + k] = True
    teacher_U = asked_T.nonzero()[:, 0]
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
