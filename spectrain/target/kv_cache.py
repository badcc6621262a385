"""The target's cache during speculative decoding: tokens go in tentatively, and those that fail verification go out
again.

Three kinds, one interface (``open_cache`` picks):

* ``SlotCache`` (``slot_cache.py``) for targets whose layers all attend.
* ``HybridCache`` (``hybrid_cache.py``) for those where linear attention takes turns with full attention (Qwen3-Next,
  Qwen3.5, Qwen3.6).
* ``SnapshotCache`` (``hybrid_cache.py``) for any other that carries a recurrent state (Mamba, convolutions, layers of
  both kinds at once): row by row, as nothing is known of how its layers would take a batch.

Legend: B batch, T new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from torch import Tensor

from spectrain.target.hybrid_cache import HybridCache, SnapshotCache, takes_turns
from spectrain.target.model import TargetModel, TargetOutput
from spectrain.target.slot_cache import SlotCache


class TargetCache(Protocol):
    """Running a batch of texts through the target, a few tokens at a time."""

    def forward(
        self, ids_BT: Tensor, lengths_B: Sequence[int], taps: Sequence[int], kv_layers: Sequence[int] = ()
    ) -> TargetOutput:
        """Run the next tokens of every row; row b has ``lengths_B[b]``, the rest is padding whose outputs mean nothing.
        ``kv_layers``: layers whose keys and values of these tokens are handed out, [B, G, T, d].

        All tokens enter tentatively: ``keep`` must follow before the next ``forward``.
        """
        ...

    def keep(self, counts_B: Sequence[int]) -> None:
        """Of the tokens of the last ``forward``, the first ``counts_B[b]`` of row b stay."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order."""
        ...

    def extend(self, other: Self) -> None:
        """Append the rows of another cache of the same target, which is not to be used any more."""
        ...


def open_cache(target: TargetModel, batch_size: int) -> TargetCache:
    """An empty cache. ``ConfigError``/``InputError`` for an attention implementation or a layer type that cannot be
    decoded with.
    """
    if not target.spec.hybrid:
        return SlotCache(target, batch_size)
    return (HybridCache if takes_turns(target) else SnapshotCache)(target, batch_size)
