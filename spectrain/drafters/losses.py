"""Distillation losses from hidden states, without ever holding [tokens, vocabulary].

The head is the cost of a small drafter: 2·H·D operations per logit row against a few million for its layer, and three rows (one per
step) ask the same teacher. So work is ordered by *teacher position*: for a chunk of positions the teacher's law is made once, all K
students of that position are scored against it, and, because every loss here is a sum with known weights, the gradient is taken in
the same pass. Forward and backward together are three products per row (logits, d hidden, d weight); nothing is recomputed and only one
chunk of logits is alive.

With p the drafter's law over its D tokens, q the target's law (true mass, not renormalised to the draft vocabulary), x* the document's
own token, M = Σ_D q the mass inside the draft vocabulary:

    ce   −log p(x*)            gradient  p − onehot(x*)                     (no term where x* is outside the draft vocabulary)
    kl   Σ_D q log(q/p)        gradient  M·p − q
    tv   1 − Σ_D min(p, q)     gradient  p·(Σ_D p·[p<q] − [p<q])            (1 − acceptance probability at temperature 1)
    lk   −log Σ_D min(p, q)    gradient  that of tv, divided by Σ_D min(p, q)

tv and lk are the acceptance objectives of speculative sampling (Leviathan et al. 2023, section 3; LK losses).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectrain.config import LOSS_NAMES
from spectrain.target.cpu_linear import linear
from spectrain.target.head import TargetHead

CHUNK_BYTES = 24 << 20  # of student logits; a few times this is alive at once
_LEAST_OVERLAP = 1e-6


@dataclass
class Teacher:
    """The target's laws at U positions, as hidden states; laws are made chunk by chunk."""

    head: TargetHead
    last_hidden_UH: Tensor
    log_normalizer_U: Tensor | None  # log Σ_V exp(logits); None: computed here over the whole vocabulary
    rows_DH: Tensor | None  # the target's lm_head rows of the draft vocabulary; None: all

    def log_law(self, part: slice) -> Tensor:
        """log q restricted to the draft vocabulary, float32 [C, D]; its exponentials sum to the mass inside, not to 1."""
        hidden_CH = self.last_hidden_UH[part]
        rows_DH = self.head.lm_head_weight if self.rows_DH is None else self.rows_DH
        logits_CD = self.head.transform_logits(linear(self.head.post_norm(hidden_CH), rows_DH))
        if self.log_normalizer_U is not None:
            log_normalizer_C = self.log_normalizer_U[part]
        else:
            log_normalizer_C = logits_CD.logsumexp(-1) if self.rows_DH is None else self.head.log_normalizer(hidden_CH)
        return logits_CD.sub_(log_normalizer_C[:, None])


@dataclass
class LossSums:
    """Sums over positions, per step: divide by ``count_K`` for means. Sums and counts add over micro-batches and ranks."""

    loss: Tensor  # scalar, differentiable: Σ weight · Σ_terms coefficient · term
    weight: Tensor  # scalar: Σ weight, the denominator of ``loss``
    terms_K: dict[str, Tensor]  # name -> unweighted sum of each term
    hits_K: Tensor  # arg max of the drafter is the document's own token
    count_K: Tensor


def draft_loss(
    hidden_KUH: Tensor,
    lm_head_DH: Tensor,
    teacher: Teacher,
    target_U: Tensor,
    weight_KU: Tensor,
    loss_weights: dict[str, float],
) -> LossSums:
    """Loss of K students per teacher position.

    Args:
        hidden_KUH: normed drafter outputs; student k of position u is the step-k prediction of the token after u.
        lm_head_DH: the drafter's output matrix; its gradient is accumulated only where it requires one.
        teacher: the target's laws at the U positions.
        target_U: the document's own next token as a *draft* id, -1 where it is outside the draft vocabulary.
        weight_KU: weight of each student, 0 where there is none.
        loss_weights: coefficients of ``ce``, ``kl``, ``tv``, ``lk``.
    """
    loss, stats_K = _DraftLoss.apply(hidden_KUH, lm_head_DH, teacher, target_U, weight_KU, loss_weights)
    return LossSums(
        loss=loss,
        weight=weight_KU.sum(),
        terms_K={name: stats_K[i] for i, name in enumerate(LOSS_NAMES) if loss_weights.get(name)},
        hits_K=stats_K[4],
        count_K=(weight_KU > 0).sum(-1),
    )


