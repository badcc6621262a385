"""Several processes solve for the same weights as one does: who reads a batch changes nothing but the order of sums."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import test_block_init
import test_eagle3_init
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spectrain.data.packing import PackedBatch, pack_batch
from spectrain.drafters import closed_form_size
from spectrain.drafters.autoregressive import eagle3_init
from spectrain.drafters.block import block_init
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.shared_solving import SharedText


@dataclass
class Table:
    """Where threads that play processes meet."""

    count: int
    places: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = [None] * self.count
        self.barrier = threading.Barrier(self.count, timeout=60)


@dataclass(frozen=True)
class Player:
    table: Table
    index: int

    @property
    def count(self) -> int:
        return self.table.count

    def gathered(self, value: Any) -> list[Any]:
        self.table.places[self.index] = value
        self.table.barrier.wait()
        found = list(self.table.places)
        self.table.barrier.wait()
        return found

    def summed(self, tensor: Tensor) -> Tensor:
        return torch.stack([t.clone() for t in self.gathered(tensor)]).sum(0)


def eagle3(count: int) -> tuple[Callable[[], Drafter], list[PackedBatch]]:
    head, texts = test_eagle3_init.world(64)
    batches = [pack_batch(texts[i : i + 8]) for i in range(0, len(texts), 8)]
    return lambda: test_eagle3_init.drafter("qwen3", head, 2), batches[:count]


def dspark(count: int) -> tuple[Callable[[], Drafter], list[PackedBatch]]:
    head, texts = test_block_init.world(64)
    batches = [pack_batch(texts[i : i + 8]) for i in range(0, len(texts), 8)]
    return lambda: test_block_init.drafter(head, "dspark"), batches[:count]


def solved(make: Callable[[], Drafter], batches: list[PackedBatch], count: int) -> tuple[list[int], list[Drafter]]:
    """Positions and drafters of ``count`` processes."""
    table, drafters = Table(count), [make() for _ in range(count)]

    def work(index: int) -> int:
        torch.set_num_threads(1)
        own = batches[index::count]
        text = SharedText(lambda: iter(own), -(-len(batches) // count), Player(table, index))
        return drafters[index].closed_form_init(text)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count))), drafters


@pytest.mark.parametrize("kind", [eagle3, dspark])
@pytest.mark.parametrize(("batches", "count"), [(8, 2), (7, 3)])  # 7: the last round is one process's alone
def test_several_processes_solve_as_one(kind: Callable[..., Any], batches: int, count: int) -> None:
    make, text = kind(batches)
    (alone,), (expected,) = solved(make, text, 1)
    used, drafters = solved(make, text, count)
    assert alone > 1000 and used == [alone] * count
    untouched = make().body.state_dict()
    for drafter in drafters:
        for name, tensor in drafter.body.state_dict().items():
            torch.testing.assert_close(tensor, expected.body.state_dict()[name], atol=2e-4, rtol=1e-3, msg=name)
    moved = [n for n, t in expected.body.state_dict().items() if (t - untouched[n]).abs().max() > 0.01]
    assert any("o_proj" in name for name in moved) and any("down_proj" in name for name in moved)


@pytest.mark.parametrize("kind", [eagle3, dspark])
def test_a_cap_lies_where_it_lies_for_one_process(kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle3_init, "MAX_COLUMNS_PER_DIM", 8)  # of 64 inputs: the fourth of eight batches is the last
    monkeypatch.setattr(closed_form_size, "ANCHORS_PER_DIM", 5)  # with a stride: every fourth anchor
    monkeypatch.setattr(block_init, "ANCHORS_LEAST_PER_DIM", 1)
    make, text = kind(8)
    (alone,), (expected,) = solved(make, text, 1)
    used, (first, second) = solved(make, text, 2)
    assert used == [alone, alone]
    assert alone < 0.8 * sum(int(batch.loss_mask_T.sum()) for batch in text)
    for drafter in (first, second):
        for name, tensor in drafter.body.state_dict().items():
            torch.testing.assert_close(tensor, expected.body.state_dict()[name], atol=2e-3, rtol=1e-2, msg=name)


def test_a_limit_of_operations_uses_as_many_batches_as_it_reaches() -> None:
    make, batches = eagle3(8)
    each = make().shape.closed_form_size(make().config)[1]
    columns = [
        make().closed_form_init(SharedText(lambda: iter(batches), operations=limit * each)) for limit in (1e6, 500, 10)
    ]
    in_a_batch = 8 * 19  # documents, each with as many pairs of neighbours that were generated, but for the first
    assert columns == [8 * in_a_batch, 4 * in_a_batch, in_a_batch]


@pytest.mark.parametrize("kind", [eagle3, dspark])
def test_the_operations_of_a_plan_are_those_that_are_executed(kind: Callable[..., Any]) -> None:
    """Within a factor of two: at this width what is left out, such as attention, counts as much as squares."""
    make, batches = kind(8)
    drafter = make()
    with FlopCounterMode(display=False) as counter:
        used = drafter.closed_form_init(SharedText(lambda: iter(batches)))
    _, each = drafter.shape.closed_form_size(drafter.config)
    assert 0.5 < used * each / counter.get_total_flops() < 2
