"""Distillation losses from hidden states, without ever holding [tokens, vocabulary].

The head is the cost of a small drafter: 2·H·D operations per student against a few million for its layers, and several
students (one per autoregressive step, or per block that reaches the position) ask the same teacher. So work is ordered
by *teacher position*: for a chunk of positions the teacher's distribution is made once, all students of each position
are scored against it, and, because every loss here is a sum with known weights, the gradient is taken in the same pass.
Forward and backward together are three products per student (logits, d hidden, d weight); nothing is recomputed and
only one chunk of logits is alive. What follows the products goes through memory in tiles that a processor's cache
holds.

The terms themselves are in ``terms.py``, as a kernel for GPUs in ``triton_terms.py``, their plain version in
``reference.py``.

Legend: U teacher positions, S students (ragged: every teacher has at least one), K slots or steps, H hidden, D draft
vocabulary, r rank of a bias, N candidates, C teachers and R students of a chunk, c teachers of a tile with k students
each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectrain.drafters.losses.students import (
    Bias,
    LossSums,
    StudentLoss,
    Students,
    Teacher,
    loss_sums,
    rows_in_chunk,
    rows_of_size,
)
from spectrain.drafters.losses.terms import FUSED_TERMS, Outcome, TeacherProbs, terms_and_gradient
from spectrain.target.cpu_kernels import linear

TileTerms = Callable[[Tensor, TeacherProbs, Tensor, Tensor, dict[str, float], Outcome], Tensor]
_TILE_BYTES = 2 << 20  # of student logits on a CPU: a few times this must fit into a cache


def student_loss(
    students: Students,
    lm_head_DH: Tensor,
    teacher: Teacher,
    target_U: Tensor,
    loss_weights: dict[str, float],
    num_slots: int,
    in_triton: bool = False,
) -> StudentLoss:
    """Loss of any number of students per teacher position; arguments as in ``draft_loss``. ``num_slots``: K of the
    statistics. ``in_triton``: what follows the products is Triton's kernel.
    """
    bias = students.bias
    inputs = (students.hidden_SH, lm_head_DH, *((None, None) if bias is None else (bias.rows, bias.matrix_Dr)))
    if (
        not torch.is_grad_enabled()
    ):  # an autograd function would make gradients even then, which is two thirds of its work
        inputs = tuple(None if x is None else x.detach() for x in inputs)
    loss, terms_5S, *found = _DraftLoss.apply(*inputs, students, teacher, target_U, loss_weights, in_triton)
    sums = _sums(loss, terms_5S, students.weight_S, students.slot_S, loss_weights, num_slots)
    return StudentLoss(sums, *found)


def candidate_loss(
    scores_SN: Tensor,
    q_SN: Tensor,
    target_S: Tensor,
    students: Students,
    loss_weights: dict[str, float],
    num_slots: int,
) -> tuple[LossSums, Tensor]:
    """The same terms where a student's distribution is the softmax of the scores of N tokens of its own, which are its
    draft vocabulary.

    ``q_SN``: the target's true mass on them; ``target_S``: which of them is the document's token, -1: none. Returns
    sums and overlaps.
    """
    loss, terms_5S, overlap_S = _CandidateLoss.apply(scores_SN, q_SN, target_S, students.weight_S, loss_weights)
    return _sums(loss, terms_5S, students.weight_S, students.slot_S, loss_weights, num_slots), overlap_S


def _sums(
    loss: Tensor,
    terms_5S: Tensor,
    weight_S: Tensor,
    slot_S: Tensor,
    loss_weights: dict[str, float],
    num_slots: int,
) -> LossSums:
    terms = {name: terms_5S[index] for index, name in enumerate(FUSED_TERMS) if loss_weights.get(name)}
    return loss_sums(loss, terms, terms_5S[-1], weight_S, slot_S, num_slots)


class _DraftLoss(torch.autograd.Function):
    """Loss and its gradient in one pass over chunks of teacher positions."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        lm_head_DH: Tensor,
        bias_rows: Tensor | None,
        bias_Dr: Tensor | None,
        students: Students,
        teacher: Teacher,
        target_U: Tensor,
        loss_weights: dict[str, float],
        in_triton: bool,
    ) -> tuple[Tensor, ...]:
        device = hidden_SH.device.type
        # Under autocast the products run in its dtype, softmaxes and sums in float32.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_SH.dtype
        accumulate = torch.float64 if hidden_SH.dtype == torch.float64 else torch.float32
        terms, tile_dtype = _terms_of_tiles(in_triton, accumulate, dtype)
        inputs = (hidden_SH, lm_head_DH, bias_rows, bias_Dr)
        gradients = [
            torch.zeros(x.shape, dtype=dtype, device=x.device) if x is not None and need else None
            for x, need in zip(inputs, ctx.needs_input_grad, strict=False)
        ]
        with torch.autocast(device, enabled=False):
            products = _Products(*(None if x is None else x.detach().to(dtype) for x in inputs), *gradients)  # type: ignore[arg-type]
            loss = torch.zeros((), dtype=accumulate, device=hidden_SH.device)
            findings = _Findings(students, accumulate)
            for chunk in _chunks(students.counts_U, lm_head_DH):
                probs = TeacherProbs.of(
                    teacher.log_probs(chunk.teachers).to(accumulate).exp_(), bool(loss_weights.get("kl"))
                )
                logits_RD = products.logits(chunk.students, students.bias).to(tile_dtype)
                bias_CD = products.shared_bias(chunk.teachers, students.bias)
                target_C = target_U[chunk.teachers]
                for tile in chunk.tiles(lm_head_DH):
                    loss += _tile_loss(terms, logits_RD, bias_CD, probs, target_C, findings, chunk, tile, loss_weights)
                products.add_gradients(
                    chunk, logits_RD.to(dtype), None if bias_CD is None else bias_CD.to(dtype), students.bias
                )
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        outcome = findings.outcome
        found = (outcome.terms_5ck, outcome.overlap_ck, findings.candidates_SN, findings.candidate_q_SN)
        ctx.mark_non_differentiable(*found)
        return loss, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        out = [
            None if g is None else (g * d_loss).to(dtype)
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *out, None, None, None, None, None


@dataclass(frozen=True)
class _Tile:
    """Teachers of a chunk with ``k`` students each: ranges relative to the chunk."""

    teachers: slice
    students: slice
    k: int


@dataclass(frozen=True)
class _Chunk:
    teachers: slice
    students: slice
    counts_C: Sequence[int]

    def tiles(self, matrix_DH: Tensor) -> Iterator[_Tile]:
        """Runs of teachers with equally many students, small enough for a cache."""
        rows = rows_of_size(_TILE_BYTES, matrix_DH) if matrix_DH.device.type == "cpu" else sum(self.counts_C)
        teacher = student = 0
        for k, run in groupby(self.counts_C):
            left, step = len(list(run)), max(1, rows // max(k, 1))
            while left:
                c = min(step, left)
                yield _Tile(slice(teacher, teacher + c), slice(student, student + c * k), k)
                teacher, student, left = teacher + c, student + c * k, left - c


def _chunks(counts_U: Sequence[int], matrix_DH: Tensor) -> Iterator[_Chunk]:
    """Consecutive teachers whose students' logits stay below the limit (one teacher at least)."""
    most = rows_in_chunk(matrix_DH)
    teacher = student = 0
    while teacher < len(counts_U):
        end, rows = teacher, 0
        while end < len(counts_U) and (end == teacher or rows + counts_U[end] <= most):
            rows += counts_U[end]
            end += 1
        yield _Chunk(slice(teacher, end), slice(student, student + rows), counts_U[teacher:end])
        teacher, student = end, student + rows


@dataclass
class _Products:
    """The matrix products of a chunk, and where their gradients are gathered (None: not asked for)."""

    hidden_SH: Tensor
    matrix_DH: Tensor
    bias_rows: Tensor | None
    bias_Dr: Tensor | None
    d_hidden_SH: Tensor | None
    d_matrix_DH: Tensor | None
    d_bias_rows: Tensor | None
    d_bias_Dr: Tensor | None

    def logits(self, part: slice, bias: Bias | None) -> Tensor:
        """[R, D]; a bias that teachers share is still missing."""
        logits_RD = linear(self.hidden_SH[part], self.matrix_DH)
        if bias is not None and not bias.shared:
            assert self.bias_rows is not None and self.bias_Dr is not None
            logits_RD.addmm_(self.bias_rows[part], self.bias_Dr.T)
        return logits_RD

    def shared_bias(self, part: slice, bias: Bias | None) -> Tensor | None:
        """[C, D], overwritten later by the sum of its students' gradients."""
        if bias is None or not bias.shared:
            return None
        assert self.bias_rows is not None and self.bias_Dr is not None
        return linear(self.bias_rows[part], self.bias_Dr)

    def add_gradients(self, chunk: _Chunk, d_logits_RD: Tensor, d_bias_CD: Tensor | None, bias: Bias | None) -> None:
        if self.d_hidden_SH is not None:
            torch.mm(d_logits_RD, self.matrix_DH, out=self.d_hidden_SH[chunk.students])
        if self.d_matrix_DH is not None:
            self.d_matrix_DH.addmm_(d_logits_RD.T, self.hidden_SH[chunk.students])
        if bias is None:
            return
        assert self.bias_rows is not None and self.bias_Dr is not None
        part, d_rows = (chunk.teachers, d_bias_CD) if bias.shared else (chunk.students, d_logits_RD)
        assert d_rows is not None
        if self.d_bias_rows is not None:
            torch.mm(d_rows, self.bias_Dr, out=self.d_bias_rows[part])
        if self.d_bias_Dr is not None:
            self.d_bias_Dr.addmm_(d_rows.T, self.bias_rows[part])


class _Findings:
    """What is learnt about all students: their outcome as [5, S] and [S], their likeliest tokens [S, N] and the
    target's mass on those.
    """

    def __init__(self, students: Students, accumulate: torch.dtype) -> None:
        weight_S, n = students.weight_S, students.candidates
        self.weight_S = weight_S
        self.outcome = Outcome.empty(weight_S.shape, weight_S.new_empty(0, dtype=accumulate))
        self.candidates_SN = torch.zeros(len(weight_S), n, dtype=torch.long, device=weight_S.device)
        self.candidate_q_SN = torch.zeros(len(weight_S), n, dtype=accumulate, device=weight_S.device)

    def of(self, rows: slice, k: int) -> Outcome:
        """Views of some students' outcome, k of each teacher."""
        return Outcome(self.outcome.terms_5ck[:, rows].unflatten(1, (-1, k)), self.outcome.overlap_ck[rows].view(-1, k))

    def note_candidates(self, rows: slice, logits_ckD: Tensor, probs: TeacherProbs) -> None:
        n = self.candidates_SN.shape[1]
        if n:
            top_ckN = logits_ckD.topk(n, dim=-1).indices
            self.candidates_SN[rows] = top_ckN.flatten(0, 1)
            self.candidate_q_SN[rows] = probs.q_cD[:, None].expand_as(logits_ckD).gather(-1, top_ckN).flatten(0, 1)


def _terms_of_tiles(in_triton: bool, accumulate: torch.dtype, products: torch.dtype) -> tuple[TileTerms, torch.dtype]:
    """Who computes the terms, and the dtype of the logits that it reads: Triton's kernel converts as it reads."""
    if not in_triton:
        return terms_and_gradient, accumulate
    from spectrain.drafters.losses import triton_terms

    return triton_terms.terms_and_gradient, products


def _tile_loss(
    terms: TileTerms,
    logits_RD: Tensor,
    bias_CD: Tensor | None,
    probs: TeacherProbs,
    target_C: Tensor,
    findings: _Findings,
    chunk: _Chunk,
    tile: _Tile,
    loss_weights: dict[str, float],
) -> Tensor:
    """Weighted loss of one tile. Its logits are overwritten by their gradient, its shared bias by the sum of its
    students' gradients.
    """
    own = slice(chunk.students.start + tile.students.start, chunk.students.start + tile.students.stop)
    logits_ckD = logits_RD[tile.students].view(-1, tile.k, logits_RD.shape[-1])
    if bias_CD is not None:
        logits_ckD += bias_CD[tile.teachers, None]
    probs = probs[tile.teachers]
    findings.note_candidates(own, logits_ckD, probs)
    weight_ck = findings.weight_S[own].view(-1, tile.k)
    loss = terms(logits_ckD, probs, target_C[tile.teachers], weight_ck, loss_weights, findings.of(own, tile.k))
    if bias_CD is not None:
        bias_CD[tile.teachers] = logits_ckD.sum(1).to(bias_CD.dtype)
    return loss


class _CandidateLoss(torch.autograd.Function):
    """The terms over a handful of tokens of each student's own."""

    @staticmethod
    def forward(
        ctx: Any, scores_SN: Tensor, q_SN: Tensor, target_S: Tensor, weight_S: Tensor, loss_weights: dict[str, float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        work_S1N = scores_SN.detach().to(q_SN.dtype)[:, None].clone()
        outcome = Outcome.empty((len(q_SN), 1), q_SN)
        probs = TeacherProbs.of(q_SN, bool(loss_weights.get("kl")))
        loss = terms_and_gradient(work_S1N, probs, target_S, weight_S[:, None], loss_weights, outcome)
        ctx.save_for_backward(work_S1N[:, 0].to(scores_SN.dtype))
        terms_5S, overlap_S = outcome.terms_5ck[..., 0], outcome.overlap_ck[:, 0]
        ctx.mark_non_differentiable(terms_5S, overlap_S)
        return loss, terms_5S, overlap_S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * d_loss, None, None, None, None
