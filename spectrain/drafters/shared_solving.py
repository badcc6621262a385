"""Closed-form initialisation by several processes together: each takes every n-th batch of the text, and what they add
up is added up over all of them.

A sum of squares over the text is most of the work (at width 4096 some 10¹⁵ operations), and sums can be shared out.
The processes go in lock-step, a batch each a round: who takes part in a sum, and where a cap on the text lies, is the
same as if one process had read the batches one after the other, so the solution is the same within rounding. What is
solved from the sums is solved by each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from spectrain.data.packing import PackedBatch
from spectrain.drafters.drafter import Batches


class Peers(Protocol):
    """The processes that solve together, of which this is number ``index`` of ``count``."""

    @property
    def index(self) -> int: ...
    @property
    def count(self) -> int: ...

    def gathered(self, value: Any) -> list[Any]:
        """``value`` of each, in their order."""
        ...

    def summed(self, tensor: Tensor) -> Tensor:
        """Over all of them. Where it is given, it may be changed."""
        ...


@dataclass(frozen=True)
class Alone:
    index: int = 0
    count: int = 1

    def gathered(self, value: Any) -> list[Any]:
        return [value]

    def summed(self, tensor: Tensor) -> Tensor:
        return tensor


@dataclass(frozen=True)
class SharedText:
    """This process's batches of the text: ``Batches`` that know of the others'.

    ``rounds``: the batches of the process that has the most; None: of one process, as many as come. ``operations``:
    that all processes together are to spend at most, roughly; None: as many as the solution is worth.
    """

    batches: Callable[[], Iterator[PackedBatch]]
    rounds: int | None = None
    peers: Peers = Alone()
    operations: float | None = None

    def __call__(self) -> Iterator[PackedBatch]:
        return self.batches()

    def on(self, device: torch.device) -> SharedText:
        """Moved there, as they are asked for."""
        return replace(self, batches=lambda: (batch.to(device) for batch in self.batches()))

    def in_rounds(self) -> Iterator[PackedBatch | None]:
        """A batch a round; None where this process has none left."""
        own = iter(self.batches())
        if self.rounds is None:
            yield from own
            return
        for _ in range(self.rounds):
            yield next(own, None)

    def at_most(self, positions: int, operations_each: float) -> int:
        """``positions`` of the text, or as many as ``operations`` are enough for."""
        return positions if self.operations is None else min(positions, int(self.operations / operations_each))

    def turn(self, count: int) -> tuple[int, int]:
        """(what was counted by processes before this one, by all) in this round."""
        counts = self.peers.gathered(count)
        return sum(counts[: self.peers.index]), sum(counts)

    def total(self, value: Tensor | float) -> Tensor | float:
        """A sum over all processes; 0.0 is that of one which had nothing to add."""
        if self.peers.count == 1:
            return value
        shapes = self.peers.gathered(tuple(value.shape) if isinstance(value, Tensor) else None)
        shape = next((shape for shape in shapes if shape is not None), None)
        if shape is None:
            return sum(self.peers.gathered(value))
        # Added up as one of the largest: where it lies is the default device while one solves there.
        return self.peers.summed(value if isinstance(value, Tensor) else torch.zeros(shape, dtype=torch.float64))


def shared(batches: Batches) -> SharedText:
    """``batches`` of one process, where they are no more than that."""
    if isinstance(batches, SharedText):
        return batches
    return SharedText(lambda: iter(batches()))
