"""Who is compared with whom in a loss, and what comes of it: teachers, their students, sums per draft slot.

Legend: U teacher positions, S students (ragged: every teacher has at least one), K slots or steps, H hidden, D draft
vocabulary, r rank of a bias, N candidates, C teachers of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spectrain.target.head import TargetHead

CHUNK_BYTES = 48 << 20  # of student logits on a CPU; the teacher's are at most as many again
_DEVICE_CHUNK_BYTES = 1 << 29  # elsewhere: products of a few hundred rows would leave an accelerator idle


@dataclass
class Teacher:
    """The target's distributions at U positions, as hidden states; distributions are made chunk by chunk."""

    head: TargetHead
    last_hidden_UH: Tensor
    log_normalizer_U: Tensor | None  # log Σ_V exp(logits); None: computed here over the whole vocabulary
    rows_DH: Tensor | None  # the target's lm_head rows of the draft vocabulary; None: all

    def log_probs(self, part: slice) -> Tensor:
        """log q restricted to the draft vocabulary, float32 [C, D]; its exponentials sum to the mass inside,
        not to 1.
        """
        hidden_CH = self.last_hidden_UH[part]
        rows_DH = self.head.lm_head_weight if self.rows_DH is None else self.rows_DH
        logits_CD = self.head.transform_logits(self.head.product(self.head.post_norm(hidden_CH), rows_DH))
        if self.log_normalizer_U is not None:
            log_normalizer_C = self.log_normalizer_U[part]
        else:
            log_normalizer_C = logits_CD.logsumexp(-1) if self.rows_DH is None else self.head.log_normalizer(hidden_CH)
        return logits_CD.sub_(log_normalizer_C[:, None])


@dataclass
class Bias:
    """Something of low rank that a sequential head adds to the logits: ``rows · matrixᵀ``.

    ``rows`` [U, r] where all students of a teacher share it (it depends on the token before the predicted one, and that
    is the teacher's), which spares most of its cost; else [S, r].
    """

    rows: Tensor
    matrix_Dr: Tensor
    shared: bool


@dataclass
class Students:
    """Predictions in the order of their teachers: those of one teacher follow one another, and so do
    teachers with equally many (not needed, but then tiles are large)."""

    hidden_SH: Tensor  # normed outputs of the drafter
    weight_S: Tensor  # weight in the loss; 0: not there
    slot_S: Tensor  # int64: the slot or step it belongs to in the statistics
    counts_U: Sequence[int]  # students of each teacher
    bias: Bias | None = None
    candidates: int = 0  # how many of each student's likeliest tokens to note, for a head that chooses among them


@dataclass
class LossSums:
    """Sums over positions, per step or slot: divide by ``count_K`` for means. Sums and counts add over micro-batches
    and ranks.
    """

    loss: Tensor  # scalar, differentiable: Σ weight · Σ_terms coefficient · term
    weight: Tensor  # scalar: Σ weight, the denominator of ``loss``
    terms_K: dict[str, Tensor]  # name -> unweighted sum of each term
    hits_K: Tensor  # argmax of the drafter is the document's own token
    count_K: Tensor

    def times(self, factor: int) -> LossSums:
        """With 0, what counts for nothing and still has gradients."""
        terms_K = {name: value * factor for name, value in self.terms_K.items()}
        return LossSums(self.loss * factor, self.weight * factor, terms_K, self.hits_K * factor, self.count_K * factor)


@dataclass
class StudentLoss:
    """``overlap_S``: Σ_D min(p, q) of every student, its acceptance probability at temperature 1. Only ``sums.loss``
    has a gradient.
    """

    sums: LossSums
    overlap_S: Tensor
    candidates_SN: Tensor
    candidate_q_SN: Tensor  # the target's probabilities of them


def by_teacher(teacher_S: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Order in which students (given by their teachers' positions) become ``Students``: (order [S], teacher positions
    [U], counts). On the host.

    Teachers with equally many students follow one another, those with most last; among those, and among the students of
    one teacher, the order stays.
    """
    teacher_U, count_U = np.unique(teacher_S, return_counts=True)
    rank_U = np.argsort(count_U, kind="stable")
    place_U = np.empty_like(rank_U)
    place_U[rank_U] = np.arange(len(rank_U))
    order_S = np.argsort(place_U[np.searchsorted(teacher_U, teacher_S)], kind="stable")
    return order_S, teacher_U[rank_U], count_U[rank_U].tolist()


def loss_sums(
    loss: Tensor, terms: dict[str, Tensor], hits_S: Tensor, weight_S: Tensor, slot_S: Tensor, num_slots: int
) -> LossSums:
    """``terms``: name -> unweighted value [S] of the terms that are asked for, 0 where a student's weight is."""
    return LossSums(
        loss=loss,
        weight=weight_S.sum(),
        terms_K={name: slot_sums(term_S, slot_S, num_slots) for name, term_S in terms.items()},
        hits_K=slot_sums(hits_S, slot_S, num_slots),
        count_K=slot_sums((weight_S > 0).long(), slot_S, num_slots),
    )


def slot_sums(value_S: Tensor, slot_S: Tensor, num_slots: int) -> Tensor:
    """[K]: sums of ``value_S`` per slot."""
    return value_S.new_zeros(num_slots).index_add_(0, slot_S, value_S)


def rows_in_chunk(matrix_DH: Tensor) -> int:
    """How many rows of logits are made at a time."""
    return rows_of_size(CHUNK_BYTES if matrix_DH.device.type == "cpu" else _DEVICE_CHUNK_BYTES, matrix_DH)


def rows_of_size(size: int, matrix_DH: Tensor) -> int:
    return max(1, size // (4 * len(matrix_DH)))
