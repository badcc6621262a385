"""The layer of a native multi-token-prediction head: norms, projection, attention and MLP as its target's family has
them.

It is cut where the shared unroll and cache go between (``unroll.AutoregressiveLayer``). Gains are kept as stored, w or
1 + w by family, so that what is not trained is written back bit for bit. Mixtures of experts are transformers' own.

Legend: H hidden, N heads, G key-value heads, d size of a head, r rank of a latent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectrain.drafters.autoregressive.mtp_shape import MtpShape
from spectrain.drafters.autoregressive.unroll import AutoregressiveLayer
from spectrain.drafters.layers import LayerShape, RMSNorm, SwiGLU, rotate
from spectrain.target.mtp_heads import MtpHead

_EXPERTS = {
    "qwen3_next": ("qwen3_next", "Qwen3NextSparseMoeBlock"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeSparseMoeBlock"),
    "glm4_moe": ("glm4_moe", "Glm4MoeMoE"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3MoE"),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32MoE"),
}


class GainNorm(RMSNorm):
    """An RMS norm whose gain is ``offset + weight``; computed in float32, rounded once."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__(size, eps)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        if self.offset == 0.0:
            return super().forward(x)
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (self.offset + self.weight.to(wide.dtype))).to(x.dtype)


def _rotate_part(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """The first dimensions of each head are turned, as many as there are phases."""
    turned = cos_sin[0].shape[-1]
    if turned == x.shape[-1]:
        return rotate(x, cos_sin)
    return torch.cat([rotate(x[..., :turned], cos_sin), x[..., turned:]], dim=-1)


class MtpAttention(nn.Module):
    """Grouped-query attention, with norms per head, biases and a gate on its heads where the family has them."""

    def __init__(self, head: MtpHead, text: Mapping[str, Any], sizes: tuple[int, int, int], offset: float) -> None:
        super().__init__()
        hidden, eps, n = int(text["hidden_size"]), float(text["rms_norm_eps"]), int(text["num_attention_heads"])
        self.d, _, self.g = sizes
        self.n, self.gated = n, head.attention == "gated"
        bias = head.attention_bias or bool(text.get("attention_bias"))
        self.q_proj = nn.Linear(hidden, n * self.d * (2 if self.gated else 1), bias=bias)
        self.k_proj = nn.Linear(hidden, self.g * self.d, bias=bias)
        self.v_proj = nn.Linear(hidden, self.g * self.d, bias=bias)
        self.o_proj = nn.Linear(n * self.d, hidden, bias=self.gated and bool(text.get("attention_bias")))
        self.qk_norm = head.qk_norm or bool(text.get("use_qk_norm"))
        if self.qk_norm:
            self.q_norm = GainNorm(self.d, eps, offset)
            self.k_norm = GainNorm(self.d, eps, offset)

    def queries(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.n, -1))[..., : self.d]
        return _rotate_part(self.q_norm(q) if self.qk_norm else q, cos_sin)

    def keys_values(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k, v = (projection(x).unflatten(-1, (self.g, self.d)) for projection in (self.k_proj, self.v_proj))
        return _rotate_part(self.k_norm(k) if self.qk_norm else k, cos_sin), v

    def output(self, heads: Tensor, x: Tensor) -> Tensor:
        """``x``: what the queries read; its gate is made again here, which costs less than to carry it along."""
        if self.gated:
            weight_NdH = self.q_proj.weight.unflatten(0, (self.n, 2 * self.d))[:, self.d :]
            bias = self.q_proj.bias
            bias = None if bias is None else bias.unflatten(0, (self.n, 2 * self.d))[:, self.d :].flatten()
            heads = heads * torch.sigmoid(F.linear(x, weight_NdH.flatten(0, 1), bias)).unflatten(-1, (self.n, self.d))
        return self.o_proj(heads.flatten(-2))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), its keys and values expanded to full heads.

    Values are narrower than keys and are filled up with zeros, so that both fit one cache; rotary dimensions lie in
    pairs where ``rope_interleave`` says so.
    """

    def __init__(self, head: MtpHead, text: Mapping[str, Any], sizes: tuple[int, int, int], offset: float) -> None:
        super().__init__()
        hidden, eps, self.n = int(text["hidden_size"]), float(text["rms_norm_eps"]), int(text["num_attention_heads"])
        self.d, self.turned, _ = sizes
        self.values, self.rank = int(text["v_head_dim"]), int(text["kv_lora_rank"])
        if self.values > self.d:
            raise ValueError(f"v_head_dim is {self.values}, heads of keys are {self.d} wide: narrower values are read")
        self.interleaved = bool(text.get("rope_interleave", True))
        bias, ranks = bool(text.get("attention_bias")), text.get("q_lora_rank")
        self.low_rank = ranks is not None
        if ranks is None:
            self.q_proj = nn.Linear(hidden, self.n * self.d, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, int(ranks), bias=bias)
            self.q_a_layernorm = GainNorm(int(ranks), eps, offset)
            self.q_b_proj = nn.Linear(int(ranks), self.n * self.d, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.turned, bias=bias)
        self.kv_a_layernorm = GainNorm(self.rank, eps, offset)
        self.kv_b_proj = nn.Linear(self.rank, self.n * (self.d - self.turned + self.values), bias=False)
        self.o_proj = nn.Linear(self.n * self.values, hidden, bias=bias)
        self.scale = _yarn_scale(text.get("rope_parameters") or {}) ** 2

    def queries(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.low_rank else self.q_proj(x)
        q = q.unflatten(-1, (self.n, self.d))
        return self._turned(q, cos_sin) * self.scale

    def keys_values(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.turned], dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.n, -1))
        k, v = both.split([self.d - self.turned, self.values], dim=-1)
        k = torch.cat([k, shared.unsqueeze(-2).expand(*k.shape[:-1], -1)], dim=-1)
        return self._turned(k, cos_sin), F.pad(v, (0, self.d - self.values))

    def output(self, heads: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(heads[..., : self.values].flatten(-2))

    def _turned(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """The last dimensions of each head are turned; pairs are brought into two halves, of keys and queries alike."""
        still, turned = x.split([self.d - self.turned, self.turned], dim=-1)
        if self.interleaved:
            turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1)
        return torch.cat([still, rotate(turned, cos_sin)], dim=-1)


def _yarn_scale(rope: Mapping[str, Any]) -> float:
    """YaRN's factor on logits (arXiv:2309.00071, as DeepSeek has it): 0.1 · mscale_all_dim · ln(factor) + 1."""
    every, factor = rope.get("mscale_all_dim") or 0.0, float(rope.get("factor") or 1.0)
    if rope.get("rope_type", "default") == "default" or not every or factor <= 1:
        return 1.0
    return 0.1 * float(every) * math.log(factor) + 1.0


