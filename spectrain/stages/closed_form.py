"""The closed-form initialisation in a training: on the device of each rank, its text divided among the ranks, within
the time that it is given; and what it will take, for ``plan``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from spectrain.console import ProgressBar, say
from spectrain.data.hidden_states import HiddenStateSource
from spectrain.data.loader import announce
from spectrain.data.packing import PackedBatch, pack_batch, pack_rows
from spectrain.drafters.drafter import Advance, Batches, Drafter
from spectrain.drafters.registry import find_method
from spectrain.drafters.shared_solving import Peers, SharedText, shared
from spectrain.training.distributed import ALONE

if TYPE_CHECKING:
    from spectrain.stages.context import Context
    from spectrain.stages.plan import MachineSpeed

INIT_PACKED_LENGTH = 4096
_SHARE = 0.6  # of what a large product reaches


def init_closed_form(context: Context, drafter: Drafter, store: HiddenStateSource, train: Sequence[int]) -> None:
    """Solve for the drafter's initial weights on training documents. Every rank calls it; a kind that cannot share the
    work leaves it to the first one, whose weights the trainer gives the others.
    """
    ranks, seconds = context.ranks, context.config.drafter.init_seconds
    if not drafter.solves_together:
        ranks.from_first(lambda: _solve(drafter, _text(store, train, ALONE)))
        return
    operations = None
    if seconds is not None:
        operations = seconds * _SHARE * min(ranks.gathered(_measured_flops_per_s(_device()))) * ranks.count
    _solve(drafter, _text(store, train, ranks, operations))


def _solve(drafter: Drafter, text: SharedText) -> None:
    what = "closed form: regression of the drafter's matrices on the training text"
    with ProgressBar("init", total=100, unit="%", note=what) as bar:
        positions = solve_on(_device(), drafter, text, bar.advance)
    alone = "cannot be solved for with these hidden states (too few?), so the drafter begins with parts of the target"
    note = f"solved at {positions:,} positions of the text" if positions else alone
    say(f"fit: closed-form initialisation {note}")


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _measured_flops_per_s(device: torch.device) -> float:
    """Of a large product in float32, as those of the initialisation are."""
    size, best = 1024 if device.type == "cpu" else 8192, float("inf")
    square = torch.randn(size, size, device=device, generator=torch.Generator(device).manual_seed(0))
    for _ in range(4):
        started = time.perf_counter()
        _ = square @ square
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def _text(store: HiddenStateSource, train: Sequence[int], peers: Peers, operations: float | None = None) -> SharedText:
    """Of the training documents, in packed sequences of which this process has every n-th."""
    every = pack_rows(store.lengths[np.asarray(train)], INIT_PACKED_LENGTH, seed=0, epoch=0)
    own = range(peers.index, len(every), peers.count)

    def batches() -> Iterator[PackedBatch]:
        announce(store, (train[index] for number in own for index in every[number]))
        for number in own:
            yield pack_batch([store[train[index]] for index in every[number]])

    return SharedText(batches, -(-len(every) // peers.count), peers, operations)


def solve_on(device: torch.device, drafter: Drafter, batches: Batches, advance: Advance) -> int:
    """Positions that ``closed_form_init`` has used. The drafter and its head are on the host before and after."""
    if device.type == "cpu":
        return drafter.closed_form_init(batches, advance)
    with _moved(drafter, device), torch.device(device):  # what is made on the way is made there, too
        return drafter.closed_form_init(shared(batches).on(device), advance)


@contextmanager
def _moved(drafter: Drafter, device: torch.device) -> Iterator[None]:
    try:
        drafter.to(device).attach(drafter.head.to(device))
        yield
    finally:
        drafter.to("cpu").attach(drafter.head.to("cpu"))


# --- for plan --------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    positions: float = 0.0  # of the text
    operations: float = 0.0
    seconds: float = 0.0


def closed_form_work(context: Context, positions: float, speed: MachineSpeed, ranks: int) -> Work:
    """What it will take at a text that has so many generated tokens; zeros where nothing will be solved."""
    config, device = context.config.drafter, context.planned_device
    if config.path is not None or config.init != "closed_form":
        return Work()
    worth, each = find_method(config.method).shape(config, context.spec).closed_form_size(config)
    float32 = speed.flops_per_s if device is None else device.peak_flops("float32")
    flops_per_s = float32 * speed.forward_share * ranks
    used = min(float(worth), positions)
    if config.init_seconds is not None and each:
        used = min(used, config.init_seconds * flops_per_s / each)
    return Work(used, used * each, used * each / flops_per_s)
