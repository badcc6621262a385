"""Training and scoring of block drafters: many blocks of packed documents in one pass.

Work is proportional to what counts. Only real anchors make blocks; only slots that predict a generated token meet the
head; a teacher's distribution is made once for all blocks that reach its position. The bias of the plain Markov head
depends on the token before the predicted one, which is the teacher's own token: it, too, is made once per position
(``losses/students.py``), though DSpark's paper adds it slot by slot.

Losses: those of ``losses/`` for the distribution a slot drafts from. With a selector that distribution lives on a few
candidates; the base logits, which decide who is a candidate, are trained by the same terms beside it, with the same
weight. The confidence head learns 1 − TV(p, q), the probability that its slot is accepted at temperature 1, by
cross-entropy.

Slots weigh exp(−k / decay) (DFlash), or as D-PACE (arXiv:2605.18810, eq. 7 and 8) has it: Σ_{i ≥ k} Π_{l ≤ i} s_l,
where s = (1 − α) a + α is smoothed certainty. Without smoothing that is the derivative of the expected number of
accepted drafts by log a_k; with it, slots that are hardly ever reached yet are learnt, too. The paper's a is the
drafter's probability of the text's token, and its loss cross-entropy; ours is the slot's acceptance probability 1 − TV,
so that any loss can be weighed. Weights are relative: the mean divides by their sum.

Where blocks begin in training, and which of their slots count.

An anchor is a generated token whose successor was generated too: what a server drafts behind. Training draws some of
them afresh at each step, uniformly without replacement in every document; the simulation takes them all. The draw is
stateless in (seed, step, document), so neither packing, nor ranks, nor a resumed run changes it.

Draft k (from 0) behind anchor a predicts x_{a+1+k} and asks the teacher at a + k, whatever slot of the
block makes it. It counts while everything from the anchor to the predicted token was generated, without a gap, in one
document.

Legend: T tokens, R blocks, B slots of a block, J drafts of a block, S counted (block, draft) pairs, U teacher
positions, H hidden, r rank of the Markov head, N candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from spectrain.data.host_tokens import on_device
from spectrain.data.packing import PackedBatch
from spectrain.drafters.block.block_attention import BlockLayout, block_attention
from spectrain.drafters.losses import LossSums, StudentLoss, Students, candidate_loss, student_loss
from spectrain.drafters.losses.students import Bias, by_teacher, slot_sums

if TYPE_CHECKING:
    from spectrain.drafters.block.block_drafter import BlockDrafter


def tokens_ahead(batch: PackedBatch, most: int) -> Tensor:
    """int64 [T], on the host: how many generated tokens follow a generated token without a gap in its document, at
    most ``most``; 0 elsewhere.
    """
    host, t = batch.host, batch.num_tokens
    ahead_T = np.zeros(t, dtype=np.int64)
    going_T = host.loss_mask_T
    for k in range(1, min(most, t - 1) + 1):
        same = host.document_ids_T[: t - k] == host.document_ids_T[k:]
        going_T = going_T[: t - k] & host.loss_mask_T[k:] & same
        ahead_T[: t - k] += going_T
    return torch.from_numpy(ahead_T)


def all_anchors(batch: PackedBatch) -> Tensor:
    """Flat positions [R] of every anchor, ascending; on the host."""
    return torch.from_numpy(tokens_ahead(batch, 1).numpy().nonzero()[0])


def draw_anchors(batch: PackedBatch, per_row: int) -> Tensor:
    """Flat positions [R] of the anchors that this step trains, ascending; on the host. ``per_row`` are the
    anchors of a whole packed sequence, of which each document has a share by its length (one at least, and no more than
    it has). A batch without a draw (see ``PackedBatch``) trains all.
    """
    draw = batch.draw
    if draw is None:
        return all_anchors(batch)
    positions_R = all_anchors(batch).numpy()
    owners_R = batch.host.document_ids_T[positions_R]
    lengths = batch.lengths()
    bounds = np.searchsorted(owners_R, np.arange(len(lengths) + 1))
    chosen = []
    for index, (length, number) in enumerate(zip(lengths, draw.documents, strict=True)):
        there = int(bounds[index + 1] - bounds[index])
        share = max(1, round(per_row * length / draw.packed_length))
        if there <= share:
            chosen.append(np.arange(there) + bounds[index])
        else:
            rng = np.random.default_rng((draw.seed, draw.step, number))
            chosen.append(np.sort(rng.choice(there, share, replace=False)) + bounds[index])
    return torch.from_numpy(positions_R[np.concatenate(chosen)])


_CANDIDATE_BYTES = 64 << 20  # of the candidates' head rows, gathered at a time


def run_blocks(drafter: BlockDrafter, batch: PackedBatch, anchor_R: Tensor, num_drafts: int) -> Tensor:
    """Normed hidden states [R, J, H] of the slots that draft, in blocks of ``num_drafts`` drafts at the flat positions
    ``anchor_R``, which are on the host.
    """
    body, shape, device = drafter.body, drafter.shape, batch.input_ids_T.device
    slots = shape.slots(num_drafts)
    layout = BlockLayout.build(anchor_R, batch.host.document_ids_T, slots, shape.sliding_window, shape.causal, device)
    anchor_R = layout.anchor_R
    backend = drafter.attention_backend(batch)
    context_TH = body.fuse(batch.taps_TAH)
    cos_sin_T = drafter.rotary.cos_sin(batch.position_ids_T)

    def attend(index: int, q_RBNd: Tensor, k_RBGd: Tensor, v_RBGd: Tensor) -> Tensor:
        return block_attention(
            q_RBNd, k_RBGd, v_RBGd, *body.layers[index].context_kv(context_TH, cos_sin_T), layout, backend
        )

    slot_B = torch.arange(slots, device=anchor_R.device)
    cos_sin_RB = drafter.rotary.cos_sin(batch.position_ids_T[anchor_R][:, None] + slot_B)
    hidden_RBH = body(body.block_input(batch.input_ids_T[anchor_R], drafter.head, slots), cos_sin_RB, attend)
    return hidden_RBH[:, shape.first_slot :]


def previous_tokens(batch: PackedBatch, anchor_R: Tensor, num_drafts: int) -> Tensor:
    """[R, J]: the document's token before each predicted one, on the batch's device. Positions behind the batch's end
    repeat its last token: they never count.
    """
    anchor_R = on_device(anchor_R, batch.input_ids_T.device)
    draft_J = torch.arange(num_drafts, device=anchor_R.device)
    return batch.input_ids_T[(anchor_R[:, None] + draft_J).clamp(max=batch.num_tokens - 1)]


@dataclass
class Counted:
    """The (block, draft) pairs that count, in the order of their teachers."""

    block_S: Tensor
    draft_S: Tensor  # k: which draft of its block
    teacher_U: Tensor
    counts_U: Sequence[int]

    @classmethod
    def build(cls, batch: PackedBatch, anchor_R: Tensor, num_drafts: int) -> Counted:
        anchors, ahead_R = anchor_R.numpy(), tokens_ahead(batch, num_drafts).numpy()[anchor_R.numpy()]
        block_S, draft_S = (ahead_R[:, None] > np.arange(num_drafts)).nonzero()
        order_S, teacher_U, counts = by_teacher(anchors[block_S] + draft_S)
        device = batch.input_ids_T.device
        on_block_S, on_draft_S = (on_device(part[order_S], device) for part in (block_S, draft_S))
        return cls(on_block_S, on_draft_S, on_device(teacher_U, device), counts)

    def of_teachers(self, values_U: Tensor) -> Tensor:
        """[U, ...] -> [S, ...]."""
        teacher_S = np.repeat(np.arange(len(self.counts_U)), self.counts_U)
        return values_U[on_device(teacher_S, values_U.device)]

    def rows(self, values_RJ: Tensor) -> Tensor:
        """[R, J, ...] -> [S, ...]."""
        return values_RJ.flatten(0, 1).index_select(0, self.block_S * values_RJ.shape[1] + self.draft_S)


def block_losses(drafter: BlockDrafter, batch: PackedBatch) -> LossSums:
    """Losses of this step's blocks (``batch.draw``; all blocks without one), per draft of a block."""
    shape, block = drafter.shape, drafter.config.block
    anchor_R = draw_anchors(batch, block.anchors)
    if len(anchor_R) == 0:
        return _nothing(drafter)
    counted = Counted.build(batch, anchor_R, shape.num_drafts)
    hidden_RJH = run_blocks(drafter, batch, anchor_R, shape.num_drafts)
    prev_RJ = previous_tokens(batch, anchor_R, shape.num_drafts)
    students = Students(
        hidden_SH=counted.rows(hidden_RJH),
        weight_S=torch.exp(-counted.draft_S.to(torch.promote_types(hidden_RJH.dtype, torch.float32)) / block.decay),
        slot_S=counted.draft_S,
        counts_U=counted.counts_U,
        bias=_markov_bias(drafter, batch, counted, hidden_RJH, prev_RJ),
        candidates=0 if shape.selector is None else min(shape.selector.top_k, shape.draft_vocab_size),
    )
    prev_S = counted.rows(prev_RJ)
    if block.d_pace:
        with torch.no_grad():
            overlap_S = _distribution_losses(drafter, batch, counted, students, prev_S)[1]
        students = replace(students, weight_S=_d_pace(overlap_S, block.d_pace_smoothing, counted, hidden_RJH.shape[:2]))
    sums, overlap_S = _distribution_losses(drafter, batch, counted, students, prev_S)
    return _with_confidence(drafter, sums, students, prev_S, overlap_S)


