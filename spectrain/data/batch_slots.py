"""Memory that workers lay batches into and a trainer reads them from, used again and again.

A batch of hidden states has tens of MiB. In fresh memory the kernel clears and maps each of its pages, in the worker
and once more in the trainer, which takes several times as long as the copy itself. So a loader keeps some slots, each
large enough for a batch, in memory that it shares with its workers. With a request goes the number of a free slot; back
comes where in the slot the batch's tensors lie. A slot is free again when the last tensor that lies in it is gone,
whoever has kept it; where none is free, a batch travels as it would without slots.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spectrain.data.packing import PackedBatch

_ALIGNED_BYTES = 64
_numbers = itertools.count()
_opened: weakref.WeakValueDictionary[int, BatchSlots] = weakref.WeakValueDictionary()


class BatchSlots:
    """``count`` slots of ``slot_bytes`` each. Workers get a copy, of the same memory. Raises RuntimeError or OSError
    where there is not so much shared memory.
    """

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.slot_bytes = -(-slot_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._memory = torch.empty(count * self.slot_bytes, dtype=torch.uint8).share_memory_()
        self._number = next(_numbers)
        self._free = deque(range(count))
        _opened[self._number] = self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_free": deque()}

    def take(self) -> int | None:
        """The number of a slot that nobody uses; None where there is none."""
        return self._free.popleft() if self._free else None

    def writer(self, slot: int) -> SlotWriter:
        return SlotWriter(self._number, slot, self._part(slot))

    def read(self, laid: InSlot) -> PackedBatch:
        """A batch whose tensors are views of its slot, which is free when they are gone."""
        part = self._part(laid.slot)
        weakref.finalize(part, self._free.append, laid.slot).atexit = False
        places = iter(laid.places)

        def found(rest: Tensor) -> Tensor:
            place = next(places)
            if place is None:
                return rest
            # The tensor holds the array of the whole slot, so that this one lives as long as any of them.
            flat = torch.frombuffer(part, dtype=rest.dtype, count=math.prod(place.shape), offset=place.start)
            return flat.view(place.shape)

        return laid.rest.each(found)

    def _part(self, slot: int) -> npt.NDArray[np.uint8]:
        first = slot * self.slot_bytes
        return self._memory[first : first + self.slot_bytes].numpy()


class Place(NamedTuple):
    """Of a tensor in a slot: its first byte, and its shape."""

    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class InSlot:
    """A batch on its way from a worker. ``rest``: the batch, its tensors empty where they lie in the slot; ``places``:
    theirs, in the order of ``PackedBatch.each``, None for those that travel in ``rest``.
    """

    slots: int
    slot: int
    rest: PackedBatch
    places: tuple[Place | None, ...]

    def batch(self) -> PackedBatch:
        """Once, in the process that made the slots."""
        return _opened[self.slots].read(self)

    def pin_memory(self) -> PackedBatch:
        """What torch's loader makes of any batch: a copy in pinned memory."""
        return self.batch().pin_memory()


class SlotWriter:
    """Lays tensors into a slot, one behind the other, from its beginning."""

    def __init__(self, slots: int, slot: int, part: npt.NDArray[np.uint8]) -> None:
        self._slots, self._slot, self._part, self._end = slots, slot, part, 0

    def join(self, parts: list[Tensor]) -> Tensor:
        """As ``torch.cat``, right into the slot, where there is room for it."""
        first = parts[0]
        alike = all(part.dtype == first.dtype and part.shape[1:] == first.shape[1:] for part in parts)
        room = self._room(sum(part.nbytes for part in parts)) if alike else None
        if room is None:
            return torch.cat(parts)
        shape = (sum(map(len, parts)), *first.shape[1:])
        return torch.cat(parts, out=torch.frombuffer(room, dtype=first.dtype).view(shape))

    def laid(self, batch: PackedBatch) -> InSlot:
        """``batch``, with those of its tensors that are elsewhere laid into the slot, too."""
        places: list[Place | None] = []

        def lay(tensor: Tensor) -> Tensor:
            places.append(self._place(tensor))
            return tensor if places[-1] is None else tensor.new_empty(0)

        rest = batch.each(lay)
        return InSlot(self._slots, self._slot, rest, tuple(places))

    def _place(self, tensor: Tensor) -> Place | None:
        """Where a tensor lies in the slot, to which it is copied if need be; None where there is no room for it."""
        first = self._part.ctypes.data
        if not (tensor.is_contiguous() and first <= tensor.data_ptr() < first + len(self._part)):
            room = self._room(tensor.nbytes)
            if room is None:
                return None
            tensor = torch.frombuffer(room, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
        return Place(tensor.data_ptr() - first, tuple(tensor.shape))

    def _room(self, size: int) -> npt.NDArray[np.uint8] | None:
        start = self._end
        if not size or start + size > len(self._part):
            return None
        self._end = -(-(start + size) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return self._part[start : start + size]
