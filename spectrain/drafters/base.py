"""What every drafter offers: losses for training, scores for the walk, and a cache with ``observe`` and ``propose`` for decoding.

``observe`` and ``propose`` mirror what a server does with a drafter: verified tokens enter with the target's features, and drafting
leaves no trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.data.packing import PackedBatch
from spectrain.data.vocab import DraftVocab
from spectrain.decoding.proposers import Proposal
from spectrain.decoding.verify import Law
from spectrain.drafters.losses import LossSums
from spectrain.target.head import TargetHead


@dataclass
class DraftScores:
    """What one teacher-forced pass says about every anchor of a batch. R anchors, K slots.

    ``anchor_R`` are flat positions in the batch: the token there is committed, slot j (from 1) drafts the token j places behind it.
    ``accept_RK`` is the probability that the server accepts the document's own token there, given that all slots before it were
    accepted: min(1, p/q); at temperature 0 it is 0 or 1. Slots beyond the document hold 0.
    """

    anchor_R: Tensor
    accept_RK: Tensor


class Drafter(nn.Module, ABC):
    """Base of all drafters, and a ``Proposer``. ``vocab``: the tokens it can draft; ``taps``: the target's layers it reads, ascending."""

    taps: tuple[int, ...]
    vocab: DraftVocab

    def attach(self, head: TargetHead) -> Drafter:
        """Lend the target's embedding and head, which a drafter shares and never owns. Needed before ``observe`` and ``propose``."""
        object.__setattr__(self, "_head", head)  # not a submodule: its weights are neither trained nor saved
        return self

    @property
    def head(self) -> TargetHead:
        head = self.__dict__.get("_head")
        if head is None:
            raise RuntimeError("call drafter.attach(head) first: a drafter borrows the target's embedding")
        return head

    def forward(self, batch: PackedBatch) -> LossSums:
        """``train_losses``, under the name that data-parallel wrappers intercept."""
        return self.train_losses(batch)

    @abstractmethod
    def train_losses(self, batch: PackedBatch) -> LossSums:
        """Loss sums and counts of a packed batch."""

    @abstractmethod
    def score(self, batch: PackedBatch, num_tokens: int, law: Law, draft_law: Law) -> DraftScores:
        """Acceptance of the document's own tokens under the target's sampling law, teacher forced (input of the walk)."""

    @abstractmethod
    def new_cache(self, batch_size: int) -> Any: ...

    @abstractmethod
    def observe(self, cache: Any, ids_BT: Tensor, taps_BTAH: Tensor | None, lengths_B: Tensor) -> None:
        """Take in verified tokens and the target's taps at the same positions. Rows are padded on the right; row b has ``lengths_B[b]``."""

    @abstractmethod
    def propose(self, cache: Any, anchor_B: Tensor, n: int, law: Law, generators: Sequence[torch.Generator] | None = None) -> Proposal:
        """Draft n tokens behind the committed ``anchor_B``, whose taps do not exist yet. Leaves the cache as it was.

        A greedy ``law`` drafts arg maxes; any other draws, row b from ``generators[b]`` alone.
        """

    @abstractmethod
    def select(self, cache: Any, rows: Tensor) -> Any:
        """The cache of these rows of the batch, in this order; the old one is not used again."""
