"""Light heads on top of a block: DSpark's Markov head, which fixes the order of the drafts, and its confidence head;
DFlash2's selector.

The base logits of all slots come from one parallel pass, so neighbouring slots may disagree about which continuation
they belong to. The Markov head adds, slot by slot, a bias of rank r that knows the token before:

    logits_j = lm_head · h_j + W2 · s_j,        e_j = W1[prev_j]

    vanilla  s_j = e_j
    gated    s_j = σ(G [h_j; e_j]) ⊙ e_j
    rnn      [g; c; o] = J [z_j; e_j; h_j],  z_{j+1} = σ(g) ⊙ z_j + (1 − σ(g)) ⊙ tanh(c),  s_j = tanh(o),  z of the
             first slot is 0

prev is the anchor for the first drafting slot, then the draft before (in training the document's own token), always an
id of the target's vocabulary. The confidence head estimates the probability that a slot is accepted, given that all
before it were: σ(w · [h_j; e_j] + b).

The selector prefers, among the k likeliest tokens of each slot, those that follow the token before:

    score(c | prev) = base logit of c + ⟨A[prev] ⊙ P h_j, S[c]⟩          A, S [V, r] codebooks, P [r, H]

Tokens outside the k candidates of a slot cannot be drafted, so a slot's distribution is the softmax of k scores.

DFlash2's dynamic convolution: each channel mixes the last k slots of its block, before and after attention and MLP.

The coefficient of tap i (i slots back) at a slot is ``base_kernel[side, i, channel]`` plus a part that depends on the
slot's own input, shared by ``group_size`` neighbouring channels. Side 0 is applied to what attention (or the MLP)
reads, side 1 to what it gives; both dynamic parts come from the input of side 0. Nothing crosses the beginning of a
block.

Legend: R blocks, B slots, J drafting slots, H hidden, r rank, D draft vocabulary, C = k candidates (in the convolution:
groups of channels), K taps of the kernel (tap 0 is the slot itself).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spectrain.drafters.block.block_shape import ConvShape, MarkovShape, SelectorShape
from spectrain.drafters.layers import VocabProjection

_INIT_STD = 0.02


class MarkovHead(nn.Module):
    """W1 [V, r] and W2 [D, r], and the projections of the gated and the rnn variant. ``markov_w2.weight`` maps ``s_j``
    to logits.
    """

    def __init__(self, shape: MarkovShape, hidden_size: int, target_vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.markov_w1 = nn.Embedding(target_vocab_size, shape.rank)
        self.markov_w2 = VocabProjection(shape.rank, draft_vocab_size, bias=False)
        if shape.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + shape.rank, shape.rank)
        elif shape.kind == "rnn":
            self.joint_proj = nn.Linear(2 * shape.rank + hidden_size, 3 * shape.rank)

    def embed(self, prev: Tensor) -> Tensor:
        """Target ids [...] -> e [..., r]."""
        return self.markov_w1(prev)

    def step(self, embedding_Rr: Tensor, hidden_RH: Tensor, carry_Rr: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot: (s [R, r], what the next slot takes as ``carry``). ``carry`` None: the first slot."""
        if self.shape.kind == "vanilla":
            return embedding_Rr, None
        hidden_RH = hidden_RH.to(embedding_Rr.dtype)
        if self.shape.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden_RH, embedding_Rr], -1))) * embedding_Rr, None
        carry_Rr = torch.zeros_like(embedding_Rr) if carry_Rr is None else carry_Rr
        gate, candidate, output = self.joint_proj(torch.cat([carry_Rr, embedding_Rr, hidden_RH], -1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * carry_Rr + (1 - gate) * torch.tanh(candidate)

    def states(self, embedding_RJr: Tensor, hidden_RJH: Tensor) -> Tensor:
        """Teacher forced: s [R, J, r] of all drafting slots at once. Only the rnn variant has to go slot by slot."""
        if self.shape.kind != "rnn":
            return self.step(embedding_RJr, hidden_RJH, None)[0]
        carry, states = None, []
        for embedding_Rr, hidden_RH in zip(embedding_RJr.unbind(1), hidden_RJH.unbind(1), strict=True):
            state, carry = self.step(embedding_Rr, hidden_RH, carry)
            states.append(state)
        return torch.stack(states, dim=1)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """N(0, 0.02): the product of two small factors, so that a fresh head changes next to nothing."""
        for weight in (self.markov_w1.weight, self.markov_w2.weight):
            weight.normal_(0.0, _INIT_STD, generator=generator)
        for name in ("gate_proj", "joint_proj"):
            if hasattr(self, name):
                getattr(self, name).weight.normal_(0.0, _INIT_STD, generator=generator)
                getattr(self, name).bias.zero_()


class ConfidenceHead(nn.Module):
    """A logistic regression on the slot's hidden state and, if asked for, the embedding of the token before it. Always
    in float32.
    """

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def logits(self, hidden: Tensor, embedding: Tensor | None) -> Tensor:
        """[..., H] and [..., r] (None: without Markov) -> [...], before the sigmoid."""
        x = hidden if embedding is None else torch.cat([hidden, embedding.to(hidden.dtype)], dim=-1)
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            return nn.functional.linear(x.to(wide), self.proj.weight.to(wide), self.proj.bias.to(wide))[..., 0]

    @torch.no_grad()
    def reset(self) -> None:
        """Says one half everywhere."""
        self.proj.weight.zero_()
        self.proj.bias.zero_()


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
        """Successors are zero, so a fresh selector changes nothing; predecessors are not, so successors have a
        gradient.
        """
        self.predecessor_codebook.normal_(0.0, 1.0, generator=generator)
        self.successor_codebook.zero_()
        self.hidden_projection.weight.normal_(0.0, _INIT_STD, generator=generator)


class GroupedConv(nn.Module):
    """Identity when fresh: base coefficient 1 on the slot itself, no dynamic part."""

    def __init__(self, shape: ConvShape, hidden_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.num_groups = hidden_size // shape.group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, shape.kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * shape.kernel_size * self.num_groups, bias=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def before(self, x_RBH: Tensor) -> tuple[Tensor, Tensor]:
        """(the input, mixed [R, B, H]; the dynamic coefficients [R, B, K, C] for ``after``)."""
        dynamic_RB2KC = self.kernel_projection(x_RBH).unflatten(-1, (2, self.shape.kernel_size, self.num_groups))
        return self._mix(x_RBH, dynamic_RB2KC[:, :, 0], 0), dynamic_RB2KC[:, :, 1]

    def after(self, x_RBH: Tensor, dynamic_RBKC: Tensor) -> Tensor:
        return self._mix(x_RBH, dynamic_RBKC, 1)

    def _mix(self, x_RBH: Tensor, dynamic_RBKC: Tensor, side: int) -> Tensor:
        groups = (self.num_groups, self.shape.group_size)
        x_RBCg = x_RBH.unflatten(-1, groups)
        base_KCg = self.base_kernel[side].unflatten(-1, groups)
        mixed_RBCg = (base_KCg[0] + dynamic_RBKC[:, :, 0, :, None]) * x_RBCg
        for tap in range(1, min(self.shape.kernel_size, x_RBH.shape[1])):
            term_RbCg = (base_KCg[tap] + dynamic_RBKC[:, tap:, tap, :, None]) * x_RBCg[:, :-tap]
            mixed_RBCg = mixed_RBCg + nn.functional.pad(term_RbCg, (0, 0, 0, 0, tap, 0))
        return mixed_RBCg.flatten(-2).to(x_RBH.dtype)
