"""Prompts that are nearly other prompts: of the same set (MinHash), or of a suite that drafters are measured on (words
in a row).

Legend: a word is a run of letters and digits, in lower case.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

_WORD = re.compile(r"\w+", re.UNICODE)
_SHINGLE = 3  # words
_PERMUTATIONS = 128
_WIDER = 0.7
# Words in a row that so many prompts of a suite share are its form ("put your final answer in a box"), not a prompt.
_FORM = 3


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class NearDuplicates:
    """Remembers texts, and finds those that resemble one of them: Jaccard similarity of the sets of word triples of at
    least ``threshold``. MinHash (Broder 1997) finds whom to compare with; it looks for less than the threshold, because
    at its own it misses every second pair.
    """

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHashLSH

        self._threshold = threshold
        self._index = MinHashLSH(threshold=_WIDER * threshold, num_perm=_PERMUTATIONS)
        self._triples: list[frozenset[int]] = []

    def add(self, text: str) -> bool:
        """Whether it resembles a text that is remembered; if not, it is remembered from now on."""
        from datasketch import MinHash

        runs = set(_runs(words(text), _SHINGLE))
        triples = frozenset(map(hash, runs))  # compared within this process alone
        sketch = MinHash(num_perm=_PERMUTATIONS)
        sketch.update_batch([" ".join(run).encode() for run in runs])
        for number in self._index.query(sketch):
            other = self._triples[number]
            if len(triples & other) >= self._threshold * len(triples | other):
                return True
        self._index.insert(len(self._triples), sketch)
        self._triples.append(triples)
        return False


class SuiteOverlap:
    """Finds texts that share ``length`` words in a row with a prompt of a suite; a prompt that is shorter has to be the
    whole text.
    """

    def __init__(self, suites: Mapping[str, Iterable[str]], length: int) -> None:
        self._length = length
        self._suite_of: dict[tuple[str, ...], str] = {}
        for name, texts in suites.items():
            shared = Counter(run for text in texts for run in set(_runs(words(text), length)))
            for run, count in shared.items():
                if count < _FORM:
                    self._suite_of.setdefault(run, name)

    def suite_of(self, text: str) -> str | None:
        """The suite that it overlaps with, if any."""
        return next((self._suite_of[run] for run in _runs(words(text), self._length) if run in self._suite_of), None)


def _runs(found: list[str], length: int) -> Iterator[tuple[str, ...]]:
    """All runs of so many words; of fewer words, all of them."""
    for start in range(max(1, len(found) - length + 1)):
        yield tuple(found[start : start + length])
