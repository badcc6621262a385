"""DFlash2's candidate selector: among the k likeliest tokens of each slot, prefer those that follow the token before.

    score(c | prev) = base logit of c + ⟨A[prev] ⊙ P h_j, S[c]⟩          A, S [V, r] codebooks, P [r, H]

Tokens outside the k candidates of a slot cannot be drafted, so the law of a slot is the softmax of k scores.

Legend: R blocks, J drafting slots, H hidden, r rank, C = k candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spectrain.drafters.block.shape import SelectorShape

_INIT_STD = 0.02


class CandidateSelector(nn.Module):
    """Full vocabulary only: candidates are ids of the target."""

    def __init__(self, shape: SelectorShape, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, shape.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, shape.rank))
        self.hidden_projection = nn.Linear(hidden_size, shape.rank, bias=False)

    def query(self, prev: Tensor, hidden: Tensor) -> Tensor:
        """A[prev] ⊙ P h: ids [...] and [..., H] -> [..., r]."""
        return self.predecessor_codebook[prev] * self.hidden_projection(hidden)

    def edges(self, query: Tensor, candidates_C: Tensor) -> Tensor:
        """What is added to the base logits of the candidates: [..., r] and ids [..., C] -> [..., C]."""
        return (self.successor_codebook[candidates_C] @ query[..., None])[..., 0]

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Successors are zero, so a fresh selector changes nothing; predecessors are not, so successors have a gradient."""
        self.predecessor_codebook.normal_(0.0, 1.0, generator=generator)
        self.successor_codebook.zero_()
        self.hidden_projection.weight.normal_(0.0, _INIT_STD, generator=generator)
