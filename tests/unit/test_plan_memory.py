"""What ``plan`` says of memory, beside a count of every tensor of real training steps on a CPU."""

from __future__ import annotations

import pytest
from tensor_memory import TensorMemory
from training_step import TrainingStep

from spectrain.config.loading import compose
from spectrain.drafters.registry import find_method
from spectrain.drafters.training_cost import BatchSize
from spectrain.stages.training_memory import STRATEGIES, DrafterSize, Pass, rank_memory
from spectrain.target.spec import TargetSpec

BLOCK = ("drafter.block.block_size=8", "drafter.block.anchors=128", "drafter.dspark.markov_rank=32")


def count_and_estimate(*arguments: str) -> tuple[float, float]:
    """(peak bytes of the third step, those of the account)."""
    step = TrainingStep(arguments)
    with TensorMemory(*step.given) as memory:
        for _ in range(3):
            memory.restart()
            step.run()
    moments = step.planned().moments
    return memory.peak, max(moments["forward"], moments["backward"])


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
@pytest.mark.slow
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
@pytest.mark.slow
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
