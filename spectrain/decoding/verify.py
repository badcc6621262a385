"""Accept or reject drafts so that the output keeps the target's law.

Speculative sampling (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, algorithm 1; Chen et al. 2023,
https://arxiv.org/abs/2302.01318): with p the drafter's law and q the target's, draft d is accepted with probability
min(1, q(d) / p(d)); the first rejected slot is drawn again from the residual (q - p)+, normalised; if no slot is rejected, a bonus token
comes from q at the position after the last draft. The output then has exactly the law q, whatever p is.

Greedy decoding is no special case: temperature 0 makes q one-hot, arg-max drafts make p one-hot, and the same rule becomes "accept while
the draft is the target's arg max". Everything here is a pure function of tensors; randomness enters as uniforms that the caller drew.

Legend: B batch, n draft tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.errors import ConfigError


@dataclass(frozen=True)
class Law:
    """How a token is drawn from logits: temperature first, then top-k, then top-p over what top-k left (as transformers and vLLM do)."""

    temperature: float = 0.0  # 0: greedy, the other two are then without effect
    top_p: float = 1.0
    top_k: int = 0  # 0: off

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature={self.temperature} must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must lie in (0, 1]")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be 0 (off) or more")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Law()


@dataclass(frozen=True)
class Verdict:
    """Outcome of one round. ``accepted`` [B]: leading drafts that stand; ``next_token`` [B]: the correction or the bonus after them."""

    accepted: Tensor
    next_token: Tensor


def truncated_log_probs(logits: Tensor, law: Law) -> Tensor:
    """Log-probabilities [..., V] of the sampling law: -inf outside what temperature, top-k and top-p leave, normalised over the rest.

    Computed in float32 (float64 stays float64). Tokens that tie with the last one kept are kept too, so that the law does not depend on the
    order in which a sort happens to leave equal logits.
    """
    if law.greedy:
        one_hot = torch.full_like(logits, float("-inf"), dtype=_work_dtype(logits))
        return one_hot.scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
    scaled = logits.to(_work_dtype(logits)) / law.temperature
    vocab_size = scaled.shape[-1]
    top_k = law.top_k if 0 < law.top_k < vocab_size else vocab_size
    if top_k < vocab_size or law.top_p < 1:
        largest = scaled.topk(top_k, dim=-1).values  # descending
        scaled.masked_fill_(scaled < largest[..., -1:], float("-inf"))
    if law.top_p < 1:
        # A token stays while the mass of the larger ones is below top_p; the largest always stays.
        probs = (largest - scaled.logsumexp(-1, keepdim=True)).exp_()
        kept = ((probs.cumsum(-1) - probs) < law.top_p).sum(-1, keepdim=True).clamp_(min=1)
        scaled.masked_fill_(scaled < largest.gather(-1, kept - 1), float("-inf"))
    return scaled.sub_(scaled.logsumexp(-1, keepdim=True))


def sample(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Token [B] drawn by inverse transform from unnormalised weights [B, V] with uniforms in [0, 1).

    The running sum is taken in float64: over 150,000 tokens float32 would shift probabilities by more than the smallest of them.
    A token of weight zero is never drawn. Rows must have some positive weight.
    """
    cumulative_BV = weights_BV.double().cumsum(-1)
    total_B = cumulative_BV[:, -1]
    threshold_B = torch.minimum(uniforms_B.to(total_B) * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return torch.searchsorted(cumulative_BV, threshold_B[:, None], right=True)[:, 0]


def verify(
    draft_ids_Bn: Tensor,
    draft_log_probs_BnV: Tensor | None,
    target_logits_BmV: Tensor,
    law: Law,
    uniforms_Bm: Tensor | None = None,
    lengths_B: Tensor | None = None,
) -> Verdict:
    """One round of accept, reject and resample.

    Args:
        draft_ids_Bn: the drafts d_1 … d_n.
        draft_log_probs_BnV: the law each draft was drawn from, normalised; ``None``: the drafts were chosen, not drawn (one-hot law).
        target_logits_BmV: m = n + 1 rows; row j is the target's prediction of slot j + 1 given the anchor and the drafts before.
        law: the target's sampling law.
        uniforms_Bm: n + 1 uniforms in [0, 1): the first to draw the next token by, then one per slot to accept by. Not needed when greedy.
        lengths_B: how many drafts each row has, when rows differ; slots beyond count as not drafted.

    Returns:
        Verdict with accepted [B] in 0 … n and next_token [B].
    """
    batch, n = draft_ids_Bn.shape
    device = target_logits_BmV.device
    if uniforms_Bm is None:
        if not law.greedy:
            raise ValueError("verify needs uniforms when the law is not greedy")
        uniforms_Bm = torch.zeros(batch, n + 1, device=device)  # with one-hot laws every uniform decides the same
    uniforms_Bm = uniforms_Bm.to(device)
    log_q_BmV = truncated_log_probs(target_logits_BmV, law)
    rows_B = torch.arange(batch, device=device)
    drafted_B = torch.full((batch,), n, device=device) if lengths_B is None else lengths_B.to(device)

    q_draft_Bn = log_q_BmV[:, :n].gather(-1, draft_ids_Bn[..., None])[..., 0].exp()
    # u < q / p, written without the division. Uniforms stay in their own precision: rounding to float32 could give u = 1.
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
        refused_B1 = draft_ids_Bn[rows_B, slot_B][:, None]
        residual_BV.scatter_(-1, refused_B1, 0.0)
    else:
        residual_BV.sub_(draft_log_probs_BnV[rows_B, slot_B].exp()).clamp_(min=0.0)
    # Where p equals q up to rounding, a rejection can leave an empty residual; the law of such a slot is q itself.
    use_residual_B = rejected_B & (residual_BV.sum(-1) > 0)
    weights_BV = torch.where(use_residual_B[:, None], residual_BV, q_BV)
    return Verdict(accepted_B, sample(weights_BV, uniforms_Bm[:, 0]))


def _work_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
