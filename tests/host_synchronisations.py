"""Counts where a host would have to wait for the device: operations whose result's value or shape only the device
knows. On a CPU nothing waits, so they are counted as they pass by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# A value read on the host (``item``, ``tolist``, ``int``, ``float``, ``bool``), or a shape that depends on values.
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


class HostSynchronisations(TorchDispatchMode):
    """Inside: ``found`` are the names of such operations, in order. ``tolist`` of a CPU tensor reads every element;
    consecutive reads count once each, so it is the operations' presence that says something.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_mask = func in _INDEXED and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        # repeat_interleave is told how many there will be, or has to ask
        told = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None
        if (func in _READS or by_mask) and not told:
            self.found.append(str(func))
        return func(*args, **kwargs)
