"""Which packed sequences each rank sees at each optimiser step: stateless in (seed, epoch), so that a resumed run needs
its ``Position`` and nothing else.

A step consumes ``gradient_accumulation`` micro-batches of ``micro_batch_size`` packed sequences on every rank. At the
end of an epoch what is left makes a smaller step; a rank with nothing left gets an empty list and contributes zero
gradients, so that the others need not wait.

A position counts micro-batches of the epoch over all ranks, not steps: a run that goes on with another number of ranks
begins at the same document, and every document is seen once an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectrain.config.trainer_schema import TrainerConfig
from spectrain.data.packing import pack_rows


@dataclass(frozen=True)
class StepPlan:
    """What one rank does in one optimiser step: micro-batches of document numbers."""

    epoch: int
    micro_batches: list[list[int]]


@dataclass(frozen=True)
class Position:
    """How far a training has come: optimiser steps that were made, and micro-batches of the epoch ``epoch`` (from 0)
    that they consumed, on all ranks together.
    """

    step: int = 0
    epoch: int = 0
    consumed: int = 0


class StepSampler:
    """The optimiser steps of a training from ``start`` on, in order, for one rank of ``world_size``."""

    def __init__(
        self,
        lengths: Sequence[int],
        config: TrainerConfig,
        rank: int = 0,
        world_size: int = 1,
        start: Position = Position(),
    ) -> None:
        self._rank = rank
        self._world = world_size
        self._start = start
        self._accumulation = config.gradient_accumulation
        self._micro: list[list[list[int]]] = []  # per epoch: micro-batches of document numbers, over all ranks
        self.steps_per_epoch: list[int] = []  # from the epoch of ``start`` on: those that are left
        per_step, everything = self._accumulation * world_size, start.step
        for epoch in range(start.epoch, config.epochs):
            if config.max_steps is not None and everything >= config.max_steps:
                break  # many epochs and a few steps: plan what will be run
            rows = pack_rows(lengths, config.packed_length, config.seed, epoch)
            n = config.micro_batch_size
            micro = [[d for row in rows[i : i + n] for d in row] for i in range(0, len(rows), n)]
            self._micro.append(micro[start.consumed if epoch == start.epoch else 0 :])
            self.steps_per_epoch.append(-(-len(self._micro[-1]) // per_step))
            everything += self.steps_per_epoch[-1]
        self.total_steps = everything if config.max_steps is None else min(everything, config.max_steps)

    def _place(self, step: int) -> tuple[int, int]:
        """(index of the epoch among those that are left, first micro-batch there) of an optimiser step."""
        index, within = 0, step - self._start.step
        while within >= self.steps_per_epoch[index]:
            within -= self.steps_per_epoch[index]
            index += 1
        return index, within * self._accumulation * self._world

    def position(self, done: int) -> Position:
        """Where a training is that has made ``done`` steps, at least those of ``start``."""
        if done == self._start.step:
            return self._start
        index, first = self._place(done - 1)
        consumed = min(first + self._accumulation * self._world, len(self._micro[index]))
        return Position(done, self._start.epoch + index, consumed + (self._start.consumed if index == 0 else 0))

    def __getitem__(self, step: int) -> StepPlan:
        index, first = self._place(step)
        epoch, per_step = self._start.epoch + index, self._accumulation * self._world
        block = self._micro[index][first : first + per_step]
        # Micro-batch i of the block goes to rank i mod world: all ranks have the same number of passes, empty ones
        # included.
        mine = [block[i] if i < len(block) else [] for i in range(self._rank, per_step, self._world)]
        passes = -(-len(block) // self._world)
        return StepPlan(epoch, mine[:passes])
