"""Peak bytes of tensors, counted and not sampled: every storage from the operation that makes it until it is freed.

What an allocator rounds up, keeps or cannot fill is not counted, and neither are a kernel's own scratch buffers. So the
figure is the same on every machine and in every run.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Inside: ``peak`` and ``now`` count the storages that were ``given`` and those that operations made. ``highest``
    forgets what came before.
    """

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}
        for tensor in given:
            self._meet(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._meet(value)
        return out

    def _meet(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        name = storage._cdata
        if name in self._alive:
            return
        size = storage.nbytes()
        self._alive[name] = weakref.ref(storage, lambda _: self._forget(name, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, name: int, size: int) -> None:
        del self._alive[name]
        self.now -= size

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now
