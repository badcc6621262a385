"""A kind of drafter of one's own, complete in one file: one linear layer on a hidden state and an embedding.

    spectrain fit recipe=quickstart drafter=one_linear drafter.module=one_linear_drafter

Step 0 reads the target's last hidden state behind its final norm at position t and the token at t + 1; step k reads
what step k − 1 made in place of the hidden state. No attention, no taps: it shows what a kind has to say, not how to
draft well.

Legend: B rows, T tokens, M counted columns, K steps, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.data.packing import PackedBatch
from spectrain.data.vocab import DraftVocab
from spectrain.decoding.proposers import Observation
from spectrain.drafters.autoregressive.autoregressive_drafter import AutoregressiveDrafter, AutoregressiveMethod
from spectrain.drafters.autoregressive.unroll import Columns
from spectrain.drafters.drafter import DrafterShape
from spectrain.drafters.layers import RMSNorm, VocabProjection
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec


@dataclass(frozen=True)
class OneLinearShape(DrafterShape):
    hidden: int
    target_vocab_size: int
    draft_vocab_size: int
    eps: float
    taps: tuple[int, ...] = ()

    @property
    def hidden_size(self) -> int:
        return self.hidden


class OneLinearBody(nn.Module):
    """``linear`` maps hidden state and embedding, side by side, to the next hidden state; ``norm`` to what the head
    reads.
    """

    def __init__(self, shape: OneLinearShape) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.norm = RMSNorm(shape.hidden, shape.eps)
        if shape.owns_head:
            self.lm_head = VocabProjection(shape.hidden, shape.draft_vocab_size, bias=False)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        return self.norm(hidden + self.linear(torch.cat([hidden, embedding.to(hidden.dtype)], dim=-1)))


@dataclass
class PendingCache:
    """``hidden_BH``: the target's, at the last observed token of each row."""

    hidden_BH: Tensor | None = None

    def select(self, rows_B: Tensor) -> None:
        self.hidden_BH = None if self.hidden_BH is None else self.hidden_BH[rows_B]


class LinearSteps:
    """Steps behind the anchor."""

    def __init__(self, drafter: OneLinear, hidden_BH: Tensor, anchor_B: Tensor, n: int) -> None:
        self.drafter = drafter
        self.hidden_BH = hidden_BH
        self.token_B = anchor_B
        self.left = n

    def __iter__(self) -> LinearSteps:
        return self

    def __next__(self) -> Tensor:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        self.hidden_BH = self.drafter.body(self.hidden_BH, self.drafter.head.embed_rows(self.token_B))
        return self.hidden_BH


class OneLinear(AutoregressiveDrafter):
    method = "one_linear"
    reads_last_hidden = True

    def __init__(self, shape: OneLinearShape, vocab: DraftVocab, config: DrafterConfig | None = None) -> None:
        super().__init__(shape, vocab, config)
        self.body = OneLinearBody(shape)

    def unroll(self, batch: PackedBatch, columns: Columns) -> Tensor:
        query_M, last = columns.query_M, batch.num_tokens - 1
        hidden_MH = self.head.post_norm(batch.last_hidden_TH[query_M]).to(self.body.linear.weight.dtype)
        steps = []
        for k in range(len(columns.valid_KM)):
            ids_M = batch.input_ids_T[(query_M + 1 + k).clamp(max=last)]
            hidden_MH = self.body(hidden_MH, self.head.embed_rows(ids_M))
            steps.append(hidden_MH)
        return torch.stack(steps)

    def new_cache(self, batch_size: int) -> PendingCache:
        return PendingCache()

    @torch.no_grad()
    def observe(self, cache: PendingCache, observation: Observation) -> None:
        assert observation.last_hidden_BTH is not None
        lengths_B = observation.lengths_B
        rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
        hidden_BH = observation.last_hidden_BTH[rows_B, (lengths_B - 1).clamp(min=0)]
        hidden_BH = hidden_BH.to(self.body.linear.weight.dtype)
        before = hidden_BH if cache.hidden_BH is None else cache.hidden_BH
        cache.hidden_BH = torch.where((lengths_B > 0)[:, None], hidden_BH, before)

    def draft_steps(self, cache: PendingCache, anchor_B: Tensor, n: int) -> LinearSteps:
        assert cache.hidden_BH is not None, "observe the prompt before proposing"
        return LinearSteps(self, cache.hidden_BH, anchor_B, n)


class OneLinearMethod(AutoregressiveMethod):
    name = "one_linear"
    label = "one-linear"
    architecture = "OneLinearDrafter"

    def taps(self, config: DrafterConfig, spec: TargetSpec) -> tuple[int, ...]:
        return ()  # whatever a recipe says that other kinds read

    def shape(self, config: DrafterConfig, spec: TargetSpec) -> OneLinearShape:
        size = config.draft_vocab_size or spec.vocab_size
        return OneLinearShape(spec.hidden_size, spec.vocab_size, size, eps=float(config.options.get("eps", 1e-6)))

    def build(self, shape: OneLinearShape, vocab: DraftVocab, config: DrafterConfig) -> OneLinear:
        return OneLinear(shape, vocab, config)

    def body(self, shape: OneLinearShape) -> OneLinearBody:
        return OneLinearBody(shape)

    def copy_from_target(self, drafter: OneLinear, spec: TargetSpec, head: TargetHead, folder: Any) -> None:
        """The hidden state alone, at first: the drafter then says what the target says of the token before."""
        with torch.no_grad():
            drafter.body.linear.weight.zero_()

    def describe(self, drafter: OneLinear) -> dict[str, Any]:
        shape = drafter.shape
        layer = {"vocab_size": shape.target_vocab_size, "hidden_size": shape.hidden, "rms_norm_eps": shape.eps}
        return {"transformer_layer_config": layer}

    def read_shape(self, fields: Mapping[str, Any]) -> OneLinearShape:
        layer = fields["transformer_layer_config"]
        sizes = (layer["hidden_size"], layer["vocab_size"], fields["draft_vocab_size"])
        return OneLinearShape(*sizes, eps=layer["rms_norm_eps"])


METHOD = OneLinearMethod()
