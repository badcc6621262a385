"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), by the rules with which vLLM serves it.

Two memories are searched: this request's text (prompt and answer), and all answers given so far, this one among them.
In each, every match of the last m tokens, m = 1, 2, …, is read on: from all places where the match occurs, the token
that follows most often is drafted, as long as its estimated probability, (occurrences of match and drafts) /
(occurrences of the match), is at least ``min_token_prob``. A match of m tokens may draft at most m · ``spec_factor``
tokens, and match and drafts together at most ``depth``. Of all matches the one with the greatest sum of probabilities
wins, the longer of equals; of both memories the request's own, where it is no worse.

vLLM keeps suffix trees with counts. Here an index of positions gives the same counts: nothing but the texts and the
places of each token are stored, where a tree has up to ``depth`` nodes a token. Which of two equally frequent tokens a
tree shows first depends on the order in which their counts grew; ``_first_child`` follows that.

Legend: m length of a match, n drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding.proposers import Observation, Proposal
from spectrain.decoding.sampling import SamplingParams

DEPTH = 24  # vLLM's defaults: suffix_decoding_max_tree_depth, _max_spec_factor, _min_token_prob
SPEC_FACTOR = 1.0
MIN_TOKEN_PROB = 0.1


@dataclass(frozen=True)
class SuffixDraft:
    """Tokens, and the sum of their estimated probabilities."""

    ids: list[int] = field(default_factory=list)
    score: float = 0.0


class SuffixIndex:
    """Texts that grow, and where each token stands in them."""

    def __init__(self, depth: int = DEPTH) -> None:
        self.depth = depth
        self._texts: dict[int, list[int]] = {}
        self._when: dict[int, list[int]] = {}  # of each token, how many were there before it in all texts
        self._places: dict[int, list[tuple[int, int]]] = {}  # token -> (text, position), in the order they came
        self._clock = 0

    def extend(self, text: int, ids: Sequence[int]) -> None:
        """Append tokens to a text, which begins with them if it is new."""
        tokens, when = self._texts.setdefault(text, []), self._when.setdefault(text, [])
        for token in ids:
            self._places.setdefault(token, []).append((text, len(tokens)))
            tokens.append(token)
            when.append(self._clock)
            self._clock += 1

    def speculate(
        self, context: Sequence[int], n: int, spec_factor: float = SPEC_FACTOR, min_token_prob: float = MIN_TOKEN_PROB
    ) -> SuffixDraft:
        """The best draft after ``context``, of which at most the last ``depth`` tokens count."""
        context = list(context[-self.depth :])
        best = SuffixDraft()
        ends = self._places.get(context[-1], []) if context else []
        for m in range(1, len(context)):
            if m > 1:
                ends = [
                    (text, end) for text, end in ends if end >= m - 1 and self._texts[text][end - m + 1] == context[-m]
                ]
            if not ends:
                break
            most = max(0, min(n, int(m * spec_factor + 1e-6), self.depth - m))
            draft = self._read_on(ends, most, min_token_prob)
            if draft.score >= best.score:
                best = draft
        return best

    def _read_on(self, ends: list[tuple[int, int]], most: int, min_token_prob: float) -> SuffixDraft:
        """Drafts after a match that ends at ``ends``."""
        # In single precision, as vLLM computes it: at the threshold that decides.
        probability, score = np.float32(1.0), np.float32(0.0)
        ids: list[int] = []
        while len(ids) < most:
            going = [(text, end + 1) for text, end in ends if end + 1 < len(self._texts[text])]
            if not going:
                break
            token, count = self._first_child(going)
            if count < len(ends):
                probability = np.float32(probability * (np.float32(count) / np.float32(len(ends))))
                if probability < np.float32(min_token_prob):
                    break
            ids.append(token)
            score = np.float32(score + probability)
            ends = [(text, at) for text, at in going if self._texts[text][at] == token]
        return SuffixDraft(ids, float(score))

    def _first_child(self, places: list[tuple[int, int]]) -> tuple[int, int]:
        """The token that stands most often at ``places``, and how often; of several the one that a tree shows first."""
        counts = Counter(self._texts[text][at] for text, at in places)
        ranked = counts.most_common(2)
        if len(ranked) < 2 or ranked[0][1] > ranked[1][1]:
            return ranked[0]
        in_time = sorted(places, key=lambda place: self._when[place[0]][place[1]])
        first = first_sibling([self._texts[text][at] for text, at in in_time])
        return first, counts[first]


