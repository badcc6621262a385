"""Between forward and backward the host asks the device for nothing, and a step asks once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from gemma4_tools import Gemma4, random_ids
from host_synchronisations import HostSynchronisations, as_on_a_device
from mtp_tools import MtpTarget, mtp_target
from training_step import TrainingStep

from spectrain.data.packing import PackedBatch, pack_batch
from spectrain.drafters.drafter import Drafter
from spectrain.training.step_sums import StepSums
from spectrain.training.strategies import DataParallel

BLOCK = ("drafter.block.block_size=8", "drafter.block.anchors=64", "drafter.dspark.markov_rank=32")
Work = tuple[Drafter, PackedBatch]


def shipped(*arguments: str) -> Callable[[Path], Work]:
    def make(folder: Path) -> Work:
        step = TrainingStep(arguments)
        return step.drafter, step.batch

    return make


def mtp(folder: Path) -> Work:
    target = MtpTarget("mimo", mtp_target("mimo", folder), torch.float32)
    return target.drafter(), pack_batch([target.document("0011111111", 1), target.document("0111111", 2)])


def gemma4(centroids: int) -> Callable[[Path], Work]:
    def make(folder: Path) -> Work:
        gemma = Gemma4.make("dense", folder)
        texts = [random_ids(n, seed) for n, seed in ((23, 1), (9, 2))]
        batch = pack_batch([gemma.states(text[:4], text[4:], key=str(i)) for i, text in enumerate(texts)])
        return gemma.assistant(centroids), batch

    return make


KINDS: dict[str, Callable[[Path], Work]] = {
    "eagle3": shipped("drafter=eagle3", "drafter.num_layers=2"),
    "eagle3 sdpa": shipped("drafter=eagle3", "drafter.attention=sdpa"),
    "peagle": shipped("drafter=peagle"),
    "dflash": shipped("drafter=dflash", *BLOCK),
    "dflash sdpa": shipped("drafter=dflash", "drafter.attention=sdpa", *BLOCK),
    "dspark": shipped("drafter=dspark", *BLOCK),
    "dflash2": shipped("drafter=dflash2", *BLOCK),
    "d-pace": shipped("drafter=dflash", "drafter.block.d_pace=true", *BLOCK),
    "mtp": mtp,
    "gemma4": gemma4(0),
    "gemma4 with centroids": gemma4(16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_ask_for_nothing(kind: str, tmp_path: Path) -> None:
    drafter, batch = KINDS[kind](tmp_path)
    as_on_a_device(batch)
    with HostSynchronisations() as counted:
        drafter(batch).loss.backward()
    assert counted.found == []


def test_sums_of_a_step_and_its_clipped_gradients_ask_for_nothing_either(tmp_path: Path) -> None:
    """Before the one read: ``SumsOverRanks.read``, of a single tensor."""
    step = TrainingStep(("drafter=eagle3",))
    as_on_a_device(step.batch)
    accelerator = Accelerator(cpu=True)
    strategy, sums = DataParallel(step.drafter, step.config.trainer, accelerator), StepSums()
    with HostSynchronisations() as counted:
        losses = strategy.losses(step.batch)
        sums.add(losses, step.batch.num_tokens)
        strategy.backward(losses.loss, is_last=True)
        over_ranks = sums.over_ranks(accelerator)
        norm = strategy.clip(over_ranks.weight)
    assert counted.found == []
    totals, found = over_ranks.read(norm)
    assert totals.weight == float(losses.weight) and found == float(norm) > 0
    assert totals.loss == float(losses.loss.detach())


def test_the_counter_sees_what_makes_a_host_wait() -> None:
    x = torch.arange(4)
    for wait in (
        lambda: x.sum().item(),
        lambda: float(x[1]),
        lambda: bool((x > 1).any()),
        lambda: x.tolist(),
        lambda: x.nonzero(),
        lambda: x[x > 1],
        lambda: x.unique(),
        lambda: torch.bincount(x),
        lambda: x.repeat_interleave(x),
        lambda: x.masked_select(x > 1),
    ):
        with HostSynchronisations() as counted:
            wait()
        assert counted.found
    with HostSynchronisations() as counted:
        _ = x[torch.tensor([1, 2])] + x.sum()
    assert counted.found == []
