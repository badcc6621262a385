"""Counts where a host would have to wait for the device: operations whose result's value or shape only the device
knows. On a CPU nothing waits, so they are counted as they pass by.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spectrain.data.packing import PackedBatch

aten = torch.ops.aten
# A value read on the host (``item``, ``int``, ``float``, ``bool``), or a shape that depends on values.
_READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_METHODS = {torch.Tensor.tolist, torch.Tensor.cpu}  # of a tensor that is on the host already they are no operations


class HostSynchronisations:
    """Inside: ``found`` are the names of such operations, in order."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._modes = ExitStack()

    def __enter__(self) -> HostSynchronisations:
        self._modes.enter_context(_Methods(self.found))
        self._modes.enter_context(_Operations(self.found))
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_mask = func in _INDEXED and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        # repeat_interleave is told how many there will be, or has to ask
        told = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None
        if (func in _READS or by_mask) and not told:
            self.found.append(str(func))
        return func(*args, **kwargs)


class _Methods(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def as_on_a_device(batch: PackedBatch) -> PackedBatch:
    """As ``PackedBatch.to`` leaves it: the host keeps what it has to know."""
    batch.host_tokens = batch.host
    return batch
