"""How several ranks share the training of one drafter: who holds which part of weights, gradients and moments
(``trainer.strategy``).

Here is what all strategies have in common, and data parallelism (``ddp``), in which every rank holds everything;
``fsdp2.py`` and ``zero.py`` share it out. The trainer asks a strategy for the losses of a batch, for their gradients,
for an update, and, where somebody needs them, for whole weights or the whole state. What gathers something is called by
all ranks; so is everything that runs layers.

Losses are sums, and what they are divided by, the weight of the whole global batch, is known only when its last
micro-batch has been run (with D-PACE the drafter itself decides it). So sums are differentiated and gradients divided
once, before they are clipped: here in place, with ZeRO by the engine's own loss scale, since it keeps gradients itself.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from spectrain.config.trainer_schema import TrainerConfig
from spectrain.console import say
from spectrain.data.packing import PackedBatch
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.layers import DecoderLayer
from spectrain.drafters.losses.fused import LossSums
from spectrain.training.checkpointing import TrainingState
from spectrain.training.optim import build_optimizers


class Strategy(ABC):
    """``optimizers``: before ``begin`` those of the whole drafter, into which a checkpoint is read; then those that
    move this rank's part.
    """

    saves_alone = False  # whether one rank can save the state without the others

    def __init__(self, drafter: Drafter, config: TrainerConfig, accelerator: Accelerator) -> None:
        self.drafter = drafter
        self.config = config
        self.accelerator = accelerator
        self.optimizers: list[Optimizer] = build_optimizers(drafter, config)
        layers: list[Any] = [
            module for module in drafter.modules() if isinstance(getattr(module, "recompute", None), bool)
        ]
        for layer in layers:
            layer.recompute = config.gradient_checkpointing
        if config.gradient_checkpointing and not layers:
            say("fit: note: trainer.gradient_checkpointing does nothing: this kind of drafter has no layers of ours")

    @abstractmethod
    def begin(self) -> None:
        """Called once, when weights and optimisers are those to begin with: the first rank's."""

    @abstractmethod
    def losses(self, batch: PackedBatch) -> LossSums:
        """Loss sums of a batch of this rank; with hooks that gather what its layers need."""

    @abstractmethod
    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Add the gradients of a micro-batch; ``is_last``: of the step."""

    @abstractmethod
    def clip(self, weight: Tensor) -> Tensor:
        """Divide the gradients that all ranks have gathered by ``weight`` and clip them. Returns their norm before
        that, a scalar; all of it on the device, where nobody waits. 0: only ``move`` finds it out.
        """

    @abstractmethod
    def move(self, weight: float, norm: float) -> float:
        """Move the optimisers; both numbers are those of ``clip``, on the host by now. Returns the norm; where it is
        not finite nothing has moved.
        """

    @abstractmethod
    def whole(self) -> AbstractContextManager[Drafter]:
        """The drafter with all its weights, to look at or to run by itself; called by all ranks."""

    @abstractmethod
    def state(self) -> TrainingState:
        """Copies that training does not change any more; called by all ranks unless the strategy ``saves_alone``."""

    @abstractmethod
    def end(self) -> None:
        """Training is over; nothing of an engine is left to what comes after it."""


class DataParallel(Strategy):
    """Every rank holds everything and gradients are summed. One rank alone trains in this way, too."""

    saves_alone = True

    def __init__(self, drafter: Drafter, config: TrainerConfig, accelerator: Accelerator) -> None:
        drafter.to(accelerator.device)
        super().__init__(drafter, config, accelerator)
        self.module = accelerator.prepare_model(drafter)  # gives all ranks the first one's weights

    def begin(self) -> None:
        pass

    def losses(self, batch: PackedBatch) -> LossSums:
        return self.module(batch)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        with nullcontext() if is_last else self.accelerator.no_sync(self.module):
            self.accelerator.backward(loss)

    def clip(self, weight: Tensor) -> Tensor:
        # What data parallelism takes is the mean over ranks.
        parameters = scaled_gradients(self.drafter, self.accelerator.num_processes / weight)
        return torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)

    def move(self, weight: float, norm: float) -> float:
        if math.isfinite(norm):
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return norm

    def whole(self) -> AbstractContextManager[Drafter]:
        return nullcontext(self.drafter)

    def state(self) -> TrainingState:
        if not self.accelerator.is_main_process:
            return TrainingState()
        return TrainingState.of(self.drafter, self.optimizers)

    def end(self) -> None:
        pass


def choose_strategy(drafter: Drafter, config: TrainerConfig, accelerator: Accelerator) -> Strategy:
    """That of the configuration; one rank has nothing to share."""
    if config.strategy == "ddp" or accelerator.num_processes == 1:
        return DataParallel(drafter, config, accelerator)
    if config.strategy == "fsdp2":
        from spectrain.training.fsdp2 import Fsdp2

        return Fsdp2(drafter, config, accelerator)
    from spectrain.training.zero import Zero

    return Zero(drafter, config, accelerator)


# --- parts of several strategies -------------------------------------------------------------------------------------


def sharded_layers(drafter: Drafter) -> list[DecoderLayer]:
    """The pieces that are gathered one at a time."""
    return [module for module in drafter.modules() if isinstance(module, DecoderLayer)]


def scaled_gradients(module: nn.Module, scale: Tensor) -> list[nn.Parameter]:
    """The parameters that have a gradient, multiplied by a scalar; of sharded ones this rank's part."""
    parameters = [p for p in module.parameters() if p.grad is not None]
    for parameter in parameters:
        gradient = parameter.grad
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(scale)  # type: ignore[union-attr]
    return parameters


def share_weights(module: nn.Module) -> None:
    """Give all ranks the first one's."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            distributed.broadcast(tensor, src=0)


class WholeCopy:
    """A drafter like the one that is trained, without weights until some are lent to it: whole ones where each rank
    holds shares, those of another type.
    """

    def __init__(self, drafter: Drafter) -> None:
        """Before it is sharded. What it borrows from its target is borrowed again, not copied."""
        empty = ((p, nn.Parameter(p.new_empty(0), requires_grad=False)) for p in drafter.parameters())
        shared: dict[int, object] = {id(parameter): nothing for parameter, nothing in empty}
        borrowed = (drafter.head, vars(drafter)["_teacher_rows_DH"])
        self._drafter = copy.deepcopy(drafter, shared | {id(value): value for value in borrowed})

    @contextmanager
    def lent(self, weights: Iterator[Tensor]) -> Iterator[Drafter]:
        """``weights`` in the order of the parameters."""
        parameters = list(self._drafter.parameters())
        try:
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.data = weight
            yield self._drafter
        finally:
            for parameter in parameters:
                parameter.data = parameter.new_empty(0)
