"""Which documents a store of hidden states has, and where each lies: a table in arrays, some hundred bytes a document,
most of them its key.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spectrain.data.string_column import Strings
from spectrain.files import FileState


class StoredDocument(NamedTuple):
    """Where a document lies."""

    key: str
    split: str
    shard: int
    start: int
    length: int
    loss_count: int


class ShardListing(NamedTuple):
    """The D documents of one shard, as the file lists them."""

    keys: Strings
    splits: Strings  # train or heldout
    offsets: npt.NDArray[np.int64]  # [D + 1]: tokens of the shard before each document, and of all
    loss_counts: npt.NDArray[np.int64]  # [D]

    @classmethod
    def read(cls, file: Any) -> ShardListing:
        """Of an open safetensors file. Raises KeyError, TypeError, ValueError or SafetensorError where it has none."""
        metadata = file.metadata() or {}
        listed = cls(
            Strings(pa.array(json.loads(metadata["keys"]), pa.string())),
            Strings(pa.array(json.loads(metadata["splits"]), pa.string())),
            np.array(file.get_tensor("offsets"), dtype=np.int64),
            np.array(file.get_tensor("loss_counts"), dtype=np.int64),
        )
        if not len(listed.keys) == len(listed.splits) == len(listed.loss_counts) == len(listed.offsets) - 1:
            raise ValueError("its lists differ in length")
        return listed

    def documents(self, number: int) -> list[StoredDocument]:
        """One by one; ``number``: of the shard."""
        starts, counts = self.offsets.tolist(), self.loss_counts.tolist()
        places = zip(self.keys, self.splits, pairwise(starts), counts, strict=True)
        return [StoredDocument(key, split, number, start, end - start, n) for key, split, (start, end), n in places]


class DocumentTable:
    """All documents of a store, in the order of their keys."""

    def __init__(self, shards: Iterable[ShardListing]) -> None:
        keys, splits, lengths, loss_counts, starts = (list[Any]() for _ in range(5))  # of each shard
        for shard in shards:
            keys.append(shard.keys)
            splits.append(shard.splits)
            lengths.append(np.diff(shard.offsets))
            loss_counts.append(shard.loss_counts)
            starts.append(shard.offsets[:-1])
        counts = [len(own) for own in keys]
        unordered = Strings.joined(keys)
        del keys
        order = unordered.order()
        self.keys = unordered.take(order)
        del unordered
        self.splits = Strings.joined(splits).take(order)
        self.lengths, self.loss_counts, self.starts = (
            _joined(parts)[order] for parts in (lengths, loss_counts, starts)
        )
        self.shards = np.repeat(np.arange(len(counts)), counts)[order]


class _Shard(Protocol):
    @property
    def path(self) -> Path: ...

    def listing(self) -> ShardListing: ...


_newest: dict[tuple[tuple[Path, FileState], ...], DocumentTable] = {}


def table_of(shards: Sequence[_Shard]) -> DocumentTable:
    """The documents of all shards. Opening each costs a fraction of a millisecond, so the newest table is kept: a
    command that asks again, with no shard changed since, gets the same one. Errors as ``ShardFile.listing``.
    """
    states = tuple((shard.path, FileState.of(shard.path)) for shard in shards)
    table = _newest.get(states)
    if table is None:
        table = DocumentTable(shard.listing() for shard in shards)
        _newest.clear()
        if all(state.settled for _, state in states):
            _newest[states] = table
    return table


def as_sequence(numbers: npt.NDArray[np.int64]) -> Sequence[int]:
    """Numbers of documents as Python's own integers, 8 bytes each; in a list they would take 40."""
    return array("q", numbers.tobytes())


def _joined(parts: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
