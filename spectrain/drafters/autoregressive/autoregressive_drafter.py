"""What all autoregressive drafters share: one step makes one token, and step k is fed what step k − 1 made.

A kind says how its steps are unrolled over a text (``unroll``) and how they go on from a cache (``draft_steps``);
losses, scores and drafting are the same for all.

Drafting with an autoregressive drafter, as a server does it.

The cache holds keys and values of *observed* columns: verified tokens with target features. Slot number = column =
position. Drafting writes its own keys into the slots behind, as scratch: the count of observed columns does not move,
so the next ``observe`` overwrites them and drafting leaves no trace. Column t needs x_{t+1}, so the feature of the last
observed token waits as ``pending`` until the next token is known.

Legend: B rows, M counted columns, K steps, U teacher positions, R anchors, H hidden, D draft vocabulary, V target
vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.trainer_schema import TrainerConfig
from spectrain.data.packing import PackedBatch
from spectrain.decoding.proposers import Observation, Proposal
from spectrain.decoding.sampling import SamplingParams, sample, truncated_log_probs
from spectrain.drafters.autoregressive.unroll import (
    AutoregressiveBody,
    Columns,
    UnrolledOutputs,
    align_to_teachers,
    token_embedding,
)
from spectrain.drafters.drafter import Drafter, DraftScores, KeyValueCache, draft_uniforms
from spectrain.drafters.layers import Rotary
from spectrain.drafters.losses import LossSums, draft_loss
from spectrain.drafters.losses.students import Teacher
from spectrain.drafters.registry import DrafterMethod
from spectrain.drafters.teacher_forced import accept_probability
from spectrain.drafters.training_cost import BatchSize, CorpusSize, TrainingCost, TrainingRows
from spectrain.target.cpu_kernels import linear
from spectrain.target.families import at_least_float32
from spectrain.target.head import TargetHead

# Matrices that each token of the text meets once, and those that an output does not meet as a product of its own.
_PER_TOKEN = ("fc.weight",)
_NOT_PER_OUTPUT = (*_PER_TOKEN, "lm_head.weight")


class Steps(Protocol):
    """The steps of one draft, in order: yields normed hidden states [B, H]; ``token_B``, what was drafted from them,
    must be set before the next step.
    """

    token_B: Tensor

    def __iter__(self) -> Steps: ...

    def __next__(self) -> Tensor: ...


class AutoregressiveDrafter(Drafter):
    """``config.autoregressive.ttt_steps`` are unrolled in training; drafting can go further."""

    @abstractmethod
    def unroll(self, batch: PackedBatch, columns: Columns) -> Tensor:
        """Normed outputs [K, M, H] of teacher-forced steps 0 … K − 1 at the counted columns."""

    @abstractmethod
    def draft_steps(self, cache: Any, anchor_B: Tensor, n: int) -> Steps:
        """The n steps of a draft behind the committed ``anchor_B``. The cache is as before when they are done."""

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., D] that drafts are chosen by, of normed outputs [..., H]."""
        return linear(hidden, self.lm_head_DH.to(hidden.dtype))

    def extra_loss(self, students: UnrolledOutputs, teacher: Teacher) -> Tensor | None:
        """What a kind adds to the loss, a sum over positions with the students' weights."""
        return None

    @property
    def training_steps(self) -> int:
        return self.config.autoregressive.ttt_steps

    def train_losses(self, batch: PackedBatch) -> LossSums:
        columns = Columns.build(batch, self.training_steps)
        hidden_KMH = self.unroll(batch, columns)
        weight_KM = columns.weights(self.config.autoregressive.step_decay)
        students = align_to_teachers(hidden_KMH, weight_KM, columns, batch.num_tokens)
        teacher = self.teacher(batch, students.teacher_U)
        sums = draft_loss(
            students.hidden_KUH,
            self.lm_head_DH,
            teacher,
            self.target_to_draft_V[batch.input_ids_T[students.teacher_U + 1]],
            students.weight_KU,
            self.loss,
        )
        extra = self.extra_loss(students, teacher)
        if extra is not None:
            sums.loss = sums.loss + extra
        if len(columns.query_M) == 0:
            # Every parameter must still have a gradient, or data-parallel ranks with text would wait for this one for
            # ever.
            sums.loss = sums.loss + sum(p.sum() for p in self.parameters()) * 0.0
        return sums

    @torch.no_grad()
    def score(
        self, batch: PackedBatch, num_tokens: int, sampling: SamplingParams, draft_sampling: SamplingParams
    ) -> DraftScores:
        columns = Columns.build(batch, num_tokens)
        hidden_KMH = self.unroll(batch, columns)
        students = align_to_teachers(hidden_KMH, columns.valid_KM.float(), columns, batch.num_tokens)
        accept_KU = accept_probability(
            students.hidden_KUH,
            self.lm_head_DH,
            self.teacher(batch, students.teacher_U),
            batch.input_ids_T[students.teacher_U + 1],
            self.vocab if self.shape.owns_head else None,
            sampling,
            draft_sampling,
            self.draft_logits,
        )
        # Back from teachers to anchors: slot k of the anchor at t + 1 asked the teacher at t + 1 + k.
        index_T = torch.zeros(batch.num_tokens + num_tokens, dtype=torch.long, device=columns.query_M.device)
        index_T[students.teacher_U] = torch.arange(len(students.teacher_U), device=index_T.device)
        anchor_R = columns.query_M + 1
        accept_RK = torch.stack([accept_KU[k, index_T[anchor_R + k]] for k in range(num_tokens)], dim=1)
        return DraftScores(anchor_R, accept_RK * columns.valid_KM.T)

    @torch.no_grad()
    def propose(
        self,
        cache: Any,
        anchor_B: Tensor,
        n: int,
        sampling: SamplingParams,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Proposal:
        uniforms_Bn = draft_uniforms(generators, n, anchor_B) if not sampling.greedy else None
        steps = self.draft_steps(cache, anchor_B, n)
        ids, log_probs = [], []
        for k, normed_BH in enumerate(steps):
            logits_BD = at_least_float32(self.draft_logits(normed_BH))
            if uniforms_Bn is None:
                draft_B = logits_BD.argmax(-1)
            else:
                log_p_BD = truncated_log_probs(logits_BD, sampling)
                draft_B = sample(log_p_BD.exp(), uniforms_Bn[:, k])
                full_BV = log_p_BD.new_full((len(log_p_BD), self.vocab.target_size), float("-inf"))
                log_probs.append(full_BV.index_copy_(1, self.draft_ids_D, log_p_BD))
            steps.token_B = self.draft_ids_D[draft_B]
            ids.append(steps.token_B)
        return Proposal(ids=torch.stack(ids, dim=1), log_probs=torch.stack(log_probs, dim=1) if log_probs else None)

    def select(self, cache: Any, rows: Tensor) -> Any:
        cache.select(rows)
        return cache


class AutoregressiveMethod(DrafterMethod):
    """What all kinds of autoregressive drafters have in common."""

    sections: ClassVar[tuple[str, ...]] = ("autoregressive",)
    drafts_step_by_step = True

    def training_cost(
        self, config: DrafterConfig, trainer: TrainerConfig, entries: Mapping[str, int], corpus: CorpusSize
    ) -> TrainingCost:
        steps = config.autoregressive.ttt_steps
        return TrainingCost(
            outputs=corpus.generated_tokens * steps,
            batch_outputs=trainer.packed_length * trainer.micro_batch_size * steps,
            token_entries=sum(size for name, size in entries.items() if name in _PER_TOKEN),
            output_entries=sum(size for name, size in entries.items() if not name.endswith(_NOT_PER_OUTPUT)),
        )

    def norms_taps(self, config: DrafterConfig) -> bool:
        """Whether taps are normed before they are fused."""
        return False

    def training_rows(self, config: DrafterConfig, trainer: TrainerConfig, batch: BatchSize) -> TrainingRows:
        return self._rows(config, config.autoregressive.ttt_steps, batch)

    def simulated_rows(self, config: DrafterConfig, drafts: int, batch: BatchSize) -> TrainingRows:
        return self._rows(config, drafts, batch)

    def _rows(self, config: DrafterConfig, steps: int, batch: BatchSize) -> TrainingRows:
        """Of generated tokens that are unrolled for so many steps; of the others there are keys and values, and where
        another layer follows, its whole input. Step k stacks the keys of k steps.
        """
        columns = batch.generated_tokens
        return TrainingRows(
            layer_rows=columns * steps,
            students=columns * steps,
            teachers=columns,
            inner_rows=batch.tokens - columns,
            key_rows=batch.tokens - columns,
            copied_keys=columns * steps * (steps - 1) / 2,
            own_keys=steps - 1,
            with_embedding=True,
            normed_taps=self.norms_taps(config),
        )


class AutoregressiveCache(KeyValueCache):
    """``pending_BH``: feature of the last observed token; None before the first observe."""

    pending_BH: Tensor | None = None

    def select(self, rows_B: Tensor) -> None:
        super().select(rows_B)
        self.pending_BH = None if self.pending_BH is None else self.pending_BH[rows_B]


def observe_columns(
    body: AutoregressiveBody,
    rotary: Rotary,
    head: TargetHead,
    cache: AutoregressiveCache,
    feature_BTH: Tensor,
    observation: Observation,
) -> None:
    """Verified tokens and what the drafter reads of the target there become step-0 columns; the last one's feature
    waits for its next token.
    """
    ids_BT, lengths_B = observation.ids_BT, observation.lengths_B
    last_B = (lengths_B - 1).clamp(min=0)
    rows_B = torch.arange(len(ids_BT), device=ids_BT.device)
    if cache.pending_BH is None:
        column_feature, next_ids, new_B = feature_BTH[:, :-1], ids_BT[:, 1:], lengths_B - 1
        cache.pending_BH = feature_BTH[rows_B, last_B]
    else:
        column_feature = torch.cat([cache.pending_BH[:, None], feature_BTH[:, :-1]], dim=1)
        next_ids, new_B = ids_BT, lengths_B
        cache.pending_BH = torch.where((lengths_B > 0)[:, None], feature_BTH[rows_B, last_B], cache.pending_BH)
    if next_ids.shape[1]:
        run_columns(body, rotary, head, cache, column_feature, next_ids, cache.columns_B, keys_only=True)
    cache.columns_B = cache.columns_B + new_B.clamp(min=0)


class DraftSteps:
    """Iterator over the n steps of one draft: yields the normed hidden state [B, H]; ``token_B`` must be set before the
    next step.
    """

    def __init__(
        self,
        body: AutoregressiveBody,
        rotary: Rotary,
        head: TargetHead,
        cache: AutoregressiveCache,
        anchor_B: Tensor,
        n: int,
    ) -> None:
        if cache.pending_BH is None:
            raise RuntimeError(
                "observe the prompt before proposing: a draft starts from the feature of the last verified token"
            )
        self._parts = (body, rotary, head, cache)
        self.token_B = anchor_B
        self._n = n
        self._step = 0
        self._feature_BH: Tensor = cache.pending_BH

    def __iter__(self) -> DraftSteps:
        return self

    def __next__(self) -> Tensor:
        if self._step == self._n:
            raise StopIteration
        body, rotary, head, cache = self._parts
        start_B = cache.columns_B + self._step
        out_BH = run_columns(body, rotary, head, cache, self._feature_BH[:, None], self.token_B[:, None], start_B)[:, 0]
        normed_BH = body.norm(out_BH)
        self._feature_BH = body.feed_back(out_BH, normed_BH)
        self._step += 1
        return normed_BH


def run_columns(
    body: AutoregressiveBody,
    rotary: Rotary,
    head: TargetHead,
    cache: AutoregressiveCache,
    feature_BTH: Tensor,
    ids_BT: Tensor,
    start_B: Tensor,
    keys_only: bool = False,
) -> Tensor:
    """Run columns start … start + T − 1 of each row, writing their keys and values into those slots.

    Column c attends to slots 0 … c, with a window to the last of them. With ``keys_only`` the last layer stops after
    its keys and values, and the result is meaningless.
    """
    rows_B1 = torch.arange(len(ids_BT), device=ids_BT.device)[:, None]
    slots_BT = start_B[:, None] + torch.arange(ids_BT.shape[1], device=ids_BT.device)
    end = int(slots_BT.max()) + 1
    cache.reserve(end)
    slot_S = torch.arange(end, device=ids_BT.device)
    visible_B1TS = (slot_S <= slots_BT[..., None])[:, None]
    if body.window is not None:
        visible_B1TS = visible_B1TS & (slot_S > slots_BT[..., None] - body.window)[:, None]
    cos_sin = rotary.cos_sin(slots_BT)
    embedding_BTH = token_embedding(body, head, ids_BT, slots_BT).to(feature_BTH.dtype)
    stream = feature_BTH
    for layer, keys, values in zip(body.layers, cache.keys, cache.values, strict=True):
        residual, x = layer.attention_input(stream, embedding_BTH)
        keys[rows_B1, slots_BT], values[rows_B1, slots_BT] = layer.self_attn.keys_values(x, cos_sin)
        if keys_only and layer is body.layers[-1]:
            break
        q, k, v = (
            part.transpose(1, 2) for part in (layer.self_attn.queries(x, cos_sin), keys[:, :end], values[:, :end])
        )
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_B1TS, enable_gqa=True)
        stream = layer.finish(residual, heads.transpose(1, 2))
    return stream