class _DraftLoss(torch.autograd.Function):
    """Loss and its gradient in one pass over chunks of teacher positions."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KUH: Tensor,
        lm_head_DH: Tensor,
        teacher: Teacher,
        target_U: Tensor,
        weight_KU: Tensor,
        loss_weights: dict[str, float],
    ) -> tuple[Tensor, Tensor]:
        k, u, h = hidden_KUH.shape
        d = lm_head_DH.shape[0]
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        # Under autocast the three products run in its dtype, softmaxes and sums in float32.
        device = hidden_KUH.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_KUH.dtype
        matrix_DH = lm_head_DH.detach().to(dtype)
        accumulate = torch.float64 if hidden_KUH.dtype == torch.float64 else torch.float32
        d_hidden_KUH = torch.zeros(hidden_KUH.shape, dtype=dtype, device=hidden_KUH.device) if need_hidden else None
        d_matrix_DH = torch.zeros(lm_head_DH.shape, dtype=dtype, device=lm_head_DH.device) if need_weight else None
        loss = torch.zeros((), dtype=accumulate, device=hidden_KUH.device)
        stats_K = torch.zeros(5, k, dtype=accumulate, device=hidden_KUH.device)
        chunk = max(1, CHUNK_BYTES // (4 * k * d))
        with torch.autocast(device, enabled=False):
            for start in range(0, u, chunk):
                part = slice(start, min(start + chunk, u))
                hidden_CH = hidden_KUH[:, part].detach().to(dtype).reshape(-1, h)
                logits_KCD = linear(hidden_CH, matrix_DH).to(accumulate).view(k, -1, d)
                log_q_CD = teacher.log_law(part).to(accumulate)
                loss += _chunk_loss(logits_KCD, log_q_CD, target_U[part], weight_KU[:, part], loss_weights, stats_K)
                d_logits = logits_KCD.view(-1, d).to(dtype)
                if d_hidden_KUH is not None:
                    d_hidden_KUH[:, part] = (d_logits @ matrix_DH).view(k, -1, h)
                if d_matrix_DH is not None:
                    torch.addmm(d_matrix_DH, d_logits.T, hidden_CH, out=d_matrix_DH)
        ctx.save_for_backward(*(g for g in (d_hidden_KUH, d_matrix_DH) if g is not None))
        ctx.needs = (need_hidden, need_weight)
        ctx.dtypes = (hidden_KUH.dtype, lm_head_DH.dtype)
        ctx.mark_non_differentiable(stats_K)
        return loss, stats_K

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = iter(ctx.saved_tensors)
        out = [(next(gradients) * d_loss).to(dtype) if need else None for need, dtype in zip(ctx.needs, ctx.dtypes, strict=True)]
        return out[0], out[1], None, None, None, None


def _chunk_loss(
    logits_KCD: Tensor, log_q_CD: Tensor, target_C: Tensor, weight_KC: Tensor, loss_weights: dict[str, float], stats_K: Tensor
) -> Tensor:
    """Weighted loss of one chunk. ``logits_KCD`` is overwritten by its own gradient, ``stats_K`` [5, K] is added to.

    Every gradient is ``a·p − b·p·[p<q] − c·q − e·onehot`` with a, b, c, e per row, so terms are summed as coefficients first.
    """
    ce_w, kl_w, tv_w, lk_w = (loss_weights.get(name, 0.0) for name in LOSS_NAMES)
    counted_KC = weight_KC > 0
    top_KC, best_KC = logits_KCD.max(-1)
    inside_C = target_C >= 0
    index_KC1 = target_C.clamp(min=0).expand(len(weight_KC), -1)[..., None]
    logits_KCD -= top_KC[..., None]
    chosen_KC = logits_KCD.gather(-1, index_KC1)[..., 0]
    mean_logit_KC = (logits_KCD * log_q_CD.exp()).sum(-1) if kl_w else None
    p_KCD = logits_KCD.exp_()
    total_KC = p_KCD.sum(-1)
    p_KCD /= total_KC[..., None]
    log_total_KC = total_KC.log()

    loss_KC = torch.zeros_like(total_KC)
    a_KC = torch.zeros_like(total_KC)
    ce_KC = torch.where(inside_C, log_total_KC - chosen_KC, 0.0)
    if ce_w:
        loss_KC += ce_w * ce_KC
        a_KC += ce_w * inside_C
        stats_K[0] += (ce_KC * counted_KC).sum(-1)
    q_CD = log_q_CD.exp()
    if kl_w:
        mass_C = q_CD.sum(-1)
        assert mean_logit_KC is not None
        kl_KC = torch.special.xlogy(q_CD, q_CD).sum(-1) - (mean_logit_KC - mass_C * log_total_KC)
        loss_KC += kl_w * kl_KC
        a_KC += kl_w * mass_C
        stats_K[1] += (kl_KC * counted_KC).sum(-1)
    if tv_w or lk_w:
        below_KCD = p_KCD < q_CD
        below_mass_KC = (p_KCD * below_KCD).sum(-1)
        overlap_KC = torch.minimum(p_KCD, q_CD).sum(-1)
        safe_KC = overlap_KC.clamp(min=_LEAST_OVERLAP)
        loss_KC += tv_w * (1 - overlap_KC) - lk_w * safe_KC.log()
        slope_KC = tv_w + lk_w / safe_KC
        a_KC += slope_KC * below_mass_KC
        stats_K[2] += ((1 - overlap_KC) * counted_KC).sum(-1)
        stats_K[3] -= (safe_KC.log() * counted_KC).sum(-1)
        # p·(a − slope·[p<q]) in place
        factor_KCD = below_KCD.to(p_KCD.dtype).mul_(-(slope_KC * weight_KC)[..., None]).add_((a_KC * weight_KC)[..., None])
        p_KCD *= factor_KCD
    else:
        p_KCD *= (a_KC * weight_KC)[..., None]
    if kl_w:
        p_KCD -= q_CD * (kl_w * weight_KC)[..., None]
    if ce_w:
        p_KCD.scatter_add_(-1, index_KC1, (-ce_w * weight_KC * inside_C)[..., None].to(p_KCD.dtype))
    stats_K[4] += ((best_KC == target_C) & counted_KC).sum(-1)
    return (loss_KC * weight_KC).sum()
