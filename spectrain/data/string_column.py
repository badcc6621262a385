"""Many strings in one block of memory, such as the keys of a million documents: 4 bytes each beside their letters,
where Python's own would take over a hundred with the set or dict that finds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_CHUNK = 1 << 14


class Strings(Sequence[str]):
    """A sequence of strings. ``Strings(values)``, of an Arrow array or of any strings."""

    def __init__(self, values: pa.Array | pa.ChunkedArray | Iterable[str] = ()) -> None:
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], pa.string())
        if not isinstance(values, pa.Array):
            values = pa.array(list(values), pa.string())
        self.array: pa.Array = values

    @classmethod
    def joined(cls, parts: Iterable[pa.Array]) -> Strings:
        return cls(pa.chunked_array(list(parts), pa.string()))

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Strings: ...
    def __getitem__(self, index: int | slice) -> str | Strings:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        return str(self.array[range(len(self))[index]].as_py())

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _CHUNK):
            yield from self.array.slice(first, _CHUNK).to_pylist()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Strings):
            return bool(self.array.equals(other.array))
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def take(self, numbers: npt.NDArray[np.int64]) -> Strings:
        """Those of these numbers, in this order."""
        return Strings(self.array.take(pa.array(numbers)))

    def containing(self, part: str) -> Strings:
        """Those with ``part`` in them."""
        return Strings(self.array.filter(pc.match_substring(self.array, part)))

    def order(self) -> npt.NDArray[np.int64]:
        """The numbers of the strings in ascending order, as Python sorts them."""
        return np.asarray(pc.sort_indices(self.array)).astype(np.int64)  # bytes of UTF-8 sort like code points

    def places_of(self, wanted: Strings) -> npt.NDArray[np.int64]:
        """Where each of ``wanted`` is here for the first time; -1: nowhere."""
        return np.asarray(pc.index_in(wanted.array, value_set=self.array).fill_null(-1)).astype(np.int64)

    def hold(self, wanted: Strings) -> bool:
        """Whether all of ``wanted`` are here."""
        return bool((self.places_of(wanted) >= 0).all())
