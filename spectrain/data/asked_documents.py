"""Which documents a configuration asks for: their keys and splits, in the order of the prompt files, in arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import numpy.typing as npt

from spectrain.data.responses import further_documents
from spectrain.data.string_column import Strings

_CHUNK = 1 << 14


@dataclass(frozen=True, eq=False)
class Asked:
    """D documents. ``heldout_D``: which of them are held out; the others are trained on."""

    keys: Strings
    heldout_D: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, train: Iterable[str], heldout: Iterable[str]) -> Asked:
        """Of the keys of both splits; one that is in both is held out, in its first place."""
        trained, kept = Strings(train), Strings(heldout)
        keys = Strings.joined([trained, kept])
        heldout_D = np.arange(len(keys)) >= len(trained)
        first_D = keys.places_of(keys)
        if len(np.unique(first_D)) < len(keys):
            heldout_D[first_D[len(trained) :]] = True
            once = first_D == np.arange(len(keys))
            keys, heldout_D = keys.take(np.flatnonzero(once)), heldout_D[once]
        return cls(keys, heldout_D)

    def __len__(self) -> int:
        return len(self.keys)

    def splits(self) -> Iterator[tuple[str, str]]:
        """(key, split) of each document."""
        for key, heldout in zip(self.keys, self.heldout_D.tolist(), strict=True):
            yield key, "heldout" if heldout else "train"

    def heldout_keys(self) -> Strings:
        """Of the held-out documents."""
        return self.keys.take(np.flatnonzero(self.heldout_D))

    def with_further(self, stored: Strings) -> Asked:
        """With the further documents of each conversation after it: those of ``stored``, keys of responses."""
        further = further_documents(stored.containing("-"))
        if not further:
            return self
        found = [(document, split) for key, split in self.splits() for document in (key, *further.get(key, ()))]
        return Asked(Strings(key for key, _ in found), np.array([split == "heldout" for _, split in found], dtype=bool))

    @cached_property
    def digest(self) -> str:
        """As ``files.digest_strings`` of the list of ``splits``."""
        digest, pairs, first = hashlib.sha256(), self.splits(), True
        digest.update(b"[")
        while chunk := list(islice(pairs, _CHUNK)):
            text = json.dumps(chunk, ensure_ascii=False)[1:-1]
            digest.update((text if first else f", {text}").encode())
            first = False
        digest.update(b"]")
        return digest.hexdigest()[:16]
