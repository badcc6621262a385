"""Which packed sequences each rank sees at each optimiser step: stateless in (seed, epoch), so that a resumed run needs
a step number and nothing else.

A step consumes ``gradient_accumulation`` micro-batches of ``micro_batch_size`` packed sequences on every rank. At the
end of an epoch what is left makes a smaller step; a rank with nothing left gets an empty list and contributes zero
gradients, so that the others need not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectrain.config.schema import TrainerConfig
from spectrain.data.packing import pack_rows


@dataclass(frozen=True)
class StepPlan:
    """What one rank does in one optimiser step: micro-batches of document numbers."""

    epoch: int
    micro_batches: list[list[int]]


class StepSampler:
    """All optimiser steps of a training, in order, for one rank of ``world_size``."""

    def __init__(self, lengths: Sequence[int], config: TrainerConfig, rank: int = 0, world_size: int = 1) -> None:
        self._rank = rank
        self._world = world_size
        self._accumulation = config.gradient_accumulation
        self._micro: list[list[list[int]]] = []  # per epoch: micro-batches of document numbers, over all ranks
        self.steps_per_epoch: list[int] = []
        per_step, everything = self._accumulation * world_size, 0
        for epoch in range(config.epochs):
            if config.max_steps is not None and everything >= config.max_steps:
                break  # many epochs and a few steps: plan what will be run
            rows = pack_rows(lengths, config.packed_length, config.seed, epoch)
            n = config.micro_batch_size
            self._micro.append([[d for row in rows[i : i + n] for d in row] for i in range(0, len(rows), n)])
            self.steps_per_epoch.append(-(-len(self._micro[-1]) // per_step))
            everything += self.steps_per_epoch[-1]
        self.total_steps = everything if config.max_steps is None else min(everything, config.max_steps)

    def __getitem__(self, step: int) -> StepPlan:
        epoch, within = 0, step
        while within >= self.steps_per_epoch[epoch]:
            within -= self.steps_per_epoch[epoch]
            epoch += 1
        per_step = self._accumulation * self._world
        block = self._micro[epoch][within * per_step : (within + 1) * per_step]
        # Micro-batch i of the block goes to rank i mod world: all ranks have the same number of passes, empty ones
        # included.
        mine = [block[i] if i < len(block) else [] for i in range(self._rank, per_step, self._world)]
        passes = -(-len(block) // self._world)
        return StepPlan(epoch, mine[:passes])
