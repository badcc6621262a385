"""The backbone of a block drafter (DFlash, arXiv:2602.06036; DSpark and DFlash2 put light heads on it).

The target's taps enter every layer as keys and values only: k_proj and v_proj of c_t = hidden_norm(fc(taps at t)). A
context key is not normed again and does not change from layer to layer, so it depends on its own position alone and can
be kept. The block attends to the context strictly before its anchor and to itself; which rows that are is the caller's
business (``attend``), because training packs many blocks where a server has a cache.

The module is the architecture and nothing else: ``block_training.py`` trains it, ``block_drafter.py`` drafts with it.
Names and shapes of the parameters are those of the checkpoint that vLLM loads.

Legend: R blocks, B slots, T context tokens, A taps, H hidden, N heads, G key-value heads, d size of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from spectrain.drafters.block.block_shape import BlockShape
from spectrain.drafters.block.heads import CandidateSelector, ConfidenceHead, GroupedConv, MarkovHead
from spectrain.drafters.layers import DecoderLayer, Projections, RMSNorm, SwiGLU, VocabProjection
from spectrain.target.head import TargetHead

CosSin = tuple[Tensor, Tensor]
# (index of the layer, queries [R, B, N, d], the block's own keys and values [R, B, G, d]) -> heads [R, B, N, d]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class BlockLayer(DecoderLayer):
    """One decoder layer."""

    def __init__(self, shape: BlockShape, index: int) -> None:
        super().__init__()
        hidden, eps = shape.layer.hidden_size, shape.layer.rms_norm_eps
        self.index = index
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Projections(shape.layer, hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(shape.layer)
        self.has_conv = shape.conv is not None
        if shape.conv is not None:
            self.attention_conv = GroupedConv(shape.conv, hidden)
            self.mlp_conv = GroupedConv(shape.conv, hidden)

    def context_kv(self, context_TH: Tensor, cos_sin_T: CosSin) -> tuple[Tensor, Tensor]:
        """Keys and values [..., T, G, d] of fused taps [..., T, H] at the given phases."""
        return self.self_attn.keys_values(context_TH, cos_sin_T)

    def run(self, x_RBH: Tensor, cos_sin_RB: CosSin, attend: Attend) -> Tensor:
        """The residual stream after the layer, [R, B, H]."""
        middle_RBH = x_RBH + self._attention(self.input_layernorm(x_RBH), cos_sin_RB, attend)
        return middle_RBH + self._mlp(self.post_attention_layernorm(middle_RBH))

    def _attention(self, x_RBH: Tensor, cos_sin_RB: CosSin, attend: Attend) -> Tensor:
        if self.has_conv:
            x_RBH, dynamic = self.attention_conv.before(x_RBH)
        k_RBGd, v_RBGd = self.self_attn.keys_values(x_RBH, cos_sin_RB)
        heads_RBNd = attend(self.index, self.self_attn.queries(x_RBH, cos_sin_RB), k_RBGd, v_RBGd)
        out_RBH = self.self_attn.output(heads_RBNd)
        return self.attention_conv.after(out_RBH, dynamic) if self.has_conv else out_RBH

    def _mlp(self, x_RBH: Tensor) -> Tensor:
        if not self.has_conv:
            return self.mlp(x_RBH)
        x_RBH, dynamic = self.mlp_conv.before(x_RBH)
        return self.mlp_conv.after(self.mlp(x_RBH), dynamic)


class BlockBody(nn.Module):
    """fc, hidden_norm, layers, norm, the heads that the shape asks for and (with a reduced vocabulary) lm_head."""

    layers: list[BlockLayer]  # in truth a ModuleList of them

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        hidden, eps = shape.layer.hidden_size, shape.layer.rms_norm_eps
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(BlockLayer(shape, i) for i in range(shape.num_layers))  # type: ignore[assignment]
        self.norm = RMSNorm(hidden, eps)
        if shape.owns_head:
            self.lm_head = VocabProjection(hidden, shape.draft_vocab_size, bias=False)
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        self.candidate_selector: CandidateSelector | None = None
        if shape.markov is not None:
            self.markov_head = MarkovHead(shape.markov, hidden, shape.target_vocab_size, shape.draft_vocab_size)
        if shape.confidence:
            rank = shape.markov.rank if shape.markov is not None and shape.confidence_with_markov else 0
            self.confidence_head = ConfidenceHead(hidden + rank)
        if shape.selector is not None:
            self.candidate_selector = CandidateSelector(shape.selector, hidden, shape.target_vocab_size)

    def fuse(self, taps_TAH: Tensor) -> Tensor:
        """Taps [..., A, H] -> what every layer's k_proj and v_proj read, [..., H]."""
        return self.hidden_norm(self.fc(taps_TAH.to(self.fc.weight.dtype).flatten(-2)))

    def block_input(self, anchor_R: Tensor, head: TargetHead, slots: int | None = None) -> Tensor:
        """[R, B, H]: the anchor's embedding, then the mask token's. ``slots``: length of the block, None: as
        trained.
        """
        ids_RB = anchor_R.new_full((len(anchor_R), slots or self.shape.block_size), self.shape.mask_token_id)
        ids_RB[:, 0] = anchor_R
        return head.embed_rows(ids_RB).to(self.fc.weight.dtype)

    def forward(self, x_RBH: Tensor, cos_sin_RB: CosSin, attend: Attend) -> Tensor:
        """Normed hidden states of all slots, [R, B, H]: what lm_head and the other heads read."""
        for layer in self.layers:
            x_RBH = layer(x_RBH, cos_sin_RB, attend)
        return self.norm(x_RBH)

    def confidence_logits(self, hidden: Tensor, embedding: Tensor | None) -> Tensor | None:
        """[..., H] and the Markov embeddings [..., r] (or None) -> [...]; None without a confidence head."""
        if self.confidence_head is None:
            return None
        return self.confidence_head.logits(hidden, embedding if self.shape.confidence_with_markov else None)

    @torch.no_grad()
    def reset_heads(self, generator: torch.Generator) -> None:
        """Fresh heads and convolutions: they change (next to) nothing, so the drafter starts as a DFlash drafter."""
        for layer in self.layers:
            if layer.has_conv:
                layer.attention_conv.reset()
                layer.mlp_conv.reset()
        if self.markov_head is not None:
            self.markov_head.reset(generator)
        if self.confidence_head is not None:
            self.confidence_head.reset()
        if self.candidate_selector is not None:
            self.candidate_selector.reset(generator)
