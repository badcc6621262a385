"""One of two processes that train together, one drafter after the other; started by tests that train the same alone.

Usage: two_ranks.py FOLDER [STRATEGY or BEFORE:STRATEGY …], with RANK, WORLD_SIZE and the address of the first process
in the environment. Without strategies: ddp, in float64. BEFORE:STRATEGY goes on from a checkpoint that BEFORE wrote;
STRATEGY+ is with gradient checkpointing.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from block_tools import DSPARK, random_block_drafter
from drafter_tools import (
    MemoryStore,
    Options,
    as_dtype,
    make_trainer,
    random_document,
    random_drafter,
    tensors_of,
    trainer_config,
)
from safetensors.torch import save_file

from spectrain.config.drafter_schema import BlockConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.drafters.drafter import Drafter
from spectrain.target.head import TargetHead
from spectrain.training.distributed import Ranks, joined
from spectrain.training.zero import Zero

OPTIONS = Options(reduced=True, layer_type="qwen3")
METHODS = ("eagle3", "dspark")
DOCUMENTS = 14  # nine rows an epoch: two steps of four, and one row for one rank alone
SETTINGS: dict[str, Any] = {
    "packed_length": 16,
    "epochs": 2,
    "gradient_accumulation": 2,
    "learning_rate": 1e-3,
    "eval_every_steps": 2,
    "checkpoint_every_steps": 1,
    "keep_checkpoints": 9,
    "weight_decay": 0.1,
    "max_grad_norm": 0.25,
    "warmup_fraction": 0.0,
}


RESUMED_AT = 2  # steps


def fresh_drafter(method: str, dtype: torch.dtype = torch.float64) -> Drafter:
    """``dspark``: with fewer anchors a row than there are, so that they are drawn."""
    return (
        random_drafter(OPTIONS, dtype=dtype)
        if method == "eagle3"
        else random_block_drafter(replace(DSPARK, block=BlockConfig(anchors=6)), dtype=dtype)
    )


def documents(head: TargetHead) -> list[TargetStates]:
    """Training documents of very different weight, and three held-out ones."""
    return [as_dtype(states, head.lm_head_weight.dtype) for states in _documents(head)]


def _documents(head: TargetHead) -> list[TargetStates]:
    masks = ["0" * (1 + i % 5) + "1" * (2 + (7 * i) % 8) for i in range(DOCUMENTS)]
    splits = ["train"] * DOCUMENTS + ["heldout"] * 3
    return [
        random_document(mask, 3, i, head, split=split)
        for i, (mask, split) in enumerate(zip(masks + masks[:3], splits, strict=True))
    ]


@contextmanager
def two_ranks(folder: Path, *strategies: str) -> Iterator[list[str]]:
    """Both processes at work; at the end they must have succeeded. The list holds what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), *strategies],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said: list[str] = []
    try:
        yield said
        said += [process.communicate(timeout=480)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)


def main(folder: Path, strategies: list[str]) -> None:
    torch.set_num_threads(1)
    with joined() as ranks, patch.object(Zero, "_settings", partialmethod(_let_go, Zero._settings)):
        for strategy in strategies or ["ddp"]:
            for method in METHODS:
                into = folder / strategy / method
                before, _, strategy_name = strategy.rpartition(":")
                if before and ranks.is_first:
                    name = f"checkpoints/step-{RESUMED_AT:08d}"
                    shutil.copytree(folder / before / method / name, into / name)
                    shutil.copytree(folder / before / method / "drafter", into / "drafter")
                ranks.wait()
                dtype = torch.float32 if strategies else torch.float64
                train(into, fresh_drafter(method, dtype), strategy_name, ranks)


def _let_go(zero: Zero, settings: Callable[[Zero], dict[str, Any]]) -> dict[str, Any]:
    """DeepSpeed would keep parameters as small as these on every rank."""
    found = settings(zero)
    found["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return found


def train(into: Path, drafter: Drafter, strategy: str, ranks: Ranks) -> None:
    accelerator = Accelerator()
    assert accelerator.num_processes == ranks.count == 2
    trainer = make_trainer(
        into,
        drafter,
        MemoryStore(documents(drafter.head)),
        trainer_config(**SETTINGS, strategy=strategy.rstrip("+"), gradient_checkpointing=strategy.endswith("+")),
        accelerator=accelerator,
        ranks=ranks,
    )
    trainer.fit()
    with trainer.strategy.whole() as whole:
        save_file(
            {name: p.detach().clone() for name, p in tensors_of(whole).items()},
            into / f"weights-{accelerator.process_index}.safetensors",
        )
        if accelerator.process_index == 1:
            steps = range(trainer.sampler.total_steps)
            empty = sum(not micro for step in steps for micro in trainer.sampler[step].micro_batches)
            save_file({"passes_without_rows": torch.tensor(empty)}, into / "ranks.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
