"""Many strings in one block of memory, such as the keys of a million documents: 4 bytes each beside their letters, or
32 in all where every one is a SHA-256 in hexadecimal, as keys are but for those of a conversation's further documents.
Python's own would take over a hundred with the set or dict that finds them.

Legend: N strings, M others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_CHUNK = 1 << 14
_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_NO_DIGIT = 255
_VALUES = np.full(256, _NO_DIGIT, dtype=np.uint8)
_VALUES[_DIGITS] = np.arange(16)
_DIGEST_BYTES = 32

_Digests = npt.NDArray[np.uint8]  # [N, 32]


class Strings(Sequence[str]):
    """A sequence of strings. ``Strings(values)``, of an Arrow array or of any strings."""

    def __init__(self, values: pa.Array | pa.ChunkedArray | Iterable[str] | _Digests = ()) -> None:
        """An array of bytes [N, 32]: the strings that are these in hexadecimal."""
        self._array: pa.Array | None = None
        self._digests: _Digests | None = None
        if isinstance(values, np.ndarray):
            self._digests = values
            return
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], pa.string())
        if not isinstance(values, pa.Array):
            values = pa.array(list(values), pa.string())
        self._digests = _digests_of(values)
        self._array = values if self._digests is None else None

    @property
    def array(self) -> pa.Array:
        """In Arrow's form."""
        return self._array if self._digests is None else _in_hexadecimal(self._digests)

    @classmethod
    def joined(cls, parts: Iterable[Strings]) -> Strings:
        parts = [part for part in parts if len(part)]
        digests = [part._digests for part in parts if part._digests is not None]
        if len(digests) == len(parts):
            return cls(np.concatenate([np.empty((0, _DIGEST_BYTES), dtype=np.uint8), *digests]))
        return cls(pa.chunked_array([part.array for part in parts], pa.string()))

    def __len__(self) -> int:
        return len(self.array) if self._digests is None else len(self._digests)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Strings: ...
    def __getitem__(self, index: int | slice) -> str | Strings:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        number = range(len(self))[index]
        return str(self.array[number].as_py()) if self._digests is None else self._digests[number].tobytes().hex()

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _CHUNK):
            if self._digests is None:
                yield from self.array.slice(first, _CHUNK).to_pylist()
            else:
                yield from _in_hexadecimal(self._digests[first : first + _CHUNK]).to_pylist()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Strings):
            return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def take(self, numbers: npt.NDArray[np.int64]) -> Strings:
        """Those of these numbers, in this order."""
        return Strings(self.array.take(pa.array(numbers)) if self._digests is None else self._digests[numbers])

    def containing(self, part: str) -> Strings:
        """Those with ``part`` in them."""
        if self._digests is not None and (_VALUES[list(part.encode())] == _NO_DIGIT).any():
            return Strings()
        return Strings(self.array.filter(pc.match_substring(self.array, part)))

    def order(self) -> npt.NDArray[np.int64]:
        """The numbers of the strings in ascending order, as Python sorts them."""
        if self._digests is None:
            return np.asarray(pc.sort_indices(self.array)).astype(np.int64)  # bytes of UTF-8 sort like code points
        first_N = _word(self._digests, 0)
        order_N = np.argsort(first_N, kind="stable")
        if (np.diff(first_N[order_N]) == 0).any():
            order_N = np.lexsort([_word(self._digests, word) for word in (3, 2, 1, 0)])
        return order_N.astype(np.int64, copy=False)

    def places_of(self, wanted: Strings) -> npt.NDArray[np.int64]:
        """Where each of ``wanted`` is here for the first time [M]; -1: nowhere."""
        if self._digests is not None and wanted._digests is not None:
            return _places(self._digests, wanted._digests)
        return np.asarray(pc.index_in(wanted.array, value_set=self.array).fill_null(-1)).astype(np.int64)

    def hold(self, wanted: Strings) -> bool:
        """Whether all of ``wanted`` are here."""
        return bool((self.places_of(wanted) >= 0).all())


def _digests_of(array: pa.Array) -> _Digests | None:
    """None where one of them is not a SHA-256 in hexadecimal."""
    digests = np.empty((len(array), _DIGEST_BYTES), dtype=np.uint8)
    if array.null_count or array.type != pa.string():
        return None
    for first in range(0, len(array), _CHUNK):
        part = array.slice(first, _CHUNK)
        _, offsets, letters = part.buffers()
        ends = np.frombuffer(offsets, dtype=np.int32)[part.offset : part.offset + len(part) + 1]
        if letters is None or (np.diff(ends) != 2 * _DIGEST_BYTES).any():
            return None
        values = _VALUES[np.frombuffer(letters, dtype=np.uint8)[ends[0] : ends[-1]]].reshape(len(part), -1, 2)
        if (values == _NO_DIGIT).any():
            return None
        digests[first : first + len(part)] = values[..., 0] << 4 | values[..., 1]
    return digests


def _in_hexadecimal(digests: _Digests) -> pa.Array:
    letters = np.empty((len(digests), _DIGEST_BYTES, 2), dtype=np.uint8)
    letters[..., 0], letters[..., 1] = _DIGITS[digests >> 4], _DIGITS[digests & 15]
    ends = np.arange(len(digests) + 1, dtype=np.int32) * (2 * _DIGEST_BYTES)
    return pa.StringArray.from_buffers(len(digests), pa.py_buffer(ends), pa.py_buffer(letters))


def _word(digests: _Digests, word: int) -> npt.NDArray[np.uint64]:
    """8 of the 32 bytes [N], as a number that sorts as they do."""
    return digests[:, 8 * word : 8 * word + 8].copy().view(">u8")[:, 0].astype(np.uint64)


def _places(digests: _Digests, wanted: _Digests) -> npt.NDArray[np.int64]:
    """As ``places_of``. A dict of digests would cost some hundred bytes each, and Arrow's table as much: here the
    first 8 bytes are sorted and searched for, which are a number drawn at random already.
    """
    places_M = np.full(len(wanted), -1, dtype=np.int64)
    first_N, first_M = _word(digests, 0), _word(wanted, 0)
    order_N, order_M = (np.argsort(first, kind="stable") for first in (first_N, first_M))
    first_N = np.append(first_N[order_N], np.uint64(0))  # a last one, so that there is always one to look at
    for begin in range(0, len(wanted), _CHUNK):
        part_P = order_M[begin : begin + _CHUNK]  # in ascending order, which is found in a quarter of the time
        first_P, part = first_M[part_P], wanted[part_P]
        at_P = np.searchsorted(first_N[:-1], first_P)
        open_P = np.arange(len(part_P))
        while True:  # once, but where different ones begin alike
            open_P = open_P[(at_P[open_P] < len(digests)) & (first_N[at_P[open_P]] == first_P[open_P])]
            if not len(open_P):
                break
            found_P = order_N[at_P[open_P]]
            same_P = (digests[found_P] == part[open_P]).all(axis=1)
            places_M[part_P[open_P[same_P]]] = found_P[same_P]
            open_P = open_P[~same_P]
            at_P[open_P] += 1
    return places_M