def build_experts(text: Mapping[str, Any]) -> nn.Module:
    """The family's own mixture of experts, out of transformers; reads and gives [1, tokens, H]."""
    import importlib

    from transformers import AutoConfig

    from spectrain.console import quiet_transformers

    package, name = _EXPERTS[str(text["model_type"])]
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    with quiet_transformers():
        config = AutoConfig.for_model(**text)
    config._experts_implementation = "eager"
    return getattr(module, name)(config)


class MtpLayer(AutoregressiveLayer):
    """Projection of [token, hidden state] and one decoder layer. ``text``: fields of the target's configuration;
    ``sizes``: as ``attention_sizes`` gives them; ``offset``: 1 where gains are stored around 0.
    """

    def __init__(
        self,
        head: MtpHead,
        text: Mapping[str, Any],
        layer: LayerShape,
        sizes: tuple[int, int, int],
        offset: float,
        has_experts: bool,
    ) -> None:
        super().__init__()
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        self.embedding_first, self.has_experts = head.embedding_first, has_experts
        self.embedding_norm = GainNorm(hidden, eps, offset)
        self.hidden_norm = GainNorm(hidden, eps, offset)
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = GainNorm(hidden, eps, offset)
        attention = LatentAttention if head.attention == "latent" else MtpAttention
        self.self_attn: Any = attention(head, text, sizes, offset)
        self.post_attention_layernorm = GainNorm(hidden, eps, offset)
        self.mlp: Any = build_experts(text) if has_experts else SwiGLU(layer)

    def attention_input(self, feature: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """(residual stream [..., H], what q, k and v read [..., H])."""
        token, hidden = self.embedding_norm(embedding), self.hidden_norm(feature)
        stream = self.projection(torch.cat([token, hidden] if self.embedding_first else [hidden, token], dim=-1))
        return stream, self.input_layernorm(stream)

    def finish(self, residual: Tensor, heads: Tensor) -> Tensor:
        """Residual stream after the layer, from the attention's heads [..., N, d]."""
        middle = residual + self.self_attn.output(heads, self.input_layernorm(residual))
        read = self.post_attention_layernorm(middle)
        if not self.has_experts:
            return middle + self.mlp(read)
        return middle + self.mlp(read.reshape(1, -1, read.shape[-1])).reshape(read.shape)


class MtpBody(nn.Module):
    """The head's parameters: one layer and a norm."""

    layers: list[MtpLayer]  # in truth a ModuleList of one
    window: int | None = None

    def __init__(self, shape: MtpShape) -> None:
        super().__init__()
        self.zero_first, self.feeds_normed = shape.head.zero_first, shape.head.feeds_normed
        layer = MtpLayer(shape.head, shape.text, shape.layer, shape.sizes, shape.offset, shape.experts > 0)
        self.layers = nn.ModuleList([layer])  # type: ignore[assignment]
        self.norm = GainNorm(shape.hidden_size, shape.layer.rms_norm_eps, shape.offset)

    def feed_back(self, output: Tensor, normed: Tensor) -> Tensor:
        """The feature of the next step."""
        return normed if self.feeds_normed else output
