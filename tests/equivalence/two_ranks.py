"""One of two processes that train together, one drafter after the other; started by ``test_accumulation.py``, which
trains the same alone.

Usage: two_ranks.py FOLDER, with RANK, WORLD_SIZE and the address of the first process in the environment.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from block_tools import DSPARK, random_block_drafter
from drafter_tools import (
    MemoryStore,
    Options,
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

OPTIONS = Options(reduced=True, layer_type="qwen3")
METHODS = ("eagle3", "dspark")
DOCUMENTS = 14  # nine rows an epoch: two steps of four, and one row for one rank alone
SETTINGS: dict[str, Any] = {
    "packed_length": 16,
    "epochs": 2,
    "gradient_accumulation": 2,
    "learning_rate": 1e-3,
    "eval_every_steps": 2,
    "warmup_fraction": 0.0,
}


def fresh_drafter(method: str) -> Drafter:
    """``dspark``: with fewer anchors a row than there are, so that they are drawn."""
    return (
        random_drafter(OPTIONS)
        if method == "eagle3"
        else random_block_drafter(replace(DSPARK, block=BlockConfig(anchors=6)))
    )


def documents(head: TargetHead) -> list[TargetStates]:
    """Training documents of very different weight, and three held-out ones."""
    masks = ["0" * (1 + i % 5) + "1" * (2 + (7 * i) % 8) for i in range(DOCUMENTS)]
    splits = ["train"] * DOCUMENTS + ["heldout"] * 3
    return [
        random_document(mask, 3, i, head, split=split)
        for i, (mask, split) in enumerate(zip(masks + masks[:3], splits, strict=True))
    ]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with joined() as ranks:
        train_all(folder, ranks)


def train_all(folder: Path, ranks: Ranks) -> None:
    accelerator = Accelerator()
    assert accelerator.num_processes == ranks.count == 2
    for method in METHODS:
        drafter, into = fresh_drafter(method), folder / method
        trainer = make_trainer(
            into,
            drafter,
            MemoryStore(documents(drafter.head)),
            trainer_config(**SETTINGS),
            accelerator=accelerator,
            ranks=ranks,
        )
        trainer.fit()
        save_file(
            {name: p.detach() for name, p in tensors_of(drafter).items()},
            into / f"weights-{accelerator.process_index}.safetensors",
        )
        if accelerator.process_index == 1:
            steps = range(trainer.sampler.total_steps)
            empty = sum(not micro for step in steps for micro in trainer.sampler[step].micro_batches)
            save_file({"passes_without_rows": torch.tensor(empty)}, into / "ranks.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
