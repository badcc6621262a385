"""Stored responses as a sequence that reads them when they are asked for: known by keys and lengths alone, so that a
capture of a million documents begins with a few bytes of each, and holds those that it is at.

Cost: a document that is asked for in another order than it was stored in costs reading its part, some milliseconds,
unless the part is among the few that are kept; that is little beside the target's pass over it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import pyarrow as pa

from spectrain.data.asked_documents import Asked
from spectrain.data.response_parts import counts_of, keys_of, read_part
from spectrain.data.responses import Response, ResponseStore, response_of_row
from spectrain.errors import InputError

_KEPT_PARTS = 16


class StoredResponses(Sequence[Response]):
    """The D documents that are asked for, in their order and with their splits. ``lengths_D``: in tokens. Raises
    InputError where one is not stored, or a part cannot be read.
    """

    def __init__(self, store: ResponseStore, asked: Asked) -> None:
        self.asked = asked
        self._parts = store.parts()
        places_D = store.key_column().places_of(asked.keys)
        missing = np.flatnonzero(places_D < 0)
        if len(missing):
            raise InputError(
                f"{store.folder} lacks {len(missing)} of {len(asked)} responses (the first: "
                f"{asked.keys[int(missing[0])][:16]}…): run generate again"
            )
        ends = np.cumsum([len(keys_of(path)) for path in self._parts], dtype=np.int64)
        self._part_D = np.searchsorted(ends, places_D, side="right")
        self._row_D = places_D - np.concatenate([[0], ends])[self._part_D]
        lengths = [counts_of(path).tokens_D for path in self._parts]
        self.lengths_D = np.concatenate([np.empty(0, dtype=np.int64), *lengths])[places_D]
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()

    def __len__(self) -> int:
        return len(self.asked)

    @overload
    def __getitem__(self, index: int) -> Response: ...
    @overload
    def __getitem__(self, index: slice) -> list[Response]: ...
    def __getitem__(self, index: int | slice) -> Response | list[Response]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        table = self._table(int(self._part_D[number]))
        split = "heldout" if self.asked.heldout_D[number] else "train"
        return response_of_row(table.slice(int(self._row_D[number]), 1), split)

    def _table(self, part: int) -> pa.Table:
        table = self._tables.pop(part, None)
        if table is None:
            table = read_part(self._parts[part])
            while len(self._tables) >= _KEPT_PARTS:
                self._tables.popitem(last=False)
        self._tables[part] = table
        return table

    def longest_first(self) -> Iterator[Response]:
        """As ``longest_first``, one at a time."""
        rank_D = np.empty(len(self), dtype=np.int64)
        rank_D[self.asked.keys.order()] = np.arange(len(self))
        return (self[number] for number in np.lexsort((rank_D, -self.lengths_D)).tolist())


def longest_first(responses: Sequence[Response]) -> Iterator[Response]:
    """In the order of capture: if memory does not suffice, that shows at once. Of one length in the order of keys."""
    if isinstance(responses, StoredResponses):
        return responses.longest_first()
    return iter(sorted(responses, key=lambda response: (-len(response.input_ids), response.key)))
