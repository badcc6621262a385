"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): an autoregressive drafter that reads several layers of the target.

Column t holds the token x_{t+1} and the feature f_t = fc(taps at t); it predicts x_{t+2}. A draft continues column t:
step k takes the token x_{t+1+k} with the drafter's own previous output as feature, sits at position t + k and predicts
x_{t+2+k}:

    text        x_0  x_1  x_2  x_3  x_4          (x_2 is the first token that the target generated)
    column 1    f_1 with x_2   step 0 -> x_3     feature of the last prompt token, first generated token: the server's
                first act
                own with x_3   step 1 -> x_4

The module is the architecture and nothing else: ``unroll.py`` trains it, ``decode.py`` drafts with it. Names and shapes
of the parameters are those of the checkpoint that vLLM loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spectrain.drafters.field_checks import check_sizes
from spectrain.drafters.layers import LayerShape, Projections, RMSNorm, SwiGLU, VocabProjection


@dataclass(frozen=True)
class Eagle3Shape:
    """Everything that decides the parameters' shapes and the arithmetic. A taps, T the target's hidden size, H the
    drafter's (equal).
    """

    layer: LayerShape
    num_layers: int
    taps: tuple[int, ...]
    target_vocab_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False  # the residual stream starts from the normed feature
    norm_before_fc: bool = False  # one norm over the concatenated taps
    fc_norm: bool = False  # one norm per tap
    norm_output: bool = False  # the next step's feature is the normed output

    def __post_init__(self) -> None:
        check_sizes(self)

    @property
    def owns_head(self) -> bool:
        """A full-vocabulary drafter shares the target's lm_head."""
        return self.draft_vocab_size < self.target_vocab_size


class Eagle3Layer(nn.Module):
    """One decoder layer. The first reads [norm(embedding); norm(feature)] (2H wide) and adds to the feature; others are
    ordinary.
    """

    def __init__(self, shape: Eagle3Shape, index: int) -> None:
        super().__init__()
        hidden, eps = shape.layer.hidden_size, shape.layer.rms_norm_eps
        self.is_first = index == 0
        self.norm_before_residual = shape.norm_before_residual
        self.input_layernorm = RMSNorm(hidden, eps)
        if self.is_first:
            self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Projections(shape.layer, 2 * hidden if self.is_first else hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(shape.layer)

    def attention_input(self, feature: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """(residual stream [..., H], what q, k and v read [..., 2H or H])."""
        if not self.is_first:
            return feature, self.input_layernorm(feature)
        normed = self.hidden_norm(feature)
        residual = normed if self.norm_before_residual else feature
        return residual, torch.cat([self.input_layernorm(embedding), normed], dim=-1)

    def finish(self, residual: Tensor, heads: Tensor) -> Tensor:
        """Residual stream after the layer, from the attention's heads [..., N, hd]."""
        middle = residual + self.self_attn.output(heads)
        return middle + self.mlp(self.post_attention_layernorm(middle))


class Eagle3Body(nn.Module):
    """fc, layers, norm and (with a reduced vocabulary) lm_head."""

    layers: list[Eagle3Layer]  # in truth a ModuleList of them

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        hidden, eps, width = (
            shape.layer.hidden_size,
            shape.layer.rms_norm_eps,
            len(shape.taps) * shape.layer.hidden_size,
        )
        self.shape = shape
        if shape.norm_before_fc:
            self.input_norm = RMSNorm(width, eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(hidden, eps) for _ in shape.taps)
        self.fc = nn.Linear(width, hidden, bias=False)
        self.layers = nn.ModuleList(Eagle3Layer(shape, i) for i in range(shape.num_layers))  # type: ignore[assignment]
        self.norm = RMSNorm(hidden, eps)
        if shape.owns_head:
            self.lm_head = VocabProjection(hidden, shape.draft_vocab_size, bias=False)

    def normed_taps(self, taps_AH: Tensor) -> Tensor:
        """What fc reads, before it is laid flat: [..., A, H]."""
        if self.shape.norm_before_fc:
            taps_AH = self.input_norm(taps_AH.flatten(-2)).view(taps_AH.shape)
        if self.shape.fc_norm:
            taps_AH = torch.stack(
                [norm(tap) for norm, tap in zip(self.fc_norm, taps_AH.unbind(-2), strict=True)], dim=-2
            )
        return taps_AH

    def fuse(self, taps_AH: Tensor) -> Tensor:
        """Taps [..., A, H] -> feature [..., H]."""
        return self.fc(self.normed_taps(taps_AH.to(self.fc.weight.dtype)).flatten(-2))

    def feed_back(self, output: Tensor, normed: Tensor) -> Tensor:
        """The feature of the next step."""
        return normed if self.shape.norm_output else output
