"""The loss terms of one position with their gradients, as the fused loss computes them; in plain torch they are in
``reference.py``.

With p the drafter's distribution over its D tokens, q the target's distribution (true mass, not renormalised to the
draft vocabulary), x* the document's own token, M = Σ_D q the mass inside the draft vocabulary:

    ce   −log p(x*)            gradient  p − onehot(x*)               (no term where x* is outside the draft vocabulary)
    kl   Σ_D q log(q/p)        gradient  M·p − q
    tv   1 − Σ_D min(p, q)     gradient  p·(Σ_D p·[p<q] − [p<q])      (1 − acceptance probability at temperature 1)
    lk   −log Σ_D min(p, q)    gradient  that of tv, divided by Σ_D min(p, q)

tv and lk are the acceptance objectives of speculative sampling (Leviathan et al. 2023, section 3; LK losses).

Legend: c teachers, k students each, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FUSED_TERMS = ("ce", "kl", "tv", "lk")
LEAST_OVERLAP = 1e-6


@dataclass
class TeacherProbs:
    """The teachers' distributions, as the terms read them. Sums over the draft vocabulary: Σ q log q and Σ q, made only
    for ``kl``.
    """

    q_cD: Tensor
    negative_entropy_c: Tensor | None = None
    mass_c: Tensor | None = None

    @classmethod
    def of(cls, q_cD: Tensor, with_kl: bool) -> TeacherProbs:
        return cls(q_cD, torch.special.xlogy(q_cD, q_cD).sum(-1), q_cD.sum(-1)) if with_kl else cls(q_cD)

    def __getitem__(self, part: slice) -> TeacherProbs:
        rest = (None if x is None else x[part] for x in (self.negative_entropy_c, self.mass_c))
        return TeacherProbs(self.q_cD[part], *rest)


@dataclass
class Outcome:
    """What is learnt about each student beside the loss: its terms in the order of ``FUSED_TERMS``, 1 where its argmax
    is the document's token (zero where its weight is zero), and Σ_D min(p, q)."""

    terms_5ck: Tensor
    overlap_ck: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...], like: Tensor) -> Outcome:
        return cls(like.new_zeros(len(FUSED_TERMS) + 1, *shape), like.new_zeros(shape))


def terms_and_gradient(
    logits_ckD: Tensor,
    probs: TeacherProbs,
    target_c: Tensor,
    weight_ck: Tensor,
    loss_weights: dict[str, float],
    outcome: Outcome,
) -> Tensor:
    """Weighted loss of k students for each of c teachers; ``target_c`` is x* as a draft id, -1 where it is outside.

    ``logits_ckD`` is overwritten by the gradient of the sum that is returned, ``outcome`` is filled in. Every gradient
    is ``p·(a − s·[p<q]) − c·q − e·onehot`` with a, s, c, e per student, so terms are summed as coefficients first.
    """
    ce_w, kl_w, tv_w, lk_w = (loss_weights.get(name, 0.0) for name in FUSED_TERMS)
    counted_ck = weight_ck > 0
    stats_5ck, overlap_ck, mass_c = outcome.terms_5ck, outcome.overlap_ck, probs.mass_c
    q_c1D = probs.q_cD[:, None]
    inside_c1 = (target_c >= 0)[:, None].to(logits_ckD.dtype)
    index_ck1 = target_c.clamp(min=0)[:, None].expand_as(weight_ck)[..., None]
    top_ck, best_ck = logits_ckD.max(-1)
    chosen_ck = logits_ckD.gather(-1, index_ck1)[..., 0] - top_ck
    mean_logit_ck = (
        (logits_ckD @ probs.q_cD[..., None])[..., 0] - mass_c[:, None] * top_ck if kl_w and mass_c is not None else None
    )
    p_ckD = torch.softmax(logits_ckD, -1)
    log_total_ck = -p_ckD.amax(-1).log()  # the likeliest token has probability 1 / Σ exp(logit − top)

    ce_ck = (log_total_ck - chosen_ck) * inside_c1
    stats_5ck[0] = ce_ck * counted_ck
    loss_ck, a_ck = ce_w * ce_ck, ce_w * inside_c1.expand_as(weight_ck)
    if mean_logit_ck is not None and mass_c is not None and probs.negative_entropy_c is not None:
        kl_ck = probs.negative_entropy_c[:, None] - mean_logit_ck + mass_c[:, None] * log_total_ck
        loss_ck, a_ck = loss_ck + kl_w * kl_ck, a_ck + kl_w * mass_c[:, None]
        stats_5ck[1] = kl_ck * counted_ck
    work_ckD = torch.minimum(p_ckD, q_c1D, out=logits_ckD)  # the logits are not needed any more
    overlap_ck.copy_(work_ckD.sum(-1))
    safe_ck = overlap_ck.clamp(min=LEAST_OVERLAP)
    stats_5ck[2] = (1 - overlap_ck) * counted_ck
    stats_5ck[3] = -safe_ck.log() * counted_ck
    stats_5ck[4] = (best_ck == target_c[:, None]) & counted_ck
    if tv_w or lk_w:
        loss_ck = loss_ck + tv_w * (1 - overlap_ck) - lk_w * safe_ck.log()
        slope_ck = tv_w + lk_w / safe_ck
        below_ckD = torch.lt(p_ckD, q_c1D, out=work_ckD)
        below_mass_ck = (below_ckD[:, :, None] @ p_ckD[..., None])[..., 0, 0]
        a_ck = a_ck + slope_ck * below_mass_ck
        work_ckD = below_ckD.mul_(-(slope_ck * weight_ck)[..., None].to(p_ckD.dtype)).add_(
            (a_ck * weight_ck)[..., None].to(p_ckD.dtype)
        )
        work_ckD *= p_ckD
    else:
        torch.mul(p_ckD, (a_ck * weight_ck)[..., None].to(p_ckD.dtype), out=work_ckD)
    if kl_w:
        work_ckD -= q_c1D * (kl_w * weight_ck)[..., None].to(p_ckD.dtype)
    if ce_w:
        work_ckD.scatter_add_(-1, index_ck1, (-ce_w * weight_ck * inside_c1)[..., None].to(p_ckD.dtype))
    return (loss_ck * weight_ck).sum()
