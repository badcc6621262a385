"""The training loop of block drafters, whose anchors are drawn afresh at each step: how a global batch is split, or a
run interrupted, changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_tools import DFLASH2, DSPARK, BlockOptions, random_block_drafter
from drafter_tools import MemoryStore, fit, make_trainer, random_document, trainer_config, write_store
from test_accumulation import traced
from test_resume import DyingStore, Killed, assert_same
from torch import Tensor
from two_ranks import SETTINGS

from spectrain.config.drafter_schema import BlockConfig
from spectrain.config.evaluation_schema import DecodingConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.training.trainer import Trainer

FEW = BlockConfig(anchors=6)
KINDS = [BlockOptions(reduced=True, block=FEW), replace(DSPARK, block=FEW), replace(DFLASH2, block=FEW)]
DECODING = DecodingConfig(num_speculative_tokens=2)


def documents() -> list[TargetStates]:
    masks = ["0" * (1 + i % 4) + "1" * (3 + (5 * i) % 8) for i in range(20)]
    splits = ["heldout" if i % 6 == 5 else "train" for i in range(20)]
    head = random_block_drafter().head
    return [
        random_document(mask, 3, i, head, split=split)
        for i, (mask, split) in enumerate(zip(masks, splits, strict=True))
    ]


def trainer(folder: Path, options: BlockOptions, **settings: Any) -> Trainer:
    return make_trainer(
        folder, random_block_drafter(options), MemoryStore(documents()), trainer_config(DECODING, **settings)
    )


@pytest.mark.parametrize("options", KINDS, ids=lambda options: options.method)
def test_micro_batches(tmp_path: Path, options: BlockOptions) -> None:
    traces: list[list[dict[str, Tensor]]] = []
    for accumulation, rows in ((1, 4), (2, 2), (4, 1)):
        settings = {**SETTINGS, "micro_batch_size": rows, "gradient_accumulation": accumulation, "max_grad_norm": 1e9}
        one = trainer(tmp_path / f"{accumulation}", options, **settings)
        traces.append(traced(one))
        one.fit()
    whole, *others = traces
    assert len(whole) >= 3
    for trace in others:
        for found, expected in zip(trace, whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_anchors_are_other_ones_at_every_step(tmp_path: Path) -> None:
    """With a learning rate of next to nothing, the same documents give another gradient in the second epoch."""
    settings = {**SETTINGS, "micro_batch_size": 64, "gradient_accumulation": 1, "learning_rate": 1e-12, "epochs": 2}
    one = trainer(tmp_path, KINDS[0], **settings)
    trace = traced(one)
    one.fit()
    first, second = trace
    assert any((first[name] - second[name]).abs().max() > 0.05 * first[name].abs().max() for name in first)


@pytest.mark.parametrize("options", KINDS, ids=lambda options: options.method)
@pytest.mark.slow
def test_killed_anywhere_and_resumed(tmp_path: Path, options: BlockOptions) -> None:
    store = write_store(tmp_path / "hidden_states", documents(), (1, 3, 4))
    settings = trainer_config(
        DECODING,
        epochs=4,
        packed_length=14,
        micro_batch_size=2,
        gradient_accumulation=2,
        checkpoint_every_steps=3,
        eval_every_steps=4,
        learning_rate=3e-3,
    )
    fit(tmp_path / "whole", random_block_drafter(options, dtype=torch.float32), store, settings)
    kills = 0
    for is_alive in (1, 21, 24, 22, 10_000):
        try:
            fit(
                tmp_path / "killed",
                random_block_drafter(options, dtype=torch.float32),
                DyingStore(store, is_alive),
                settings,
            )
        except Killed:
            kills += 1
    assert kills >= 3
    assert_same(tmp_path / "killed", tmp_path / "whole")
