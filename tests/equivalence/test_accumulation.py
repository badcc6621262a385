"""One global batch, split over 1, 2, 4 micro-batches or over two processes: the same gradients, step by step, and the
same drafter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from drafter_tools import (
    MemoryStore,
    Options,
    gradients,
    make_trainer,
    packed,
    random_document,
    random_drafter,
    tensors_of,
    trainer_config,
)
from safetensors.torch import load_file
from torch import Tensor
from two_ranks import METHODS, OPTIONS, SETTINGS, documents, fresh_drafter, two_ranks

from spectrain.drafters import layers
from spectrain.training.trainer import Trainer


def traced(trainer: Trainer) -> list[dict[str, Tensor]]:
    """Gradients as the optimiser gets them, one dictionary a step, filled while the trainer runs."""
    trace: list[dict[str, Tensor]] = []
    trainer.strategy.optimizers[0].register_step_pre_hook(lambda *_: trace.append(gradients(trainer.drafter)))
    return trace


def train(
    folder: Path, method: str = "eagle3", **options: Any
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], list[dict[str, Any]]]:
    drafter = fresh_drafter(method)
    trainer = make_trainer(
        folder, drafter, MemoryStore(documents(drafter.head)), trainer_config(**{**SETTINGS, **options})
    )
    trace = traced(trainer)
    trainer.fit()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return trace, {name: p.detach() for name, p in tensors_of(drafter).items()}, lines


@pytest.mark.parametrize("clip", [1e9, 0.05], ids=["unclipped", "clipped"])
def test_micro_batches(tmp_path: Path, clip: float) -> None:
    whole_trace, whole, whole_lines = train(
        tmp_path / "1", micro_batch_size=4, gradient_accumulation=1, max_grad_norm=clip
    )
    assert len(whole_trace) == len([line for line in whole_lines if "loss" in line]) >= 4
    for accumulation, rows in ((2, 2), (4, 1)):
        trace, weights, lines = train(
            tmp_path / f"{accumulation}", micro_batch_size=rows, gradient_accumulation=accumulation, max_grad_norm=clip
        )
        for found, expected in zip(trace, whole_trace, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(weights, whole, rtol=1e-6, atol=1e-8)
        assert_same_metrics(lines, whole_lines)


def assert_same_metrics(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, two in zip(found, expected, strict=True):
        assert set(one) == set(two)
        for name in set(one) - {"tokens_per_s", "data_wait_share", "simulation_s"}:
            assert one[name] == pytest.approx(two[name], rel=1e-5, abs=1e-9), name


def test_a_steps_gradient_is_the_mean_over_all_that_counts_in_the_global_batch(tmp_path: Path) -> None:
    """Not a mean of micro-batch means: micro-batches hold different numbers of counted positions."""
    drafter = random_drafter(OPTIONS)
    settings = {**SETTINGS, "micro_batch_size": 1, "gradient_accumulation": 4, "max_grad_norm": 1e9, "max_steps": 1}
    store = MemoryStore(documents(drafter.head))
    trainer = make_trainer(tmp_path, drafter, store, trainer_config(**settings))
    micro_batches = trainer.sampler[0].micro_batches
    assert len(micro_batches) == 4
    weights, sums = [], {}
    for micro in micro_batches:
        losses = drafter.train_losses(packed([store[trainer.train[d]] for d in micro]))
        weights.append(float(losses.weight))
        losses.loss.backward()
    sums = gradients(drafter)
    drafter.zero_grad(set_to_none=True)
    assert max(weights) > 1.5 * min(weights)
    trace = traced(trainer)
    trainer.fit()
    expected = {name: gradient / sum(weights) for name, gradient in sums.items()}
    torch.testing.assert_close(trace[0], expected, rtol=1e-6, atol=1e-10)


def test_a_micro_batch_without_answers_does_not_dilute_the_others(tmp_path: Path) -> None:
    options = Options()
    traces = []
    for masks in (["0001111"], ["0001111", "0000000"]):
        drafter = random_drafter(options)
        texts = [random_document(mask, 3, i, drafter.head) for i, mask in enumerate(masks)]
        config = trainer_config(packed_length=7, gradient_accumulation=2, epochs=1)
        trainer = make_trainer(tmp_path / masks[-1], drafter, MemoryStore(texts), config)
        traces.append(traced(trainer))
        trainer.fit()
    torch.testing.assert_close(traces[1][0], traces[0][0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_gradient_checkpointing_changes_nothing(tmp_path: Path, method: str) -> None:
    """Bit for bit: the same products are made, some of them twice."""
    traces = []
    for option in (False, True):
        with patch.object(layers, "checkpoint", wraps=layers.checkpoint) as spy:
            trace, weights, lines = train(tmp_path / str(option), method, gradient_checkpointing=option)
        assert bool(spy.call_count) == option
        traces.append((trace, weights, [line.get("loss") for line in lines]))
    (kept, kept_weights, kept_losses), (again, again_weights, again_losses) = traces
    assert again_losses == kept_losses
    for one, two in zip(kept, again, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(torch.equal(kept_weights[name], again_weights[name]) for name in kept_weights)


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    """Two ranks of the gloo backend, with an epoch that ends on a step for which the second rank has no rows."""
    with two_ranks(tmp_path / "two"):
        alone = {
            method: train(tmp_path / "one" / method, method, micro_batch_size=4, gradient_accumulation=1)
            for method in METHODS
        }
    for method, (_, one, one_lines) in alone.items():
        folder = tmp_path / "two/ddp" / method
        first, second = (load_file(folder / f"weights-{rank}.safetensors") for rank in range(2))
        assert set(first) == set(one)
        assert all(torch.equal(first[name], second[name]) for name in first)
        torch.testing.assert_close(first, one, rtol=1e-5, atol=1e-7)
        assert_same_metrics(
            [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], one_lines
        )
        assert load_file(folder / "ranks.safetensors")["passes_without_rows"].item() > 0
