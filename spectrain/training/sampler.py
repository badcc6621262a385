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

import numpy as np

from spectrain.config.trainer_schema import TrainerConfig
from spectrain.data.packing import PackedRows, pack_rows


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
    """The optimiser steps of a training from ``start`` on, in order, for one rank of ``world_size``.

    How many steps an epoch has is known from the beginning, as the schedule of the learning rate needs it; which
    documents they consist of is kept for the epoch under way and the one before or after it, which a loader that works
    ahead asks for. Cost: packing each epoch once to count its steps and once when it begins, a few microseconds a
    document; 16 bytes a document in memory.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        config: TrainerConfig,
        rank: int = 0,
        world_size: int = 1,
        start: Position = Position(),
    ) -> None:
        self._lengths = np.asarray(lengths)
        self._config = config
        self._rank = rank
        self._world = world_size
        self._start = start
        self._accumulation = config.gradient_accumulation
        self._kept: dict[int, PackedRows] = {}  # by epoch
        self._micro: list[int] = []  # micro-batches that are left, over all ranks, by epoch from that of ``start`` on
        self.steps_per_epoch: list[int] = []  # of the same epochs
        per_step, everything = self._accumulation * world_size, start.step
        for epoch in range(start.epoch, config.epochs):
            if config.max_steps is not None and everything >= config.max_steps:
                break  # many epochs and a few steps: plan what will be run
            rows = self._rows(epoch) if epoch == start.epoch else self._pack(epoch)
            count = -(-len(rows) // config.micro_batch_size)
            self._micro.append(max(count - start.consumed, 0) if epoch == start.epoch else count)
            self.steps_per_epoch.append(-(-self._micro[-1] // per_step))
            everything += self.steps_per_epoch[-1]
        self.total_steps = everything if config.max_steps is None else min(everything, config.max_steps)

    def _pack(self, epoch: int) -> PackedRows:
        return pack_rows(self._lengths, self._config.packed_length, self._config.seed, epoch)

    def _rows(self, epoch: int) -> PackedRows:
        if epoch not in self._kept:
            rows = self._pack(epoch)
            self._kept = {near: kept for near, kept in self._kept.items() if abs(near - epoch) == 1} | {epoch: rows}
        return self._kept[epoch]

    def _place(self, step: int) -> tuple[int, int]:
        """(index of the epoch among those that are left, first micro-batch there) of an optimiser step."""
        index, within = 0, step - self._start.step
        while within >= self.steps_per_epoch[index]:
            within -= self.steps_per_epoch[index]
            index += 1
        return index, within * self._accumulation * self._world

    def _consumed(self, index: int) -> int:
        """Micro-batches of an epoch that came before ``start``."""
        return self._start.consumed if index == 0 else 0

    def position(self, done: int) -> Position:
        """Where a training is that has made ``done`` steps, at least those of ``start``."""
        if done == self._start.step:
            return self._start
        index, first = self._place(done - 1)
        consumed = min(first + self._accumulation * self._world, self._micro[index])
        return Position(done, self._start.epoch + index, consumed + self._consumed(index))

    def epoch_of(self, step: int) -> int:
        """The epoch of an optimiser step, from 0."""
        return self._start.epoch + self._place(step)[0]

    def __getitem__(self, step: int) -> StepPlan:
        index, first = self._place(step)
        epoch, per_step = self._start.epoch + index, self._accumulation * self._world
        last = min(first + per_step, self._micro[index])
        rows, n, consumed = self._rows(epoch), self._config.micro_batch_size, self._consumed(index)
        block = [
            [document for row in rows[micro * n : (micro + 1) * n] for document in row]
            for micro in range(first + consumed, last + consumed)
        ]
        # Micro-batch i of the block goes to rank i mod world: all ranks have the same number of passes, empty ones
        # included.
        mine = [block[i] if i < len(block) else [] for i in range(self._rank, per_step, self._world)]
        passes = -(-len(block) // self._world)
        return StepPlan(epoch, mine[:passes])
