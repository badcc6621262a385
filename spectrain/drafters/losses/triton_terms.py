"""``terms.terms_and_gradient`` as one Triton kernel, for GPUs (``drafter.loss.implementation=triton``).

In plain torch the terms go through a GPU's memory about 23 times, 4 bytes a logit each (30 times with kl), beside the
6·H operations of a logit's three products: by the data sheet of an MI300X (5.3 TB/s, 1,307 TFLOPS in bfloat16) 17 ps
beside 19 ps at H = 4096. Here a program takes one student's row, reads it three times (twice without tv and lk) in the
products' dtype and q as often, and writes the gradient over it once: 20 bytes a logit, fewer where students share q.

    1   the largest logit, Σ exp(logit − largest) rescaled as a larger one is met (Milakov & Gimelshein 2018, "Online
        normalizer calculation for softmax"), and Σ q·logit for kl
    2   Σ min(p, q) and Σ p·[p<q], which the gradients of tv and lk need before any of it can be written
    3   the gradient p·(a − s·[p<q]) − c·q − e·onehot, as in ``terms.py``

Sums are float32. Triton's interpreter runs it on a CPU where TRITON_INTERPRET=1 is set before Triton is imported: the
tests do that.

Legend: c teachers, k students each, D draft vocabulary, R rows (c·k), B logits of a row at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectrain.drafters.losses.terms import FUSED_TERMS, LEAST_OVERLAP, Outcome, TeacherProbs

_LEAST_OVERLAP = tl.constexpr(LEAST_OVERLAP)
_BLOCK = 4096  # logits at a time: 16 a thread and sum on wavefronts of 32, 8 on those of 64
_WARPS = 8


def terms_and_gradient(
    logits_ckD: Tensor,
    probs: TeacherProbs,
    target_c: Tensor,
    weight_ck: Tensor,
    loss_weights: dict[str, float],
    outcome: Outcome,
) -> Tensor:
    """As ``terms.terms_and_gradient``, for contiguous logits of any floating dtype; float32 inside."""
    c, k, d = logits_ckD.shape
    coefficients = [float(loss_weights.get(name, 0.0)) for name in FUSED_TERMS]
    found_7R = torch.empty(len(FUSED_TERMS) + 3, c * k, dtype=torch.float32, device=logits_ckD.device)
    of_kl_c = probs.mass_c is not None and probs.negative_entropy_c is not None
    _row[(c * k,)](
        logits_ckD,
        probs.q_cD.contiguous(),
        target_c.contiguous(),
        weight_ck.contiguous(),
        probs.negative_entropy_c.contiguous() if of_kl_c else found_7R,  # type: ignore[union-attr]
        probs.mass_c.contiguous() if of_kl_c else found_7R,  # type: ignore[union-attr]
        found_7R,
        c * k,
        d,
        k,
        *coefficients,
        HAS_KL=coefficients[1] > 0,
        HAS_OVERLAP=coefficients[2] > 0 or coefficients[3] > 0,
        BLOCK=min(_BLOCK, triton.next_power_of_2(d)),
        num_warps=_WARPS,
    )
    found_7ck = found_7R.view(-1, c, k)
    outcome.terms_5ck.copy_(found_7ck[:5])
    outcome.overlap_ck.copy_(found_7ck[5])
    return found_7R[6].sum()


@triton.jit
def _row(  # type: ignore[no-untyped-def]
    logits_ptr,
    q_ptr,
    target_ptr,
    weight_ptr,
    negative_entropy_ptr,
    mass_ptr,
    found_ptr,
    rows,
    d,
    k,
    ce_w,
    kl_w,
    tv_w,
    lk_w,
    HAS_KL: tl.constexpr,
    HAS_OVERLAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    teacher = row // k
    logits_ptr += row.to(tl.int64) * d
    q_ptr += teacher.to(tl.int64) * d
    target = tl.load(target_ptr + teacher)
    weight = tl.load(weight_ptr + row).to(tl.float32)
    lanes = tl.arange(0, BLOCK)

    top_B = tl.full([BLOCK], -3.0e38, tl.float32)  # not −inf: of two of them exp(a − b) is not a number
    total_B = tl.zeros([BLOCK], tl.float32)
    expected_B = tl.zeros([BLOCK], tl.float32)
    best_B = tl.zeros([BLOCK], tl.int32) + d
    for start in range(0, d, BLOCK):
        at_B = start + lanes
        x_B = tl.load(logits_ptr + at_B, mask=at_B < d, other=float("-inf")).to(tl.float32)
        larger_B = tl.maximum(top_B, x_B)
        total_B = total_B * tl.exp(top_B - larger_B) + tl.exp(x_B - larger_B)
        best_B = tl.where(x_B > top_B, at_B, best_B)
        top_B = larger_B
        if HAS_KL:
            q_B = tl.load(q_ptr + at_B, mask=at_B < d, other=0.0).to(tl.float32)
            expected_B += q_B * tl.where(at_B < d, x_B, 0.0)
    top = tl.max(top_B, 0)
    total = tl.sum(total_B * tl.exp(top_B - top), 0)
    best = tl.min(tl.where(top_B == top, best_B, d), 0)
    log_total = tl.log(total)

    inside = (target >= 0).to(tl.float32)
    chosen = tl.load(logits_ptr + tl.maximum(target, 0)).to(tl.float32) - top
    ce = (log_total - chosen) * inside
    loss = ce_w * ce
    a = ce_w * inside
    kl = 0.0
    if HAS_KL:
        mass = tl.load(mass_ptr + teacher).to(tl.float32)
        negative_entropy = tl.load(negative_entropy_ptr + teacher).to(tl.float32)
        kl = negative_entropy - (tl.sum(expected_B, 0) - mass * top) + mass * log_total
        loss += kl_w * kl
        a += kl_w * mass

    overlap_B = tl.zeros([BLOCK], tl.float32)
    slope = 0.0
    overlap = 0.0
    if HAS_OVERLAP:
        below_B = tl.zeros([BLOCK], tl.float32)
        for start in range(0, d, BLOCK):
            at_B = start + lanes
            x_B = tl.load(logits_ptr + at_B, mask=at_B < d, other=float("-inf")).to(tl.float32)
            q_B = tl.load(q_ptr + at_B, mask=at_B < d, other=0.0).to(tl.float32)
            p_B = tl.exp(x_B - top) / total
            overlap_B += tl.minimum(p_B, q_B)
            below_B += tl.where(p_B < q_B, p_B, 0.0)
        overlap = tl.sum(overlap_B, 0)
        safe = tl.maximum(overlap, _LEAST_OVERLAP)
        loss += tv_w * (1 - overlap) - lk_w * tl.log(safe)
        slope = tv_w + lk_w / safe
        a += slope * tl.sum(below_B, 0)

    for start in range(0, d, BLOCK):
        at_B = start + lanes
        x_B = tl.load(logits_ptr + at_B, mask=at_B < d, other=float("-inf")).to(tl.float32)
        q_B = tl.load(q_ptr + at_B, mask=at_B < d, other=0.0).to(tl.float32)
        p_B = tl.exp(x_B - top) / total
        if not HAS_OVERLAP:
            overlap_B += tl.minimum(p_B, q_B)
        d_B = p_B * (a - tl.where(p_B < q_B, slope, 0.0)) - kl_w * q_B - tl.where(at_B == target, ce_w, 0.0)
        tl.store(logits_ptr + at_B, (weight * d_B).to(logits_ptr.dtype.element_ty), mask=at_B < d)
    if not HAS_OVERLAP:
        overlap = tl.sum(overlap_B, 0)

    counted = (weight > 0).to(tl.float32)
    tl.store(found_ptr + row, ce * counted)
    tl.store(found_ptr + rows + row, kl * counted)
    tl.store(found_ptr + 2 * rows + row, (1 - overlap) * counted)
    tl.store(found_ptr + 3 * rows + row, -tl.log(tl.maximum(overlap, _LEAST_OVERLAP)) * counted)
    tl.store(found_ptr + 4 * rows + row, (best == target).to(tl.float32) * counted)
    tl.store(found_ptr + 5 * rows + row, overlap)
    tl.store(found_ptr + 6 * rows + row, loss * weight)