def _nothing(drafter: BlockDrafter) -> LossSums:
    """No block in this batch. Every parameter must still have a gradient, or data-parallel ranks with text would wait
    for ever.
    """
    loss = torch.stack([p.sum() for p in drafter.parameters()]).sum() * 0.0
    zeros_K = torch.zeros(drafter.shape.num_drafts, device=loss.device)
    terms = {name: zeros_K.clone() for name in drafter.loss_terms}
    return LossSums(loss, loss.detach().clone(), terms, zeros_K.clone(), zeros_K.long())


def _markov_bias(
    drafter: BlockDrafter, batch: PackedBatch, counted: Counted, hidden_RJH: Tensor, prev_RJ: Tensor
) -> Bias | None:
    """W2 · s of the Markov head. The plain head's s depends on the previous token alone, and that is the teacher's."""
    markov = drafter.body.markov_head
    if markov is None:
        return None
    matrix_Dr = markov.markov_w2.weight
    if markov.shape.kind == "vanilla":
        return Bias(markov.embed(batch.input_ids_T[counted.teacher_U]), matrix_Dr, shared=True)
    return Bias(counted.rows(markov.states(markov.embed(prev_RJ), hidden_RJH)), matrix_Dr, shared=False)


def _distribution_losses(
    drafter: BlockDrafter, batch: PackedBatch, counted: Counted, students: Students, prev_S: Tensor
) -> tuple[LossSums, Tensor]:
    """Losses of the distribution that slots draft from, and its acceptance probabilities [S], detached."""
    target_U = batch.input_ids_T[counted.teacher_U + 1]
    loss, num_slots = drafter.loss, drafter.shape.num_drafts
    base = student_loss(
        students,
        drafter.lm_head_DH,
        drafter.teacher(batch, counted.teacher_U),
        drafter.target_to_draft_V[target_U],
        loss,
        num_slots,
    )
    if not students.candidates:
        return base.sums, base.overlap_S
    token_S = counted.of_teachers(target_U)
    chosen = base.candidates_SN == token_S[:, None]
    target_S = torch.where(chosen.any(-1), chosen.long().argmax(-1), -1)
    scores_SN = _candidate_scores(drafter, students, base, prev_S)
    sums, overlap_S = candidate_loss(scores_SN, base.candidate_q_SN, target_S, students, loss, num_slots)
    sums.loss = sums.loss + base.sums.loss
    return sums, overlap_S


