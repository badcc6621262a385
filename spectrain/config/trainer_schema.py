"""Typed configuration of training (group ``trainer``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spectrain.config.keys import ANY_COUNT, PROCESSES, SEEDS, Section, key, require

_GREATEST_RATE = 1000.0
HeadPrecision = Literal["float32", "tf32", "bfloat16"]


@dataclass(frozen=True)
class TrainerConfig(Section, name="trainer"):
    """The training loop (group ``trainer``)."""

    epochs: int = key(3, "how often every training document is seen", at_least=1, at_most=10_000)
    max_steps: int | None = key(
        None,
        "optimizer steps after which training ends; null: epochs decide",
        at_least=1,
        example="500",
        at_most=ANY_COUNT,
    )
    devices: str = key(
        "1",
        "processes that train together, one a device; auto: all GPUs here. Under torchrun or srun these decide",
        example="auto",
    )
    strategy: Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"] = key(
        "ddp",
        "what ranks share out: ddp nothing, zero1 moments, zero2 gradients, too, zero3 and fsdp2 weights as well; zero "
        "needs DeepSpeed",
    )
    gradient_checkpointing: bool = key(
        False,
        "the backward pass runs each decoder layer again instead of keeping what is inside: less memory, slower",
    )
    compile: bool = key(
        False,
        "norms, rotary phases and SwiGLU become compiled kernels in training (torch.compile, which needs a compiler: "
        "Triton's on a GPU, C++ on a CPU); the same within rounding, some minutes at the first steps",
    )
    packed_length: int = key(
        2048, "tokens of a packed sequence, which holds whole documents", at_least=1, at_most=1 << 24
    )
    micro_batch_size: int = key(1, "packed sequences in one forward pass", at_least=1, at_most=1 << 16)
    gradient_accumulation: int = key(1, "forward passes of one optimizer step", at_least=1, at_most=1 << 16)
    optimizer: Literal["adamw", "muon"] = key(
        "adamw", "muon takes the matrices between hidden features and leaves the rest to AdamW"
    )
    learning_rate: float = key(1e-3, "greatest learning rate of AdamW", above=0, at_most=_GREATEST_RATE)
    muon_learning_rate: float = key(
        2e-3,
        "greatest learning rate of Muon, whose updates are scaled to the size of AdamW's",
        above=0,
        at_most=_GREATEST_RATE,
    )
    weight_decay: float = key(
        0.0,
        "decoupled weight decay: a step takes learning_rate × weight_decay off each matrix",
        at_least=0,
        at_most=_GREATEST_RATE,
    )
    beta1: float = key(0.9, "AdamW: decay of the mean of gradients", at_least=0, below=1)
    beta2: float = key(0.95, "AdamW: decay of the mean of squared gradients", at_least=0, below=1)
    schedule: Literal["cosine", "wsd", "constant"] = key(
        "cosine", "learning rate after the warm-up; wsd: constant, then a linear decay at the end"
    )
    warmup_fraction: float = key(
        0.04, "share of the steps in which the learning rate rises from zero", at_least=0, at_most=1
    )
    decay_fraction: float = key(
        0.2, "wsd: share of the steps, at the end, in which the learning rate falls", at_least=0, at_most=1
    )
    final_lr_fraction: float = key(
        0.0, "learning rate of the last step, as a share of the greatest", at_least=0, at_most=1
    )
    max_grad_norm: float = key(1.0, "norm to which longer gradients are cut", above=0, at_most=1e12)
    precision: Literal["auto", "float32", "bfloat16"] = key(
        "auto",
        "what training computes in; auto: bfloat16 on a GPU, float32 on a CPU. bfloat16 is by autocast, the weights "
        "themselves stay float32",
    )
    head_precision: Literal["auto", "float32", "tf32", "bfloat16"] = key(
        "auto",
        "what the target's embedding and head are held in and the teacher's products computed in, in float32 sums; "
        "tf32: held in float32, computed in TF32; auto: bfloat16 on a GPU, float32 on a CPU",
    )
    eval_every_steps: int | None = key(
        None,
        "optimizer steps between two evaluations by simulation; null: once an epoch",
        at_least=1,
        example="200",
        at_most=ANY_COUNT,
    )
    eval_documents: int = key(32, "held-out documents of one evaluation by simulation", at_least=1, at_most=ANY_COUNT)
    checkpoint_every_steps: int | None = key(
        None,
        "optimizer steps between two checkpoints; null: at every evaluation",
        at_least=1,
        example="100",
        at_most=ANY_COUNT,
    )
    keep_checkpoints: int = key(2, "newest checkpoints that are kept", at_least=1, at_most=ANY_COUNT)
    log_every_steps: int = key(1, "optimizer steps between two lines of metrics.jsonl", at_least=1, at_most=ANY_COUNT)
    loader_workers: int | None = key(
        None,
        "processes that make batches ahead of training; null: none on a CPU, 2 beside an accelerator",
        at_least=0,
        at_most=PROCESSES,
    )
    prefetch_batches: int = key(2, "batches that each of them makes ahead", at_least=1, at_most=1024)
    seed: int = key(0, "seed of the order of documents and of what training draws", at_least=0, below=SEEDS)

    def precision_on(self, accelerator: bool) -> Literal["float32", "bfloat16"]:
        """What ``precision`` is where training runs: on an accelerator or on a CPU."""
        if self.precision == "auto":
            return "bfloat16" if accelerator else "float32"
        return self.precision

    def head_precision_on(self, accelerator: bool) -> HeadPrecision:
        """What ``head_precision`` is there."""
        if self.head_precision == "auto":
            return "bfloat16" if accelerator else "float32"
        return self.head_precision

    def _check(self) -> None:
        require(
            self.optimizer != "muon" or self.strategy == "ddp",
            f"trainer.strategy={self.strategy} leaves no rank a whole matrix, which trainer.optimizer=muon levels: "
            f"take trainer.strategy=ddp or trainer.optimizer=adamw",
        )
        require(
            self.devices == "auto" or (self.devices.isdecimal() and 1 <= int(self.devices) <= PROCESSES),
            f"trainer.devices={self.devices} must be auto or 1 to {PROCESSES}",
        )
