"""Accept or reject drafts so that the output keeps the target's distribution.

Speculative sampling (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, algorithm 1; Chen et al. 2023,
https://arxiv.org/abs/2302.01318): with p the drafter's distribution and q the target's, draft d is accepted with
probability min(1, q(d) / p(d)); the first rejected slot is drawn again from the residual (q - p)+, normalised; if no
slot is rejected, a bonus token comes from q at the position after the last draft. The output then has exactly the
distribution q, whatever p is.

Greedy decoding is no special case: temperature 0 makes q one-hot, argmax drafts make p one-hot, and the same rule
becomes "accept while the draft is the target's argmax". Everything here is a pure function of tensors; randomness
enters as uniforms that the caller drew.

Legend: B batch, n draft tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.decoding.sampling import SamplingParams, sample, truncated_log_probs


@dataclass(frozen=True)
class Verdict:
    """Outcome of one round. ``accepted`` [B]: leading accepted drafts; ``next_token`` [B]: the correction or the bonus
    after them.
    """

    accepted: Tensor
    next_token: Tensor


def verify(
    draft_ids_Bn: Tensor,
    draft_log_probs_BnV: Tensor | None,
    target_logits_BmV: Tensor,
    sampling: SamplingParams,
    uniforms_Bm: Tensor | None = None,
    lengths_B: Tensor | None = None,
) -> Verdict:
    """One round of accept, reject and resample.

    Args:
        draft_ids_Bn: the drafts d_1 … d_n.
        draft_log_probs_BnV: the distribution each draft was drawn from, normalised; ``None``: the drafts were chosen,
            not drawn (one-hot distribution).
        target_logits_BmV: m = n + 1 rows; row j is the target's prediction of slot j + 1 given the anchor and the
            drafts before.
        sampling: what makes the target's distribution of these logits.
        uniforms_Bm: n + 1 uniforms in [0, 1): the first to draw the next token by, then one per slot to accept by. Not
            needed when greedy.
        lengths_B: how many drafts each row has, when rows differ; slots beyond count as not drafted.

    Returns:
        Verdict with accepted [B] in 0 … n and next_token [B].
    """
    batch, n = draft_ids_Bn.shape
    device = target_logits_BmV.device
    if uniforms_Bm is None:
        if not sampling.greedy:
            raise ValueError("verify needs uniforms when sampling is not greedy")
        # With one-hot distributions every uniform decides the same.
        uniforms_Bm = torch.zeros(batch, n + 1, device=device)
    uniforms_Bm = uniforms_Bm.to(device)
    log_q_BmV = truncated_log_probs(target_logits_BmV, sampling)
    rows_B = torch.arange(batch, device=device)
    drafted_B = torch.full((batch,), n, device=device) if lengths_B is None else lengths_B.to(device)

    q_draft_Bn = log_q_BmV[:, :n].gather(-1, draft_ids_Bn[..., None])[..., 0].exp()
    # u < q / p, written without the division. Uniforms keep their own precision: rounding to float32 could give u = 1.
    bar_Bn = uniforms_Bm[:, 1 : n + 1]
    if draft_log_probs_BnV is not None:
        bar_Bn = bar_Bn * draft_log_probs_BnV.gather(-1, draft_ids_Bn[..., None])[..., 0].exp()
    slots_n = torch.arange(n, device=device)
    accept_Bn = (bar_Bn < q_draft_Bn) & (slots_n < drafted_B[:, None])
    accepted_B = accept_Bn.long().cumprod(-1).sum(-1)

    # The only rows of the vocabulary that are needed in full: the one after the last accepted draft.
    q_BV = log_q_BmV[rows_B, accepted_B].exp()
    if n == 0:
        return Verdict(accepted_B, sample(q_BV, uniforms_Bm[:, 0]))
    rejected_B = accepted_B < drafted_B
    slot_B = accepted_B.clamp(max=n - 1)
    residual_BV = q_BV.clone()
    if draft_log_probs_BnV is None:
        rejected_id_B1 = draft_ids_Bn[rows_B, slot_B][:, None]
        residual_BV.scatter_(-1, rejected_id_B1, 0.0)
    else:
        residual_BV.sub_(draft_log_probs_BnV[rows_B, slot_B].exp()).clamp_(min=0.0)
    # Where p equals q up to rounding, a rejection can leave an empty residual; such a slot's distribution is q itself.
    use_residual_B = rejected_B & (residual_BV.sum(-1) > 0)
    weights_BV = torch.where(use_residual_B[:, None], residual_BV, q_BV)
    return Verdict(accepted_B, sample(weights_BV, uniforms_Bm[:, 0]))
