"""P-EAGLE (arXiv:2602.01469): EAGLE-3 that drafts all positions in one pass.

Slot 0 is EAGLE-3's first step. In the slots behind it neither the token nor the feature is known: they hold the mask
token, and fc of one learned vector that stands for taps (``mask_hidden``). Slot k of column t sits at position t + k
and sees the columns up to t and the slots 0 … k of its own draft, never what was drafted:

    text     x_0  x_1  x_2  x_3  x_4          (x_2 is the last token that is certain)
    slot 0   f_1 with x_2     at position 1 -> x_3
    slot 1   mask with MASK   at position 2 -> x_4
    slot 2   mask with MASK   at position 3 -> x_5

So slot k of all columns has the same input, and differs from others by what it sees alone: more layers than EAGLE-3 has
are worth their price here (published with four). Losses, scores and cache are those of every autoregressive drafter;
a slot is trained where EAGLE-3's step k is, all of them in one pass.

Legend: B rows, M counted columns, K slots, J = K − 1 mask slots, T columns, G key-value heads, d size of a head, n
drafts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.data.packing import PackedBatch
from spectrain.data.vocab import DraftVocab
from spectrain.drafters.autoregressive.autoregressive_drafter import AutoregressiveCache, run_columns
from spectrain.drafters.autoregressive.eagle3 import Eagle3, Eagle3Body, Eagle3Method, Eagle3Shape
from spectrain.drafters.autoregressive.eagle3_init import InitText, init_eagle3
from spectrain.drafters.autoregressive.unroll import Attend, ColumnLayout, Columns, first_step, unrolled_attention
from spectrain.drafters.closed_form_size import MAX_COLUMNS_PER_DIM
from spectrain.drafters.drafter import Advance, Batches
from spectrain.drafters.field_checks import check_token
from spectrain.drafters.mask_token import mask_token_of, resolve_mask_token
from spectrain.drafters.registry import Corpus
from spectrain.drafters.shared_solving import shared
from spectrain.errors import ConfigError
from spectrain.target.spec import TargetSpec

_INIT_STD = 0.02


@dataclass(frozen=True)
class PEagleShape(Eagle3Shape):
    """vLLM has neither ``fc_norm`` nor ``norm_output`` for it."""

    mask_token_id: int = 0

    def solved_steps(self, config: DrafterConfig) -> int:
        return 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_token(self.mask_token_id, "mask_token_id", self.target_vocab_size)


class PEagleBody(Eagle3Body):
    """EAGLE-3's, and what stands for the taps of a mask slot, [1, 1, A·H] as vLLM loads it."""

    shape: PEagleShape

    def __init__(self, shape: PEagleShape) -> None:
        super().__init__(shape)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(shape.taps) * shape.hidden_size))

    def mask_feature(self) -> Tensor:
        """Feature [H] of every mask slot."""
        return self.fuse(self.mask_hidden.view(len(self.shape.taps), -1))


