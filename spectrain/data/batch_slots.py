"""Memory that workers lay batches into and a trainer reads them from, used again and again.

A batch of hidden states has tens of MiB. In fresh memory the kernel clears and maps each of its pages, in the worker
and once more in the trainer, which takes several times as long as the copy itself. So a loader keeps some slots, each
large enough for a batch, in memory that it shares with its workers. With a request goes the number of a free slot; back
comes where in the slot the batch's tensors lie. A slot is free again when the last tensor that lies in it is gone,
whoever has kept it; where none is free, a batch travels as it would without slots.
"""

from __future__ import annotations

import io
import itertools
import pickle
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def writer(self, slot: int) -> SlotWriter:
        return SlotWriter(self._number, slot, self._part(slot))

    def read(self, slot: int, content: bytes) -> Any:
        """What was packed into a slot: its tensors are views of it. The slot is free when they are gone."""
        part = self._part(slot)
        weakref.finalize(part, self._free.append, slot).atexit = False
        return _Unpickler(io.BytesIO(content), part).load()

    def _part(self, slot: int) -> npt.NDArray[np.uint8]:
        first = slot * self.slot_bytes
        return self._memory[first : first + self.slot_bytes].numpy()


class InSlot:
    """A value whose tensors lie in a slot, on its way from a worker."""

    def __init__(self, slots: int, slot: int, content: bytes) -> None:
        self._slots, self._slot, self._content = slots, slot, content

    def value(self) -> Any:
        """Once, in the process that made the slots."""
        return _opened[self._slots].read(self._slot, self._content)

    def pin_memory(self) -> Any:
        """Of the value, what torch's loader makes of any batch: a copy in pinned memory."""
        return self.value().pin_memory()


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

    def packed(self, value: Any) -> InSlot:
        """``value``, with those of its tensors that are elsewhere laid into the slot, too."""
        content = io.BytesIO()
        _Pickler(content, self).dump(value)
        return InSlot(self._slots, self._slot, content.getvalue())

    def place(self, tensor: Tensor) -> tuple[int, torch.dtype, tuple[int, ...]] | None:
        """Where a tensor lies in the slot, to which it is copied if need be; None where it cannot lie there."""
        first = self._part.ctypes.data
        if not (tensor.is_contiguous() and first <= tensor.data_ptr() < first + len(self._part)):
            room = self._room(tensor.nbytes)
            if room is None:
                return None
            tensor = torch.frombuffer(room, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
        return tensor.data_ptr() - first, tensor.dtype, tuple(tensor.shape)

    def _room(self, size: int) -> npt.NDArray[np.uint8] | None:
        start = self._end
        if not size or start + size > len(self._part):
            return None
        self._end = -(-(start + size) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return self._part[start : start + size]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, writer: SlotWriter) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._writer = writer

    def persistent_id(self, value: object) -> Any:
        return self._writer.place(value) if isinstance(value, Tensor) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, part: npt.NDArray[np.uint8]) -> None:
        super().__init__(file)
        self._part = part

    def persistent_load(self, place: Any) -> Tensor:
        start, dtype, shape = place
        # The tensor holds the array of the whole slot, so that this one lives as long as any of them.
        found = torch.frombuffer(self._part, dtype=dtype, count=int(np.prod(shape)), offset=start)
        return found.view(shape)
