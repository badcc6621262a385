"""What ``plan`` says of memory, beside a count of every tensor of real training steps on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensor_memory import TensorMemory
from transformers import Qwen3Config

from spectrain.config.loading import compose
from spectrain.data.packing import Draw, PackedBatch
from spectrain.data.vocab import full_vocab
from spectrain.drafters.registry import BatchSize, find_method
from spectrain.stages.training_memory import STRATEGIES, DrafterSize, Pass, rank_memory
from spectrain.target.families import FAMILIES, HeadMath
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec
from spectrain.training.optim import build_optimizers
from spectrain.training.strategies import sharded_layers

HIDDEN, VOCAB, TOKENS, DOCUMENTS, ANSWERED = 128, 1000, 512, 4, 0.8
BLOCK = ("drafter.block.block_size=8", "drafter.block.anchors=128", "drafter.dspark.markov_rank=32")


def count_and_estimate(*arguments: str) -> tuple[float, float]:
    """(peak bytes of the third step, those of the account)."""
    config = compose(["recipe=quickstart", "drafter.draft_vocab_size=null", "drafter.taps=[2,6,9]", *arguments])
    spec = TargetSpec.from_config(
        Qwen3Config(
            hidden_size=HIDDEN,
            intermediate_size=3 * HIDDEN,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=VOCAB,
            num_hidden_layers=12,
        )
    )
    method = find_method(config.drafter.method)
    drafter = method.build(method.shape(config.drafter, spec), full_vocab(VOCAB), config.drafter)
    drafter.reset(torch.Generator().manual_seed(0))
    math = HeadMath(family=FAMILIES["llama"], hidden_size=HIDDEN, eps=1e-6, embed_scale=1.0, soft_cap=None)
    head = TargetHead(math, torch.randn(VOCAB, HIDDEN), torch.ones(HIDDEN), torch.randn(VOCAB, HIDDEN) * 0.05)
    drafter.attach(head)
    for layer in sharded_layers(drafter):
        layer.recompute = config.trainer.gradient_checkpointing
    number_bytes = 2 if config.trainer.precision == "bfloat16" else 4
    states = torch.bfloat16 if number_bytes == 2 else torch.float32
    length = TOKENS // DOCUMENTS
    position_T = torch.arange(length).repeat(DOCUMENTS)
    batch = PackedBatch(
        torch.randint(0, VOCAB, (TOKENS,)),
        position_T >= int(length * (1 - ANSWERED)),
        position_T,
        torch.arange(DOCUMENTS).repeat_interleave(length),
        torch.randn(TOKENS, 3, HIDDEN, dtype=states),
        torch.randn(TOKENS, HIDDEN, dtype=states),
        torch.full((TOKENS,), 7.0),
        Draw(0, 0, tuple(range(DOCUMENTS)), TOKENS),
    )
    optimizers = build_optimizers(drafter, config.trainer)
    given = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    with TensorMemory(*drafter.parameters(), *head.buffers(), *given) as memory:
        for _ in range(3):
            memory.restart()
            with torch.autocast("cpu", torch.bfloat16, enabled=number_bytes == 2):
                losses = drafter(batch)
            losses.loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            del losses
    rows = method.training_rows(
        config.drafter, replace(config.trainer, packed_length=TOKENS), BatchSize(TOKENS, TOKENS * ANSWERED)
    )
    keys = length * (1 - ANSWERED / 2)
    work = Pass(
        rows, TOKENS, keys, config.drafter.attention.replace("auto", "eager"), number_bytes, number_bytes, False
    )
    work = replace(work, recompute=config.trainer.gradient_checkpointing)
    estimate = rank_memory(size_of(drafter, config.drafter.num_layers), work, work, ranks=1)
    moments = estimate.moments
    return memory.peak, max(moments["forward"], moments["backward"])


def size_of(drafter: torch.nn.Module, layers: int) -> DrafterSize:
    every = list(drafter.parameters())
    return DrafterSize(
        layer=drafter.shape.layer,
        num_layers=layers,
        num_taps=3,
        parameters=sum(p.numel() for p in every),
        trained=sum(p.numel() for p in every),
        matrix_entries=sum(p.numel() for p in every if p.ndim > 1),
        largest_layer=0,
        momentum_only=0,
        draft_vocab=VOCAB,
        head_entries=2 * VOCAB * HIDDEN,
        owns_head=False,
        trains_head=False,
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("drafter=eagle3",),
        ("drafter=eagle3", "drafter.num_layers=2", "drafter.layer_type=llama"),
        ("drafter=eagle3", "drafter.autoregressive.ttt_steps=6"),
        ("drafter=peagle", "drafter.num_layers=2"),
        ("drafter=dflash", "drafter.num_layers=1", *BLOCK),
        ("drafter=dflash", "drafter.num_layers=3", "drafter.attention=sdpa", *BLOCK),
        ("drafter=dspark", "drafter.num_layers=2", *BLOCK),
        ("drafter=dflash2", "drafter.num_layers=2", *BLOCK),
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_a_step_takes_what_the_plan_says(arguments: tuple[str, ...], precision: str) -> None:
    counted, estimated = count_and_estimate(*arguments, f"trainer.precision={precision}")
    assert estimated == pytest.approx(counted, rel=0.2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("drafter=eagle3", "drafter.num_layers=2", "drafter.layer_type=llama"),
        ("drafter=eagle3", "drafter.autoregressive.ttt_steps=6"),
        ("drafter=dflash", "drafter.num_layers=3", "drafter.attention=sdpa", *BLOCK),
        ("drafter=dspark", "drafter.num_layers=4", *BLOCK),
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_gradient_checkpointing_takes_less_and_what_the_plan_says(arguments: tuple[str, ...], precision: str) -> None:
    common = (*arguments, f"trainer.precision={precision}")
    kept, _ = count_and_estimate(*common)
    counted, estimated = count_and_estimate(*common, "trainer.gradient_checkpointing=true")
    assert counted < 0.8 * kept
    assert estimated == pytest.approx(counted, rel=0.25)


def test_strategies_share_out_what_they_are_named_for() -> None:
    """By hand: 4 bytes of weights and gradients and 8 of moments a parameter, a bucket for every gradient under DDP."""
    config = compose(["recipe=dflash_quickstart", "drafter.draft_vocab_size=null"])
    method, spec = find_method("dflash"), TargetSpec.from_fields({"model_type": "qwen3"}, "test")
    shape = method.shape(config.drafter, spec)
    size = DrafterSize(shape.layer, 2, 5, 1000, 1000, 1000, 100, 0, spec.vocab_size, 0, False, False, 30)
    work = Pass(
        method.training_rows(config.drafter, config.trainer, BatchSize(1024, 800)), 1024, 100, "flex", 4, 4, True
    )
    found = {name: rank_memory(size, work, work, 4, name) for name in STRATEGIES}
    held = {name: (m.lasting["weights"], m.gradients, m.lasting["moments"]) for name, m in found.items()}
    assert held == {
        "ddp": (4000, 4000, 8000),
        "zero1": (4000, 4000, 2000),
        "zero2": (4000, 1000, 2000),
        "zero3": (1000, 1000, 2000),
        "fsdp2": (1000, 1000, 2000),
    }
    assert found["ddp"].lasting["buckets"] == 4000 and found["fsdp2"].lasting["buckets"] == 0
    # ZeRO's optimiser has a copy of the weights that it moves; an evaluation runs a whole drafter.
    assert {name: m.lasting["engine's weights"] for name, m in found.items() if name.startswith("zero")} == {
        f"zero{stage}": 1000 for stage in (1, 2, 3)
    }
    assert found["fsdp2"].evaluation["whole weights"] == 4000 and found["zero2"].evaluation["whole weights"] == 0
    assert found["fsdp2"].lasting["gathered layers"] == 4 * (2 * 100 + 30)
