"""One training step of any shipped drafter beside a target of any size that nobody has: random weights, random states,
which cost what real ones cost. What memory, speed and synchronisations are measured on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import Qwen3Config

from spectrain.config.loading import compose
from spectrain.config.schema import SpectrainConfig
from spectrain.data.packing import Draw, PackedBatch
from spectrain.data.vocab import full_vocab
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.losses import LossSums
from spectrain.drafters.registry import find_method
from spectrain.drafters.training_cost import BatchSize
from spectrain.stages.training_memory import DrafterSize, Pass, RankMemory, rank_memory
from spectrain.target.families import FAMILIES, HeadMath
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec
from spectrain.training.optim import build_optimizers
from spectrain.training.strategies import sharded_layers

TAPS = (2, 6, 9)


@dataclass(frozen=True)
class TargetSize:
    """Of a target; the defaults are small enough for a test."""

    hidden: int = 128
    intermediate: int = 384
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 1000


QWEN3_8B = TargetSize(4096, 12288, 32, 8, 128, 151936)


@dataclass(frozen=True)
class Text:
    """Of a micro-batch: documents of equal length, of which the target generated the last part."""

    tokens: int = 512
    documents: int = 4
    answered: float = 0.8

    @property
    def length(self) -> int:
        return self.tokens // self.documents


class TrainingStep:
    """A drafter and its optimisers, and the batch that every step runs."""

    def __init__(
        self,
        arguments: Sequence[str],
        size: TargetSize = TargetSize(),
        text: Text = Text(),
        device: str = "cpu",
    ) -> None:
        """``arguments``: as on the command line, ``drafter=NAME`` first."""
        common = ["recipe=quickstart", "drafter.draft_vocab_size=null", f"trainer.packed_length={text.tokens}"]
        taps = f"drafter.taps=[{','.join(map(str, TAPS))}]"
        self.config: SpectrainConfig = compose([*common, taps, *arguments])
        self.text, self.size, self.device = text, size, torch.device(device)
        precision = self.config.trainer.precision_on(self.device.type != "cpu")
        self.bfloat16 = precision == "bfloat16"
        self.method = find_method(self.config.drafter.method)
        shape = self.method.shape(self.config.drafter, _spec(size))
        with self.device:
            torch.manual_seed(0)
            self.drafter: Drafter = self.method.build(shape, full_vocab(size.vocab), self.config.drafter)
            self.drafter.reset(torch.Generator(self.device).manual_seed(0))
            held_in = self.config.trainer.head_precision_on(self.device.type != "cpu")
            self.drafter.attach(_head(size).held_in(held_in))
            self.batch = self._batch()
        for layer in sharded_layers(self.drafter):
            layer.recompute = self.config.trainer.gradient_checkpointing
        self.optimizers = build_optimizers(self.drafter, self.config.trainer)

    def _batch(self) -> PackedBatch:
        states = torch.bfloat16 if self.bfloat16 else torch.float32
        tokens, documents, length = self.text.tokens, self.text.documents, self.text.length
        position_T = torch.arange(length).repeat(documents)
        return PackedBatch(
            torch.randint(0, self.size.vocab, (tokens,)),
            position_T >= int(length * (1 - self.text.answered)),
            position_T,
            torch.arange(documents).repeat_interleave(length),
            torch.randn(tokens, len(TAPS), self.size.hidden, dtype=states),
            torch.randn(tokens, self.size.hidden, dtype=states),
            torch.full((tokens,), 7.0),
            Draw(0, 0, tuple(range(documents)), tokens),
        )

    @property
    def given(self) -> list[Tensor]:
        """What is there before the first step."""
        batch = [value for value in vars(self.batch).values() if isinstance(value, Tensor)]
        return [*self.drafter.parameters(), *self.drafter.head.buffers(), *batch]

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16)

    def forward(self) -> LossSums:
        with self.autocast():
            return self.drafter(self.batch)

    def run(self) -> None:
        losses = self.forward()
        losses.loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def planned(self) -> RankMemory:
        """What ``plan`` says of a step's memory."""
        tokens, trainer = self.text.tokens, self.config.trainer
        batch = BatchSize(tokens, tokens * self.text.answered)
        rows = self.method.training_rows(self.config.drafter, replace(trainer, packed_length=tokens), batch)
        accelerator = self.device.type != "cpu"
        attention = self.config.drafter.attention.replace("auto", "flex" if accelerator else "eager")
        number_bytes = 2 if self.bfloat16 else 4
        keys = self.text.length * (1 - self.text.answered / 2)
        work = Pass(rows, tokens, keys, attention, number_bytes, number_bytes, accelerator)
        work = replace(work, recompute=trainer.gradient_checkpointing)
        return rank_memory(self._drafter_size(), work, work, ranks=1)

    def _drafter_size(self) -> DrafterSize:
        every = list(self.drafter.parameters())
        entries = sum(p.numel() for p in every)
        return DrafterSize(
            layer=self.drafter.shape.layer,
            num_layers=self.config.drafter.num_layers,
            num_taps=len(TAPS),
            parameters=entries,
            trained=entries,
            matrix_entries=sum(p.numel() for p in every if p.ndim > 1),
            largest_layer=0,
            momentum_only=0,
            draft_vocab=self.size.vocab,
            head_entries=2 * self.size.vocab * self.size.hidden,
            owns_head=False,
            trains_head=False,
            head_bytes=self.drafter.head.embed_weight.element_size(),
        )


def _spec(size: TargetSize) -> TargetSpec:
    return TargetSpec.from_config(
        Qwen3Config(
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            head_dim=size.head_dim,
            vocab_size=size.vocab,
            num_hidden_layers=12,
        )
    )


def _head(size: TargetSize) -> TargetHead:
    math = HeadMath(family=FAMILIES["llama"], hidden_size=size.hidden, eps=1e-6, embed_scale=1.0, soft_cap=None)
    embedding, lm_head = torch.randn(size.vocab, size.hidden), torch.randn(size.vocab, size.hidden) * 0.05
    return TargetHead(math, embedding, torch.ones(size.hidden), lm_head)