def _candidate_scores(drafter: BlockDrafter, students: Students, base: StudentLoss, prev_S: Tensor) -> Tensor:
    """Scores of each student's candidates [S, N], differentiable; the gathered rows of the head are made again in
    backward.
    """
    selector, head_DH = drafter.body.candidate_selector, drafter.lm_head_DH
    assert selector is not None

    def scores(hidden_SH: Tensor, prev_S: Tensor, candidates_SN: Tensor) -> Tensor:
        base_SN = (head_DH[candidates_SN].to(hidden_SH.dtype) @ hidden_SH[..., None])[..., 0]
        return base_SN + selector.edges(selector.query(prev_S, hidden_SH), candidates_SN)

    rows = max(1, _CANDIDATE_BYTES // (4 * students.candidates * head_DH.shape[1]))
    parts = zip(students.hidden_SH.split(rows), prev_S.split(rows), base.candidates_SN.split(rows), strict=True)
    return torch.cat([checkpoint(scores, *part, use_reentrant=False) for part in parts])


def _with_confidence(
    drafter: BlockDrafter, sums: LossSums, students: Students, prev_S: Tensor, overlap_S: Tensor
) -> LossSums:
    """Adds the confidence head's cross-entropy against the acceptance probabilities."""
    body, options = drafter.body, drafter.config.dspark
    if body.confidence_head is None:
        return sums
    embedding_Sr = None if body.markov_head is None else body.markov_head.embed(prev_S)
    hidden_SH = students.hidden_SH
    if options.confidence_detach:
        hidden_SH, embedding_Sr = hidden_SH.detach(), None if embedding_Sr is None else embedding_Sr.detach()
    logits_S = body.confidence_logits(hidden_SH, embedding_Sr)
    assert logits_S is not None
    entropy_S = F.binary_cross_entropy_with_logits(
        logits_S, overlap_S.clamp(0.0, 1.0).to(logits_S.dtype), reduction="none"
    )
    sums.loss = sums.loss + options.confidence_weight * (entropy_S * students.weight_S).sum()
    sums.terms_K["confidence"] = slot_sums(entropy_S.detach(), students.slot_S, drafter.shape.num_drafts)
    return sums


def _d_pace(overlap_S: Tensor, smoothing: float, counted: Counted, shape_RJ: Sequence[int]) -> Tensor:
    """Weights [S]: Σ_{i ≥ k} Π_{l ≤ i} s_l over the counted drafts of the block. Never 0: that would say that a draft
    is not there.
    """
    smooth_RJ = overlap_S.new_zeros(*shape_RJ).index_put_(
        (counted.block_S, counted.draft_S), (1 - smoothing) * overlap_S + smoothing
    )
    survival_RJ = smooth_RJ.cumprod(-1)
    return counted.rows(survival_RJ.flip(-1).cumsum(-1).flip(-1)).clamp(min=torch.finfo(overlap_S.dtype).tiny)
