"""The target's attention and matrix products on a CPU, without the wastes of the stock paths. Same numbers, up to
rounding.

Attention:

* Grouped-query heads: given a mask, transformers copies keys and values once per query head, because CUDA kernels need
  it. The CPU kernel does not, and in a batch that decodes one token a row that copy costs three times the attention
  itself.
* Packed documents, laid end to end, get one mask over all pairs of tokens, most of which it forbids. Told where
  they lie, each document attends by itself, with its own square of that mask (so windows and chunks stay what they
  are): 8 times faster for documents of 256 tokens in sequences of 2048.
* Rows of different lengths: a batch that verifies seven drafts in one row and none in the next would run every row
  through the whole model as if it had seven. Told which positions are real, the model runs them alone, as one row, and
  only attention, the smallest part of a step, sees the padded rectangle.

It is registered with transformers under a name of its own; everything it does not handle goes to the stock function.

Products: torch sends float32 products to MKL, whose kernels for a handful of rows are slow on many processors: for the
layers of SmolLM2-135M, on an EPYC with two threads, four rows cost 65 ms where one costs 36. oneDNN, which torch ships
too, takes 31 and 24: verifying four drafts is then nearly as cheap as decoding one token, which is what speculative
decoding lives on. Another order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from spectrain.target.device_map import on_cpu_alone, runs_on

CPU_SDPA = "spectrain_cpu_sdpa"
_CPU = torch.device("cpu")
_lengths: ContextVar[tuple[int, ...] | None] = ContextVar("document_lengths", default=None)


@dataclass(frozen=True)
class RaggedRows:
    """Where R real tokens, laid end to end in one row, belong in a rectangle of ``batch`` rows and ``width`` columns
    (flat positions [R]).
    """

    batch: int
    width: int
    places_R: Tensor

    def spread(self, tensor_1R: Tensor) -> Tensor:
        """[1, R, …] -> [B, T, …], zeros where nothing is real."""
        flat = tensor_1R.new_zeros(self.batch * self.width, *tensor_1R.shape[2:])
        flat[self.places_R] = tensor_1R[0]
        return flat.view(self.batch, self.width, *tensor_1R.shape[2:])

    def gather(self, tensor_BT: Tensor) -> Tensor:
        """[B, T, …] -> [1, R, …]"""
        return tensor_BT.flatten(0, 1)[self.places_R][None]


_ragged: ContextVar[RaggedRows | None] = ContextVar("ragged_rows", default=None)


@contextmanager
def ragged_rows(rows: RaggedRows) -> Iterator[None]:
    """Inside ``cpu_attention``: forward passes are over one row of real tokens, while keys, values and mask are those
    of the rectangle.
    """
    token = _ragged.set(rows)
    try:
        yield
    finally:
        _ragged.reset(token)


def takes_ragged_rows(model: Any) -> bool:
    """Whether the model's attention is this implementation now."""
    return bool(model.config._attn_implementation == CPU_SDPA)


@contextmanager
def cpu_attention(model: Any, document_lengths: Sequence[int] | None = None) -> Iterator[None]:
    """Inside, a transformers model that runs SDPA on a CPU uses this implementation; any other model runs as it is.

    With ``document_lengths``, every forward pass is over one row in which documents of these lengths follow each other.
    """
    chooses_keys = _chooses_keys(model.config.get_text_config(decoder=True))
    if model.config._attn_implementation != "sdpa" or not on_cpu_alone(model) or chooses_keys:
        yield
        return
    token = _lengths.set(None if document_lengths is None else tuple(document_lengths))
    model.set_attn_implementation(CPU_SDPA)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
        _lengths.reset(token)


def _chooses_keys(text_config: Any) -> bool:
    """Whether some layer attends to keys of its own choice (DeepSeek-V3.2, MiniMax-M3): its mask is not made of
    positions, which is what this implementation goes by.
    """
    kinds = getattr(text_config, "layer_types", None) or ()
    return any(kind.startswith("indexed") or "sparse" in kind for kind in kinds)


def cpu_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers' own: query [B, N, T, D], key and value [B, N_kv, C, D], mask [B, 1, T, C] -> [B, T, N, D] and no
    weights.
    """
    ragged = _ragged.get()
    if ragged is not None:
        spread_BNTD = ragged.spread(query.transpose(1, 2)).transpose(1, 2)
        return ragged.gather(
            _rectangle(module, spread_BNTD, key, value, attention_mask, dropout, scaling, **kwargs)
        ), None
    return _rectangle(module, query, key, value, attention_mask, dropout, scaling, **kwargs), None


def _rectangle(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> Tensor:
    if attention_mask is None or query.device.type != "cpu" or dropout or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )[0]
    lengths = _lengths.get() or (query.shape[2],)
    squares = [slice(start, end) for start, end in pairwise(accumulate(lengths, initial=0))]
    if len(squares) > 1 and not squares[-1].stop == query.shape[2] == key.shape[2]:
        raise ValueError(
            f"documents of {squares[-1].stop} tokens were announced, but {query.shape[2]} attend to {key.shape[2]}"
        )
    if len(squares) == 1:
        out_BNTD = _attend(query, key, value, attention_mask, scaling)
    else:
        parts = [
            _attend(query[:, :, s], key[:, :, s], value[:, :, s], attention_mask[:, :, s, s], scaling) for s in squares
        ]
        out_BNTD = torch.cat(parts, dim=2)
    return out_BNTD.transpose(1, 2).contiguous()


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


AttentionInterface.register(CPU_SDPA, cpu_sdpa)
AttentionMaskInterface.register(CPU_SDPA, sdpa_mask)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, by oneDNN where it can and no gradient is asked for."""
    if (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_grad_enabled()
        and _available()
    ):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class CpuLinear(nn.Linear):
    """``nn.Linear`` through ``linear``."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def speed_up(model: nn.Module) -> None:
    """Let every plain ``nn.Linear`` of a model that decodes on the CPU use ``linear``; parameters and names stay as
    they are.
    """
    for module in model.modules():
        if type(module) is nn.Linear and runs_on(module, _CPU).type == "cpu":
            module.__class__ = CpuLinear
            if hasattr(module, "_old_forward"):  # what accelerate's hook calls
                module._old_forward = CpuLinear.forward.__get__(module)


def _available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
