"""Independent reference implementations of the drafter and its losses: float64, written from the definitions, without
caches, masks or batching.

Nothing here imports the package. ``Eagle3Reference`` drafts as a server does (vLLM's llama_eagle3 model), token by
token, recomputing everything at each step; ``brute_force_loss`` is a loop over (document, column, step). Gradients come
from autograd through the naive formulas.

Legend: S tokens of a document, A taps, H hidden, V target vocabulary, D draft vocabulary, N heads, d head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def turn(x_Nd: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding as complex numbers: coordinate i and i + d/2 are one number, turned by position · theta^(-2i/d).

    Angles, sines and cosines have the precision of float32, as in a server: the rest of the arithmetic can then be
    compared exactly.
    """
    half = x_Nd.shape[-1] // 2
    angles = position * (1 / theta ** (torch.arange(half, dtype=torch.float32) / half))
    turned = torch.complex(x_Nd[..., :half], x_Nd[..., half:]) * torch.complex(
        angles.cos().double(), angles.sin().double()
    )
    return torch.cat([turned.real, turned.imag], dim=-1)


@dataclass(frozen=True)
class HeadReference:
    """The two ends of the target. Gain and soft-cap are the numbers that act, not as a family stores them; embeddings
    are plain rows, without a family's scale, since that is what a server lends to a drafter."""

    embed_VH: Tensor
    gain_H: Tensor
    lm_head_VH: Tensor
    eps: float
    soft_cap: float | None = None

    def logits(self, last_hidden_H: Tensor) -> Tensor:
        raw = self.lm_head_VH @ rms_norm(last_hidden_H, self.gain_H, self.eps)
        return raw if self.soft_cap is None else self.soft_cap * torch.tanh(raw / self.soft_cap)

    def sampling(self, last_hidden_H: Tensor) -> Tensor:
        return torch.softmax(self.logits(last_hidden_H), -1)