def _slots(k_TGd: Tensor, v_TGd: Tensor, layout: ColumnLayout, backend: str) -> Attend:
    """Attention of all mask slots: each to the keys of step 0, and to its own column's of the slots up to itself."""

    def attend(q_JMNd: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        k_J, v_J = list(own_k), list(own_v.expand_as(own_k))
        return torch.stack(
            [
                unrolled_attention(q_MNd, k_TGd, v_TGd, k_J[: j + 1], v_J[: j + 1], layout, backend)
                for j, q_MNd in enumerate(q_JMNd)
            ]
        )

    return attend


class PEagle(Eagle3):
    """``config.autoregressive.ttt_steps`` slots are trained; drafting can go further."""

    method = "peagle"
    body_type = PEagleBody
    shape: PEagleShape
    body: PEagleBody

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        super().reset(generator)
        self.body.mask_hidden.normal_(0.0, _INIT_STD, generator=generator)

    @torch.no_grad()
    def closed_form_init(self, batches: Batches, advance: Advance = lambda percent: None) -> int:
        """Slot 0 as EAGLE-3's first step; mask slots begin with the mean taps of columns that count."""
        used = init_eagle3(self.body, self.rotary, self.head, batches, 1, 1.0, advance)
        if used:
            self.body.mask_hidden.copy_(self._mean_taps(batches).view_as(self.body.mask_hidden))
        return used

    def _mean_taps(self, batches: Batches) -> Tensor:
        """[A, H]"""
        most = MAX_COLUMNS_PER_DIM * self.shape.hidden_size
        text = InitText(self.head, shared(batches), most, lambda percent: None)
        sums = [
            (batch.taps_TAH[columns.query_M].double().sum(0), len(columns.query_M)) for batch, columns in text.columns()
        ]
        own_AH = torch.stack([part for part, _ in sums]).sum(0) if sums else 0.0
        total_AH = text.batches.total(own_AH)
        count = text.batches.total(float(sum(count for _, count in sums)))
        return torch.as_tensor(total_AH / count).to(self.body.mask_hidden.dtype)

    def unroll(self, batch: PackedBatch, columns: Columns) -> Tensor:
        """Normed outputs [K, M, H] of all slots, in one pass."""
        body, query_M = self.body, columns.query_M
        backend = self.attention_backend(batch)
        layout = ColumnLayout.build(columns.host_query_M, batch.host.document_ids_T, query_M.device, body.window)
        feature_TH = body.fuse(batch.taps_TAH)
        out_MH, keys = first_step(body, self.rotary, self.head, feature_TH, batch, layout, backend)
        slot_J1 = torch.arange(1, len(columns.valid_KM), device=query_M.device)[:, None]
        if len(slot_J1) == 0:
            return body.norm(out_MH)[None]
        cos_sin_JM = self.rotary.cos_sin(batch.position_ids_T[query_M] + slot_J1)
        # The first layer reads the same in every mask slot: computed once, until positions and context part them.
        stream, embedding_H = self._mask_input()
        for layer, (k_TGd, v_TGd) in zip(body.layers, keys, strict=True):
            attend = _slots(k_TGd, v_TGd, layout, backend)
            stream, _, _ = layer(stream, embedding_H, cos_sin_JM, attend, None)
        return body.norm(torch.cat([out_MH[None], stream]))

    def draft_steps(self, cache: AutoregressiveCache, anchor_B: Tensor, n: int) -> ParallelSlots:
        return ParallelSlots(self, cache, anchor_B, n)

    def _mask_input(self) -> tuple[Tensor, Tensor]:
        """Feature [H] and embedding [H] of every mask slot."""
        feature_H = self.body.mask_feature()
        mask = torch.full((), self.shape.mask_token_id, device=feature_H.device)  # filled there: nobody waits
        return feature_H, self.head.embed_rows(mask).to(feature_H.dtype)


class ParallelSlots:
    """Iterator over the n slots of one draft, which are all made at once: yields normed hidden states [B, H].
    ``token_B``, what was drafted, is read by no slot.
    """

    def __init__(self, drafter: PEagle, cache: AutoregressiveCache, anchor_B: Tensor, n: int) -> None:
        if cache.pending_BH is None:
            raise RuntimeError(
                "observe the prompt before proposing: a draft starts from the feature of the last verified token"
            )
        body, self.token_B = drafter.body, anchor_B
        rows, masks = len(anchor_B), n - 1
        feature_BnH = torch.cat(
            [cache.pending_BH[:, None], body.mask_feature().to(cache.pending_BH).expand(rows, masks, -1)], dim=1
        )
        ids_Bn = torch.cat([anchor_B[:, None], anchor_B.new_full((rows, masks), drafter.shape.mask_token_id)], dim=1)
        out_BnH = run_columns(body, drafter.rotary, drafter.head, cache, feature_BnH, ids_Bn, cache.columns_B)
        self._slots: Iterator[Tensor] = iter(body.norm(out_BnH).unbind(1))

    def __iter__(self) -> ParallelSlots:
        return self

    def __next__(self) -> Tensor:
        return next(self._slots)


class PEagleMethod(Eagle3Method):
    """The kind ``peagle``."""

    name = "peagle"
    label = "P-EAGLE"
    sections = (*Eagle3Method.sections[:-1], "peagle")
    switches = ("norm_before_residual", "norm_before_fc")
    drafts_step_by_step = False  # a shorter round costs about what a longer one does
    architecture = "PEagleDraftModel"
    speculative_config = {"method": "eagle3", "parallel_drafting": True}
    vllm_defaults = {"norm_before_residual": False, "norm_before_fc": False}
    foreign_architectures = ()
    layout = ""  # no other project writes it

    def check(self, config: DrafterConfig) -> None:
        if config.autoregressive.ttt_steps < 2:
            raise ConfigError(
                "drafter.autoregressive.ttt_steps=1: peagle trains its mask slots from 2 on; drafter=eagle3 has none"
            )

    def resolve(self, config: DrafterConfig, corpus: Corpus, say: Callable[[str], None]) -> DrafterConfig:
        return resolve_mask_token(config, "peagle", corpus, say)

    def shape(self, config: DrafterConfig, spec: TargetSpec) -> PEagleShape:
        return PEagleShape(**self.dimensions(config, spec), mask_token_id=mask_token_of(config, "peagle", spec))

    def build(self, shape: Any, vocab: DraftVocab, config: DrafterConfig) -> PEagle:
        return PEagle(shape, vocab, config)

    def body(self, shape: Any) -> nn.Module:
        return PEagleBody(shape)

    def describe(self, drafter: Any) -> dict[str, Any]:
        return {**super().describe(drafter), "mask_token_id": drafter.shape.mask_token_id}

    def read_shape(self, fields: dict[str, Any]) -> PEagleShape:
        return PEagleShape(**self.read_dimensions(fields), mask_token_id=fields["mask_token_id"])

    def sglang_algorithm(self, fields: Mapping[str, Any]) -> str:
        return ""

    def settings(self, shape: PEagleShape) -> dict[str, object]:
        return {f"peagle.{name}": getattr(shape, name) for name in ("mask_token_id", "sliding_window", *self.switches)}


METHOD = PEagleMethod()
