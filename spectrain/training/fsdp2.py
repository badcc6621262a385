"""``trainer.strategy=fsdp2``: torch's fully sharded data parallelism (``fully_shard``). Each rank holds a share of
weights, gradients and moments; a decoder layer's weights are gathered before it runs and let go after it, and what is
outside of layers (fc, norms, heads) once for a whole pass.

``fully_shard`` is called as it is, and not through accelerate, which takes no CPU for it: so what is tested without
GPUs is what runs on them. Gradients are summed over ranks after every micro-batch, into this rank's share: whole ones
are never kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.export import register_dataclass

from spectrain.drafters.drafter import Drafter
from spectrain.drafters.losses.fused import LossSums
from spectrain.training.checkpointing import TrainingState, named_moments, on_host
from spectrain.training.optim import build_optimizers
from spectrain.training.strategies import (
    DataParallel,
    Strategy,
    WholeCopy,
    scaled_gradients,
    sharded_layers,
    share_weights,
)

register_dataclass(LossSums)  # so that FSDP finds the loss in what a drafter returns, and knows when backward begins


class Fsdp2(DataParallel):
    """As data parallelism, but for where tensors are."""

    saves_alone = False

    def __init__(self, *arguments: object) -> None:
        Strategy.__init__(self, *arguments)  # type: ignore[arg-type]  # the drafter stays on the host until it is shared

    def begin(self) -> None:
        before = {name: moments for _, name, moments in named_moments(self.drafter, self.optimizers)}
        device = self.accelerator.device
        self.drafter.to(device)
        share_weights(self.drafter)
        self._copy = WholeCopy(self.drafter)
        # Keys and values that a layer returns are views; nobody changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        mesh = init_device_mesh(device.type, (self.accelerator.num_processes,))
        for layer in sharded_layers(self.drafter):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.drafter, mesh=mesh)
        self.module = self.drafter
        self.optimizers = build_optimizers(self.drafter, self.config)
        parameters = dict(self.drafter.named_parameters())
        (optimizer,) = self.optimizers
        for name, moments in before.items():
            parameter = cast(DTensor, parameters[name])
            optimizer.state[parameter] = {
                # All ranks have read them, so each takes its part by itself.
                key: distribute_tensor(value.to(device), mesh, parameter.placements, src_data_rank=None)
                if value.ndim
                else value.to(device if parameter.is_cuda else "cpu")
                for key, value in moments.items()
            }

    def backward(self, loss: Tensor, is_last: bool) -> None:
        loss.backward()

    def clip(self, weight: Tensor) -> Tensor:
        parameters = scaled_gradients(self.drafter, self.accelerator.num_processes / weight)
        # Of sharded gradients torch takes the norm over all ranks.
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def whole(self) -> AbstractContextManager[Drafter]:
        return self._copy.lent(self._weights())

    def _weights(self) -> Iterator[Tensor]:
        for parameter in self.drafter.parameters():
            yield _gathered(parameter.detach())

    def state(self) -> TrainingState:
        state, writes = TrainingState(), self.accelerator.is_main_process
        for name, parameter in self.drafter.named_parameters():
            whole = _gathered(parameter.detach())  # one at a time: only the first rank keeps it, on its host
            if writes:
                state.weights[name] = on_host(whole)
        for optimizer, name, moments in named_moments(self.drafter, self.optimizers):
            for key, value in moments.items():
                whole = _gathered(value)
                if writes:
                    state.moments[f"{type(optimizer).__name__}/{name}/{key}"] = on_host(whole)
        return state


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