@dataclass(frozen=True)
class Eagle3Reference:
    """EAGLE-3 and P-EAGLE from their checkpoints: tensors by their names there, and the switches of config.json."""

    tensors: dict[str, Tensor]
    head: HeadReference
    draft_ids: list[int]  # target id of each draft id
    num_layers: int
    num_taps: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    theta: float
    eps: float
    qk_norm: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    window: int | None = None  # positions that a column sees, its own included
    mask_token: int | None = None  # P-EAGLE: what a draft takes in behind its first column, with ``mask_hidden``

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.eps)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    @property
    def lm_head_DH(self) -> Tensor:
        return self.tensors.get("lm_head.weight", self.head.lm_head_VH)

    def feature(self, taps_AH: Tensor) -> Tensor:
        parts = list(taps_AH)
        if self.norm_before_fc:
            parts = list(self.norm("input_norm", torch.cat(parts)).view(taps_AH.shape))
        if self.fc_norm:
            parts = [self.norm(f"fc_norm.{a}", part) for a, part in enumerate(parts)]
        return self.linear("fc", torch.cat(parts))

    def outputs(self, features: list[Tensor], tokens: list[int]) -> list[Tensor]:
        """Residual stream after all layers at columns 0, 1, …; column c holds ``features[c]`` and ``tokens[c]`` and
        sits at position c.
        """
        streams = features
        for index in range(self.num_layers):
            streams = self._layer(f"layers.{index}", index == 0, streams, tokens)
        return streams

    def _layer(self, name: str, first: bool, streams: list[Tensor], tokens: list[int]) -> list[Tensor]:
        residuals, inputs = [], []
        for stream, token in zip(streams, tokens, strict=True):
            if first:
                normed = self.norm(f"{name}.hidden_norm", stream)
                embedding = self.norm(f"{name}.input_layernorm", self.head.embed_VH[token])
                inputs.append(torch.cat([embedding, normed]))
                residuals.append(normed if self.norm_before_residual else stream)
            else:
                inputs.append(self.norm(f"{name}.input_layernorm", stream))
                residuals.append(stream)
        attended = self._attention(f"{name}.self_attn", inputs)
        result = []
        for residual, heads in zip(residuals, attended, strict=True):
            middle = residual + self.linear(f"{name}.self_attn.o_proj", heads)
            x = self.norm(f"{name}.post_attention_layernorm", middle)
            gate = self.linear(f"{name}.mlp.gate_proj", x)
            up = self.linear(f"{name}.mlp.up_proj", x)
            result.append(middle + self.linear(f"{name}.mlp.down_proj", gate / (1 + torch.exp(-gate)) * up))
        return result

    def _attention(self, name: str, inputs: list[Tensor]) -> list[Tensor]:
        queries, keys, values = [], [], []
        for position, x in enumerate(inputs):
            q = self.linear(f"{name}.q_proj", x).view(self.num_heads, self.head_dim)
            k = self.linear(f"{name}.k_proj", x).view(self.num_kv_heads, self.head_dim)
            if self.qk_norm:
                q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
            queries.append(turn(q, position, self.theta))
            keys.append(turn(k, position, self.theta))
            values.append(self.linear(f"{name}.v_proj", x).view(self.num_kv_heads, self.head_dim))
        share = self.num_heads // self.num_kv_heads
        result = []
        for position, q in enumerate(queries):
            heads = []
            seen = slice(0 if self.window is None else max(0, position + 1 - self.window), position + 1)
            for n in range(self.num_heads):
                seen_k = torch.stack([k[n // share] for k in keys[seen]])
                seen_v = torch.stack([v[n // share] for v in values[seen]])
                heads.append(torch.softmax(seen_k @ q[n] / math.sqrt(self.head_dim), 0) @ seen_v)
            result.append(torch.cat(heads))
        return result

    def chain(self, text: list[int], taps_SAH: Tensor, steps: int, drafts: list[int] | None = None) -> DraftChain:
        """Draft ``steps`` tokens behind ``text``, of which the last token is the anchor and has no taps yet.

        ``drafts``: tokens that are fed back instead of the drafter's own argmax (teacher forcing). P-EAGLE is fed
        neither token nor output.
        """
        features = [self.feature(taps_AH) for taps_AH in taps_SAH[: len(text) - 1]]
        tokens, chain = list(text[1:]), DraftChain()
        for step in range(steps):
            output = self.outputs(features, tokens)[-1]
            normed = self.norm("norm", output)
            logits = self.lm_head_DH @ normed
            chain.normed.append(normed)
            chain.logits.append(logits)
            chain.tokens.append(self.draft_ids[int(logits.argmax())])
            if self.mask_token is not None:
                features.append(self.feature(self.tensors["mask_hidden"].view(self.num_taps, -1)))
                tokens.append(self.mask_token)
                continue
            features.append(normed if self.norm_output else output)
            tokens.append(chain.tokens[-1] if drafts is None or step >= len(drafts) else drafts[step])
        return chain


@dataclass
class DraftChain:
    """One draft, step by step: normed output [H], logits over the draft vocabulary [D], argmax as a target id."""

    normed: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def counts(mask: list[int], t: int, k: int) -> bool:
    """Step k of column t trains iff its token x_{t+1} and the token x_{t+2+k} it predicts were both generated."""
    return t + 2 + k < len(mask) and mask[t + 1] == 1 and mask[t + 2 + k] == 1


@dataclass
class LossTerms:
    """The terms of one student. ``None``: the term does not exist for it."""

    ce: Tensor | None
    kl: Tensor
    tv: Tensor
    lk: Tensor
    hit: bool


def loss_terms(logits_D: Tensor, draft_ids: list[int], q_V: Tensor, token: int) -> LossTerms:
    """Every loss by its definition over the whole target vocabulary: the drafter's distribution is zero outside its
    own.
    """
    log_p_D = torch.log_softmax(logits_D, -1)
    p_V = torch.zeros_like(q_V).index_put((torch.tensor(draft_ids),), log_p_D.exp())
    overlap = torch.minimum(p_V, q_V).sum()
    inside = token in draft_ids
    return LossTerms(
        ce=-log_p_D[draft_ids.index(token)] if inside else None,
        kl=sum((q_V[v] * (q_V[v].log() - log_p_D[i]) for i, v in enumerate(draft_ids)), torch.zeros(())),
        tv=(p_V - q_V).abs().sum() / 2,
        lk=-overlap.log(),
        hit=draft_ids[int(logits_D.argmax())] == token,
    )


@dataclass
class BruteForce:
    """Sums of the double loop; per step in lists of K."""

    loss: Tensor
    weight: float
    terms: dict[str, list[float]]
    hits: list[int]
    count: list[int]


@dataclass(frozen=True)
class PlainDocument:
    """One document as plain values."""

    ids: list[int]
    mask: list[int]
    taps_SAH: Tensor
    last_hidden_SH: Tensor


def brute_force_loss(
    reference: Eagle3Reference, documents: list[PlainDocument], steps: int, weights: dict[str, float], step_decay: float
) -> BruteForce:
    """Σ over documents, columns and steps of decay^k · Σ_terms coefficient · term, and what goes with it."""
    total = BruteForce(
        torch.zeros((), dtype=torch.float64), 0.0, {name: [0.0] * steps for name in weights}, [0] * steps, [0] * steps
    )
    for document in documents:
        distributions = [reference.head.sampling(y_H) for y_H in document.last_hidden_SH]
        for t in range(len(document.ids)):
            counted = [k for k in range(steps) if counts(document.mask, t, k)]
            if not counted:
                continue
            chain = reference.chain(
                document.ids[: t + 2], document.taps_SAH, counted[-1] + 1, drafts=document.ids[t + 2 :]
            )
            for k in counted:
                # Column t, step k has taken in x_{t+1+k} and predicts x_{t+2+k}, as the target does at position t + 1 +
                # k.
                terms = loss_terms(
                    chain.logits[k], reference.draft_ids, distributions[t + 1 + k], document.ids[t + 2 + k]
                )
                total.weight += step_decay**k
                total.count[k] += 1
                total.hits[k] += terms.hit
                for name, coefficient in weights.items():
                    term = getattr(terms, name)
                    if term is not None:
                        total.loss = total.loss + step_decay**k * coefficient * term
                        total.terms[name][k] += float(term.detach())
    return total
