"""What all autoregressive drafters share: one step makes one token, and step k is fed what step k − 1 made.

A kind says how its steps are unrolled over a text (``unroll``) and how they go on from a cache (``draft_steps``);
losses, scores and drafting are the same for all.

Legend: B rows, M counted columns, K steps, U teacher positions, R anchors, H hidden, D draft vocabulary, V target
vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.schema import TrainerConfig
from spectrain.data.packing import PackedBatch
from spectrain.decoding.proposers import Proposal
from spectrain.decoding.sampling import SamplingParams, sample, truncated_log_probs
from spectrain.drafters.autoregressive.unroll import Columns, by_teacher
from spectrain.drafters.drafter import Drafter, DraftScores
from spectrain.drafters.drafter_cache import draft_uniforms
from spectrain.drafters.losses import LossSums, draft_loss
from spectrain.drafters.registry import CorpusSize, DrafterMethod, TrainingCost
from spectrain.drafters.teacher_forced import accept_probability
from spectrain.target.cpu_kernels import linear
from spectrain.target.families import at_least_float32

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

    @property
    def training_steps(self) -> int:
        return self.config.autoregressive.ttt_steps

    def train_losses(self, batch: PackedBatch) -> LossSums:
        columns = Columns.build(batch, self.training_steps)
        hidden_KMH = self.unroll(batch, columns)
        weight_KM = columns.weights(self.config.autoregressive.step_decay)
        students = by_teacher(hidden_KMH, weight_KM, columns, batch.num_tokens)
        sums = draft_loss(
            students.hidden_KUH,
            self.lm_head_DH,
            self.teacher(batch, students.teacher_U),
            self.target_to_draft_V[batch.input_ids_T[students.teacher_U + 1]],
            students.weight_KU,
            self.loss,
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
        hidden_KMH = self.unroll(batch, columns)
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
            logits_BD = at_least_float32(linear(normed_BH, self.lm_head_DH.to(normed_BH.dtype)))
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
