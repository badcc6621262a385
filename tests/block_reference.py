"""An independent reference implementation of the block drafters: float64, one block at a time, from the definitions
(vLLM's qwen3_dflash, qwen3_dflash2 and qwen3_dspark models), without caches, masks or batching. Nothing here imports
the package.

Legend: S tokens of a document, A taps, H hidden, V target vocabulary, D draft vocabulary, d head size, r rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from reference import HeadReference, rms_norm, turn
from torch import Tensor


@dataclass
class BlockDraft:
    """One draft, slot by slot (the slots that draft): hidden [H], base logits [D], the distribution over the target's
    vocabulary [V], the token (argmax of the distribution, or as forced), and the confidence."""

    hidden: list[Tensor] = field(default_factory=list)
    base: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class BlockReference:
    """A block drafter from its checkpoint: tensors by their names there, and the fields of its config.json."""

    tensors: dict[str, Tensor]
    head: HeadReference
    draft_ids: list[int]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    theta: float
    eps: float
    mask_token: int
    sample_from_anchor: bool
    window: int | None
    causal: bool
    markov: str | None
    conv_group: int | None
    top_k: int | None
    confidence_with_markov: bool

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.eps)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.tensors[f"{name}.weight"] @ x

    def hidden(self, anchor: int, position: int, taps_SAH: Tensor, slots: int) -> list[Tensor]:
        """Normed hidden states of a block whose anchor sits at ``position``; only ``taps_SAH[:position]`` are read."""
        context = [self.norm("hidden_norm", self.linear("fc", taps_AH.reshape(-1))) for taps_AH in taps_SAH[:position]]
        ids = [anchor] + [self.mask_token] * (slots - 1)
        streams = [self.head.embed_VH[token] for token in ids]
        for index in range(self.num_layers):
            streams = self._layer(f"layers.{index}", context, streams, position)
        return [self.norm("norm", stream) for stream in streams]

    def _layer(self, name: str, context: list[Tensor], streams: list[Tensor], start: int) -> list[Tensor]:
        normed = [self.norm(f"{name}.input_layernorm", stream) for stream in streams]
        inputs = self._conv(f"{name}.attention_conv", 0, normed, normed)
        attended = self._attention(f"{name}.self_attn", context, inputs, start)
        middle = [
            a + b for a, b in zip(streams, self._conv(f"{name}.attention_conv", 1, attended, normed), strict=True)
        ]
        normed = [self.norm(f"{name}.post_attention_layernorm", stream) for stream in middle]
        out = []
        for x in self._conv(f"{name}.mlp_conv", 0, normed, normed):
            gate = self.linear(f"{name}.mlp.gate_proj", x)
            out.append(
                self.linear(
                    f"{name}.mlp.down_proj", gate / (1 + torch.exp(-gate)) * self.linear(f"{name}.mlp.up_proj", x)
                )
            )
        return [a + b for a, b in zip(middle, self._conv(f"{name}.mlp_conv", 1, out, normed), strict=True)]

    def _conv(self, name: str, side: int, values: list[Tensor], source: list[Tensor]) -> list[Tensor]:
        """Channel c of slot j: the sum over i of (base[side, i, c] + dynamic of slot j for tap i and the group of c) ·
        slot j − i.
        """
        if self.conv_group is None:
            return values
        base_2KH = self.tensors[f"{name}.base_kernel"]
        taps, hidden = base_2KH.shape[1:]
        result = []
        for j in range(len(values)):
            dynamic = self.linear(f"{name}.kernel_projection", source[j]).view(2, taps, hidden // self.conv_group)
            total = torch.zeros(hidden, dtype=torch.float64)
            for i in range(min(taps, j + 1)):
                total = (
                    total + (base_2KH[side, i] + dynamic[side, i].repeat_interleave(self.conv_group)) * values[j - i]
                )
            result.append(total)
        return result

    def _attention(self, name: str, context: list[Tensor], inputs: list[Tensor], start: int) -> list[Tensor]:
        keys, values = [], []
        for position, x in enumerate([*context, *inputs]):
            k = self.norm(f"{name}.k_norm", self.linear(f"{name}.k_proj", x).view(self.num_kv_heads, self.head_dim))
            keys.append(turn(k, position, self.theta))
            values.append(self.linear(f"{name}.v_proj", x).view(self.num_kv_heads, self.head_dim))
        share = self.num_heads // self.num_kv_heads
        result = []
        for j, x in enumerate(inputs):
            own = start + j
            q = self.norm(f"{name}.q_norm", self.linear(f"{name}.q_proj", x).view(self.num_heads, self.head_dim))
            q = turn(q, own, self.theta)
            seen = [
                p
                for p in range(len(keys))
                if not (self.causal and p > own) and (self.window is None or abs(own - p) < self.window)
            ]
            heads = []
            for n in range(self.num_heads):
                scores = torch.stack([keys[p][n // share] @ q[n] for p in seen]) / math.sqrt(self.head_dim)
                heads.append(torch.softmax(scores, 0) @ torch.stack([values[p][n // share] for p in seen]))
            result.append(self.linear(f"{name}.o_proj", torch.cat(heads)))
        return result

    def draft(self, text: list[int], taps_SAH: Tensor, n: int, drafts: list[int] | None = None) -> BlockDraft:
        """Draft ``n`` tokens behind ``text``, whose last token is the anchor. ``drafts``: tokens that are taken instead
        of argmax.
        """
        first = 0 if self.sample_from_anchor else 1
        hidden = self.hidden(text[-1], len(text) - 1, taps_SAH, n + first)[first:]
        return self.heads(text[-1], hidden, drafts)

    def heads(self, anchor: int, hidden: list[Tensor], drafts: list[int] | None = None) -> BlockDraft:
        """The sequential part, on the hidden states of the slots that draft."""
        lm_head_DH = self.tensors.get("lm_head.weight", self.head.lm_head_VH)
        draft, prev, carry = BlockDraft(), anchor, None
        for j, h in enumerate(hidden):
            base = lm_head_DH @ h
            logits = base
            embedding = None
            if self.markov is not None:
                embedding = self.tensors["markov_head.markov_w1.weight"][prev]
                state, carry = self._markov(embedding, h, carry)
                logits = base + self.linear("markov_head.markov_w2", state)
            if "confidence_head.proj.weight" in self.tensors:
                x = torch.cat([h, embedding]) if self.confidence_with_markov and embedding is not None else h
                score = self.linear("confidence_head.proj", x) + self.tensors["confidence_head.proj.bias"]
                draft.confidence.append(1 / (1 + torch.exp(-score[0])))
            log_probs = torch.full((len(self.head.embed_VH),), -torch.inf, dtype=torch.float64)
            if self.top_k is None:
                log_probs[self.draft_ids] = torch.log_softmax(logits, -1)
            else:
                log_probs = self._select(base, h, prev, log_probs)
            draft.hidden.append(h)
            draft.base.append(base)
            draft.log_probs.append(log_probs)
            prev = int(log_probs.argmax()) if drafts is None else drafts[j]
            draft.tokens.append(prev)
        return draft

    def _markov(self, e: Tensor, h: Tensor, carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        def sigmoid(x: Tensor) -> Tensor:
            return 1 / (1 + torch.exp(-x))

        if self.markov == "vanilla":
            return e, None
        if self.markov == "gated":
            gate = self.linear("markov_head.gate_proj", torch.cat([h, e])) + self.tensors["markov_head.gate_proj.bias"]
            return sigmoid(gate) * e, None
        carry = torch.zeros_like(e) if carry is None else carry
        joint = (
            self.linear("markov_head.joint_proj", torch.cat([carry, e, h]))
            + self.tensors["markov_head.joint_proj.bias"]
        )
        r = len(e)
        gate = sigmoid(joint[:r])
        return torch.tanh(joint[2 * r :]), gate * carry + (1 - gate) * torch.tanh(joint[r : 2 * r])

    def _select(self, base: Tensor, h: Tensor, prev: int, log_probs: Tensor) -> Tensor:
        order = sorted(range(len(base)), key=lambda v: -float(base[v].detach()))[: self.top_k]
        query = self.tensors["candidate_selector.predecessor_codebook"][prev] * self.linear(
            "candidate_selector.hidden_projection", h
        )
        scores = torch.stack(
            [base[v] + query @ self.tensors["candidate_selector.successor_codebook"][v] for v in order]
        )
        return log_probs.index_put((torch.tensor(order),), torch.log_softmax(scores, 0))
