"""The EAGLE-3 drafter: the architecture of ``eagle3.py`` behind the interface of every drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.config.drafter_schema import LossConfig
from spectrain.data.packing import PackedBatch
from spectrain.data.vocab import DraftVocab
from spectrain.decoding.proposers import Observation, Proposal
from spectrain.decoding.sampling import SamplingParams, sample, truncated_log_probs
from spectrain.drafters.autoregressive import draft_steps as decode
from spectrain.drafters.autoregressive.eagle3 import Eagle3Body, Eagle3Shape
from spectrain.drafters.autoregressive.eagle3_init import closed_form_init
from spectrain.drafters.autoregressive.unroll import Columns, by_teacher, unroll
from spectrain.drafters.base import Advance, Batches, Drafter, DraftScores
from spectrain.drafters.drafter_cache import draft_uniforms
from spectrain.drafters.layers import Rotary
from spectrain.drafters.losses.fused import LossSums, draft_loss
from spectrain.drafters.teacher_forced import accept_probability
from spectrain.target.cpu_kernels import linear
from spectrain.target.families import at_least_float32


class Eagle3(Drafter):
    """EAGLE-3 with any number of taps. ``steps`` are unrolled in training; drafting can go further."""

    method = "eagle3"
    shape: Eagle3Shape
    body: Eagle3Body

    def __init__(
        self,
        shape: Eagle3Shape,
        vocab: DraftVocab,
        steps: int = 3,
        loss: LossConfig | None = None,
        attention: str = "auto",
    ) -> None:
        super().__init__(shape, vocab, loss, attention)
        self.steps = steps
        self.body = Eagle3Body(shape)
        self.rotary = Rotary(shape.layer)

    @property
    def training_steps(self) -> int:
        return self.steps

    def closed_form_init(self, batches: Batches, advance: Advance = lambda percent: None) -> int:
        return closed_form_init(self.body, self.head, batches, self.steps, self.loss.step_decay, advance)

    def train_losses(self, batch: PackedBatch) -> LossSums:
        columns = Columns.build(batch, self.steps)
        hidden_KMH = unroll(self.body, self.rotary, self.head, batch, columns, self.attention_backend(batch))
        students = by_teacher(hidden_KMH, columns.weights(self.loss.step_decay), columns, batch.num_tokens)
        sums = draft_loss(
            students.hidden_KUH,
            self.lm_head_DH,
            self.teacher(batch, students.teacher_U),
            self.target_to_draft_V[batch.input_ids_T[students.teacher_U + 1]],
            students.weight_KU,
            self.loss.weights,
        )
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
        hidden_KMH = unroll(self.body, self.rotary, self.head, batch, columns, self.attention_backend(batch))
        students = by_teacher(hidden_KMH, columns.valid_KM.float(), columns, batch.num_tokens)
        accept_KU = accept_probability(
            students.hidden_KUH,
            self.lm_head_DH,
            self.teacher(batch, students.teacher_U),
            batch.input_ids_T[students.teacher_U + 1],
            self.vocab if self.shape.owns_head else None,
            sampling,
            draft_sampling,
        )
        # Back from teachers to anchors: slot k of the anchor at t + 1 asked the teacher at t + 1 + k.
        index_T = torch.zeros(batch.num_tokens + num_tokens, dtype=torch.long, device=columns.query_M.device)
        index_T[students.teacher_U] = torch.arange(len(students.teacher_U), device=index_T.device)
        anchor_R = columns.query_M + 1
        accept_RK = torch.stack([accept_KU[k, index_T[anchor_R + k]] for k in range(num_tokens)], dim=1)
        return DraftScores(anchor_R, accept_RK * columns.valid_KM.T)

    def new_cache(self, batch_size: int) -> decode.AutoregressiveCache:
        return decode.new_cache(self.body, batch_size)

    @torch.no_grad()
    def observe(self, cache: decode.AutoregressiveCache, observation: Observation) -> None:
        decode.observe(self.body, self.rotary, self.head, cache, observation)

    @torch.no_grad()
    def propose(
        self,
        cache: decode.AutoregressiveCache,
        anchor_B: Tensor,
        n: int,
        sampling: SamplingParams,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Proposal:
        uniforms_Bn = draft_uniforms(generators, n, anchor_B) if not sampling.greedy else None
        steps = decode.DraftSteps(self.body, self.rotary, self.head, cache, anchor_B, n)
        ids, log_probs = [], []
        for k, normed_BH in enumerate(steps):
            logits_BD = at_least_float32(linear(normed_BH, self.lm_head_DH.to(normed_BH.dtype)))
            if sampling.greedy:
                draft_B = logits_BD.argmax(-1)
            else:
                assert uniforms_Bn is not None
                log_p_BD = truncated_log_probs(logits_BD, sampling)
                draft_B = sample(log_p_BD.exp(), uniforms_Bn[:, k])
                full_BV = log_p_BD.new_full((len(log_p_BD), self.vocab.target_size), float("-inf"))
                log_probs.append(full_BV.index_copy_(1, self.draft_ids_D, log_p_BD))
            steps.token_B = self.draft_ids_D[draft_B]
            ids.append(steps.token_B)
        return Proposal(ids=torch.stack(ids, dim=1), log_probs=torch.stack(log_probs, dim=1) if log_probs else None)

    def select(self, cache: decode.AutoregressiveCache, rows: Tensor) -> decode.AutoregressiveCache:
        cache.select(rows)
        return cache
