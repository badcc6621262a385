"""Memory for batches that is used again: never while somebody still holds a tensor in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafter_tools import Options, random_document, random_drafter, write_store
from state_stores import LAST_IS_A_TAP, make_meta, make_states, with_last_tap
from torch import Tensor

from spectrain.data.batch_slots import BatchSlots, InSlot, SlotWriter
from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.loader import BatchLoader, BatchRequest, _with_slots
from spectrain.data.packing import pack_batch

CPU = torch.device("cpu")


class Some:
    """Tensors of any kind, as a batch has them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def each(self, change: Callable[[Tensor], Tensor]) -> Some:
        return Some({name: change(tensor) for name, tensor in self.tensors.items()})


def lay(writer: SlotWriter, tensors: dict[str, Tensor]) -> InSlot:
    return writer.laid(Some(tensors))  # type: ignore[arg-type]


def read(sent: InSlot) -> dict[str, Tensor]:
    found: Any = sent.batch()
    return found.tensors


def test_tensors_come_back_bit_for_bit_and_lie_in_the_slot() -> None:
    slots = BatchSlots(2, 4096)
    slot = slots.take()
    writer = slots.writer(slot)
    parts = [torch.randn(n, 2, 3).to(torch.bfloat16) for n in (3, 1, 5)]
    joined = writer.join(parts)
    value = {
        "joined": joined,
        "eight": torch.randn(7).to(torch.float8_e4m3fn),
        "mask": torch.tensor([True, False, True]),
        "turned": torch.arange(6).view(2, 3).T,
        "empty": torch.empty(0, 4),
        "one": torch.tensor(2.5),
    }
    found = read(lay(writer, value))
    memory = slots._memory
    for name, wanted in value.items():
        ours = found[name]
        assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape), name
        assert torch.equal(ours.reshape(-1).view(torch.uint8), wanted.contiguous().reshape(-1).view(torch.uint8)), name
        if wanted.numel():
            assert 0 <= ours.data_ptr() - memory.data_ptr() - slot * slots.slot_bytes < slots.slot_bytes, name
    assert torch.equal(found["joined"], torch.cat(parts))
    assert found["joined"].data_ptr() == joined.data_ptr()  # laid there once, and not copied again


def test_a_slot_is_free_when_the_last_tensor_in_it_is_gone() -> None:
    slots = BatchSlots(1, 4096)
    slot = slots.take()
    assert slot == 0 and slots.take() is None
    found = read(lay(slots.writer(slot), {"a": torch.zeros(4), "b": torch.ones(4)}))
    kept = found["b"][1:3]
    del found
    assert slots.take() is None  # a view of one of them is still there
    assert kept.tolist() == [1.0, 1.0]
    del kept
    assert slots.take() == 0


def test_what_has_no_room_travels_with_the_rest() -> None:
    slots = BatchSlots(1, 256)
    writer = slots.writer(slots.take())
    large, small = torch.randn(100, 3), torch.arange(5)
    assert torch.equal(writer.join([large[:60], large[60:]]), large)
    found = read(lay(writer, {"large": large, "small": small}))
    assert torch.equal(found["large"], large) and torch.equal(found["small"], small)


def test_pinned_memory_is_a_copy_that_leaves_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(reduced=True)
    document = random_document("0011", 3, 0, random_drafter(options).head)
    slots = BatchSlots(1, 1 << 16)
    sent = slots.writer(slots.take()).laid(pack_batch([document]))
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)  # for want of a GPU
    pinned = sent.pin_memory()
    assert slots.take() == 0
    assert torch.equal(pinned.taps_TAH, document.taps) and pinned.input_ids_T.tolist() == document.input_ids.tolist()


@pytest.mark.slow
def test_a_training_goes_on_in_the_same_few_slots(tmp_path: Path) -> None:
    options = Options(reduced=True)
    head = random_drafter(options).head
    store = write_store(tmp_path, [random_document("0" * 9 + "1" * 9, 3, i, head) for i in range(4)], options.taps)
    requests = [BatchRequest((number % 4, (number + 1) % 4), 20) for number in range(12)]
    with BatchLoader(store, iter(requests), CPU, workers=1, prefetch=1) as loader:
        assert loader._slots is not None
        places = set()
        for request, batch in zip(requests, loader, strict=True):
            expected = pack_batch([store[number] for number in request.documents], request.max_tokens)
            assert torch.equal(batch.taps_TAH, expected.taps_TAH)
            places.add(batch.taps_TAH.data_ptr())
    first = loader._slots._memory.data_ptr()
    assert {(place - first) // loader._slots.slot_bytes for place in places} <= {0, 1, 2}
    assert all(0 <= place - first < loader._slots._memory.nbytes for place in places)


@pytest.mark.parametrize("last", [{}, LAST_IS_A_TAP], ids=["apart", "last layer is a tap"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int8_grouped", "float8_e4m3"])
def test_a_whole_batch_fits_into_a_slot(tmp_path: Path, dtype: str, last: dict[str, object]) -> None:
    meta = make_meta(dtype, **last)
    with HiddenStatesWriter(tmp_path, meta) as states_writer:
        for number in range(4):
            states = make_states(number, 9)
            states_writer.add(with_last_tap(states) if last else states)
    store = StoredHiddenStates(tmp_path)
    _, slots = _with_slots(iter([BatchRequest((0, 1, 2, 3), 36)]), store, 1)
    writer = slots.writer(slots.take())
    sent = writer.laid(pack_batch([store.as_stored(number) for number in range(4)], 36, None, writer.join))
    assert None not in sent.places
    assert sent.batch().num_tokens == 36


def test_sources_that_do_not_say_how_large_they_are_get_no_slots() -> None:
    request = BatchRequest((0,), 5)
    found, slots = _with_slots(iter([request]), SimpleNamespace(lengths=[3]), 2)  # type: ignore[arg-type]
    assert slots is None and list(found) == [request]
