"""Losses of drafters: ``reference.py`` says what they are, ``fused.py`` computes them without all logits at once, with
``triton_terms.py`` as a GPU's kernel for a part of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.config.drafter_schema import LossConfig
from spectrain.drafters.losses import fused, reference
from spectrain.drafters.losses.students import LossSums, StudentLoss, Students, Teacher


def student_loss(
    students: Students, lm_head_DH: Tensor, teacher: Teacher, target_U: Tensor, loss: LossConfig, num_slots: int
) -> StudentLoss:
    """Loss of any number of students per teacher position.

    Args:
        lm_head_DH: the drafter's output matrix; its gradient is accumulated only where it requires one.
        teacher: the target's distributions at the U positions.
        target_U: the document's own next token as a *draft* id, -1 where it is outside the draft vocabulary.
        loss: the terms' coefficients, and the implementation.
        num_slots: K of the statistics.
    """
    if loss.implementation == "reference":
        return reference.student_loss(students, lm_head_DH, teacher, target_U, loss.weights, num_slots)
    return fused.student_loss(
        students, lm_head_DH, teacher, target_U, loss.weights, num_slots, in_triton=loss.implementation == "triton"
    )


def candidate_loss(
    scores_SN: Tensor, q_SN: Tensor, target_S: Tensor, students: Students, loss: LossConfig, num_slots: int
) -> tuple[LossSums, Tensor]:
    """The same terms where a student's distribution is the softmax of the scores of N tokens of its own, which are its
    draft vocabulary.

    ``q_SN``: the target's true mass on them; ``target_S``: which of them is the document's token, -1: none. Returns
    sums and overlaps.
    """
    implementation = reference if loss.implementation == "reference" else fused
    return implementation.candidate_loss(scores_SN, q_SN, target_S, students, loss.weights, num_slots)


def draft_loss(
    hidden_KUH: Tensor, lm_head_DH: Tensor, teacher: Teacher, target_U: Tensor, weight_KU: Tensor, loss: LossConfig
) -> LossSums:
    """Loss of K students per teacher position: student k of position u is the step-k prediction of the token after u.

    ``weight_KU``: weight of each student, 0 where there is none. The rest as in ``student_loss``.
    """
    k, u = weight_KU.shape
    students = Students(
        hidden_SH=hidden_KUH.transpose(0, 1).flatten(0, 1),
        weight_S=weight_KU.T.flatten(),
        slot_S=torch.arange(k, device=weight_KU.device).repeat(u),
        counts_U=[k] * u,
    )
    return student_loss(students, lm_head_DH, teacher, target_U, loss, k).sums