def first_sibling(tokens: Sequence[int]) -> int:
    """The first of the siblings that vLLM's tree has after these tokens came, one after the other.

    Siblings are in order of falling counts. A new one comes last. One whose count grows to that of the group before it
    goes to that group's front if it was the first of its own group, else to its end.
    """
    order: list[int] = []
    counts: dict[int, int] = {}
    for token in tokens:
        if token not in counts:
            counts[token] = 1
            order.append(token)
            continue
        at = order.index(token)
        before = counts[order[at - 1]] if at else 0
        if at and before <= counts[token] + 1:
            # The front of the group before it: of the next higher count if this one is the first of its own, else its
            # own group's, which is behind the end of the next higher one.
            front = at - 1
            while front and counts[order[front - 1]] == before:
                front -= 1
            order.insert(front, order.pop(at))
        counts[token] += 1
    return order[0]


@dataclass
class _Request:
    """A text that is being decoded: what both memories have of it."""

    number: int
    own: SuffixIndex
    seen: int = 0  # tokens of the text that are in the memories
    prompt: int | None = None  # tokens of the prompt, once it is known


class SuffixProposer:
    """Drafts by suffix decoding. Remembers all answers for as long as it lives, so a fresh one is made for each
    measurement.
    """

    taps: tuple[int, ...] = ()
    reads_last_hidden = False
    kv_layers: tuple[int, ...] = ()

    def __init__(
        self, depth: int = DEPTH, spec_factor: float = SPEC_FACTOR, min_token_prob: float = MIN_TOKEN_PROB
    ) -> None:
        self.depth, self.spec_factor, self.min_token_prob = depth, spec_factor, min_token_prob
        self._answers = SuffixIndex(depth)
        self._requests = 0

    def new_cache(self, batch_size: int) -> list[tuple[_Request, list[int]]]:
        first = self._requests
        self._requests += batch_size
        return [(_Request(first + row, SuffixIndex(self.depth)), []) for row in range(batch_size)]

    def observe(self, cache: list[tuple[_Request, list[int]]], observation: Observation) -> None:
        rows = zip(cache, observation.ids_BT.tolist(), observation.lengths_B.tolist(), strict=True)
        for (_, text), ids, length in rows:
            text.extend(ids[:length])

    def propose(
        self,
        cache: list[tuple[_Request, list[int]]],
        anchor_B: Tensor,
        n: int,
        sampling: SamplingParams,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Proposal:
        whole = [[*text, anchor] for (_, text), anchor in zip(cache, anchor_B.tolist(), strict=True)]
        drafts = []
        for (request, _), text in zip(cache, whole, strict=True):
            self._remember(request, text)
            options = (text, n, self.spec_factor, self.min_token_prob)
            own, others = request.own.speculate(*options), self._answers.speculate(*options)
            drafts.append((own if own.score >= others.score else others).ids)
        lengths = [len(draft) for draft in drafts]
        ids_Bn = torch.tensor([draft + [0] * (n - len(draft)) for draft in drafts], dtype=torch.long).reshape(-1, n)
        return Proposal(ids=ids_Bn.to(anchor_B.device), lengths=torch.tensor(lengths, device=anchor_B.device))

    def select(self, cache: list[tuple[_Request, list[int]]], rows: Tensor) -> list[tuple[_Request, list[int]]]:
        return [cache[row] for row in rows.tolist()]

    def finish(self, cache: list[tuple[_Request, list[int]]], row: int, text: Sequence[int]) -> None:
        """Remember the end of an answer, which is not observed any more."""
        self._remember(cache[row][0], text)

    def _remember(self, request: _Request, text: Sequence[int]) -> None:
        """Both memories up to the end of ``text``. The anchor is committed: that it is remembered before it is observed
        changes nothing, however often it is drafted for.
        """
        if request.prompt is None:  # the first draft follows the first token of the answer
            request.prompt = len(text) - 1
        request.own.extend(0, text[request.seen :])
        self._answers.extend(request.number, text[max(request.seen, request.prompt) :])
        request.seen = len(text)
