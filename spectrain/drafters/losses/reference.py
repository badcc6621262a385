"""The losses in plain torch: what each term is, without a trick. A new term is added here first and works at once.

With p the drafter's distribution over its D tokens, q the target's (true mass, not renormalised to the draft
vocabulary) and x* the document's own token:

    ce   −log p(x*)            no term where x* is outside the draft vocabulary
    kl   Σ_D q log(q/p)
    tv   1 − Σ_D min(p, q)     1 − the acceptance probability at temperature 1 (Leviathan et al. 2023, section 3)
    lk   −log Σ_D min(p, q)    the same, as a log-likelihood

``drafter.loss.implementation=reference`` trains with it. It holds all logits of a batch at once, [S, D], and lets
autograd keep them: 4·S·D bytes several times over, against one chunk in ``fused.py``. For checking, and for new terms.

Legend: U teacher positions, S students, D draft vocabulary, N candidates, K slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spectrain.drafters.losses.students import LossSums, StudentLoss, Students, Teacher, loss_sums
from spectrain.target.families import at_least_float32

_LEAST_OVERLAP = 1e-6

# (log p [S, D], q [S, D], x* as a draft id [S], -1 where it is outside) -> the term of each student [S]
Term = Callable[[Tensor, Tensor, Tensor], Tensor]


def ce(log_p_SD: Tensor, q_SD: Tensor, target_S: Tensor) -> Tensor:
    chosen_S = log_p_SD.gather(-1, target_S.clamp(min=0)[:, None])[:, 0]
    return torch.where(target_S >= 0, -chosen_S, 0.0)


def kl(log_p_SD: Tensor, q_SD: Tensor, target_S: Tensor) -> Tensor:
    return (torch.special.xlogy(q_SD, q_SD) - q_SD * log_p_SD).sum(-1)


def tv(log_p_SD: Tensor, q_SD: Tensor, target_S: Tensor) -> Tensor:
    return 1 - overlap(log_p_SD, q_SD)


def lk(log_p_SD: Tensor, q_SD: Tensor, target_S: Tensor) -> Tensor:
    return -overlap(log_p_SD, q_SD).clamp(min=_LEAST_OVERLAP).log()


def overlap(log_p_SD: Tensor, q_SD: Tensor) -> Tensor:
    """Σ_D min(p, q): the probability that a drawn draft is accepted at temperature 1."""
    return torch.minimum(log_p_SD.exp(), q_SD).sum(-1)


TERMS: dict[str, Term] = {"ce": ce, "kl": kl, "tv": tv, "lk": lk}


def student_loss(
    students: Students,
    lm_head_DH: Tensor,
    teacher: Teacher,
    target_U: Tensor,
    loss_weights: dict[str, float],
    num_slots: int,
) -> StudentLoss:
    """As ``fused.student_loss``."""
    counts_U = torch.tensor(list(students.counts_U), device=target_U.device)
    teacher_S = torch.arange(len(counts_U), device=target_U.device).repeat_interleave(counts_U)
    logits_SD = students.hidden_SH @ lm_head_DH.T.to(students.hidden_SH.dtype)
    if students.bias is not None:
        rows = students.bias.rows[teacher_S] if students.bias.shared else students.bias.rows
        logits_SD = logits_SD + rows @ students.bias.matrix_Dr.T
    log_p_SD = at_least_float32(logits_SD).log_softmax(-1)
    q_SD = teacher.log_probs(slice(None)).exp().to(log_p_SD.dtype)[teacher_S]
    sums, overlap_S = _weighted(log_p_SD, q_SD, target_U[teacher_S], students, loss_weights, num_slots)
    top_SN = logits_SD.detach().topk(students.candidates, dim=-1).indices
    return StudentLoss(sums, overlap_S, top_SN, q_SD.gather(-1, top_SN))


def candidate_loss(
    scores_SN: Tensor,
    q_SN: Tensor,
    target_S: Tensor,
    students: Students,
    loss_weights: dict[str, float],
    num_slots: int,
) -> tuple[LossSums, Tensor]:
    """As ``fused.candidate_loss``."""
    return _weighted(scores_SN.to(q_SN.dtype).log_softmax(-1), q_SN, target_S, students, loss_weights, num_slots)


def _weighted(
    log_p_SD: Tensor,
    q_SD: Tensor,
    target_S: Tensor,
    students: Students,
    loss_weights: dict[str, float],
    num_slots: int,
) -> tuple[LossSums, Tensor]:
    """Σ weight · Σ coefficient · term with its sums, and the overlaps [S]."""
    terms = {name: term(log_p_SD, q_SD, target_S) for name, term in TERMS.items() if loss_weights.get(name)}
    loss_S = sum((loss_weights[name] * term_S for name, term_S in terms.items()), torch.zeros_like(students.weight_S))
    counted_S = students.weight_S > 0
    shown = {name: term_S.detach() * counted_S for name, term_S in terms.items()}
    hits_S = ((log_p_SD.argmax(-1) == target_S) & counted_S).to(log_p_SD.dtype)
    loss = (loss_S * students.weight_S).sum()
    sums = loss_sums(loss, shown, hits_S, students.weight_S, students.slot_S, num_slots)
    return sums, overlap(log_p_SD, q_SD).detach()
