"""The distribution that a token is drawn from: temperature, top-k and top-p, as transformers and vLLM apply them, and
the draw itself.

Legend: B batch, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn from logits: temperature first, then top-k, then top-p over what top-k left (as transformers
    and vLLM do).
    """

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


GREEDY = SamplingParams()


def truncated_log_probs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Log-probabilities [..., V] of the sampling distribution: -inf outside what temperature, top-k and top-p leave,
    normalised over the rest.

    Computed in float32 (float64 stays float64). Tokens that tie with the last one kept are kept too, so that the
    distribution does not depend on the order in which a sort happens to leave equal logits.
    """
    if sampling.greedy:
        one_hot = torch.full_like(logits, float("-inf"), dtype=_work_dtype(logits))
        return one_hot.scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
    scaled = logits.to(_work_dtype(logits)) / sampling.temperature
    vocab_size = scaled.shape[-1]
    top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else vocab_size
    if top_k < vocab_size or sampling.top_p < 1:
        largest = scaled.topk(top_k, dim=-1).values  # descending
        scaled.masked_fill_(scaled < largest[..., -1:], float("-inf"))
    if sampling.top_p < 1:
        # A token stays while the mass of the larger ones is below top_p; the largest always stays.
        probs = (largest - scaled.logsumexp(-1, keepdim=True)).exp_()
        kept = ((probs.cumsum(-1) - probs) < sampling.top_p).sum(-1, keepdim=True).clamp_(min=1)
        scaled.masked_fill_(scaled < largest.gather(-1, kept - 1), float("-inf"))
    return scaled.sub_(scaled.logsumexp(-1, keepdim=True))


def sample(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Token [B] drawn by inverse transform from unnormalised weights [B, V] with uniforms in [0, 1).

    The running sum is taken in float64: over 150,000 tokens float32 would shift probabilities by more than the smallest
    of them. A token of weight zero is never drawn. Rows must have some positive weight.
    """
    cumulative_BV = weights_BV.double().cumsum(-1)
    total_B = cumulative_BV[:, -1]
    threshold_B = torch.minimum(uniforms_B.to(total_B) * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return torch.searchsorted(cumulative_BV, threshold_B[:, None], right=True)[:, 0]


def _work_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
