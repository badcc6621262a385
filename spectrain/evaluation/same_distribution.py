"""Whether answers with speculation have the distribution of answers without it, at temperatures above 0: a permutation
test of two samples.

Both sides answer the same prompts under as many seeds. If speculation is lossless, whether an answer was made with it
says nothing about the answer, so that labels may be exchanged among the answers to a prompt. The statistic compares how
often each pair of neighbours comes at each position (a wrong acceptance shows behind the token it was made at), over
all prompts: Σ (a − b)² / (a + b), with a and b the counts of the two sides. Its p-value is exact, whatever the
distributions are; answers that ended count as one more token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERMUTATIONS = 1999
REFUSED_BELOW = 0.001  # of right engines one measurement in a thousand is called wrong
_ENDED = -1

Samples = Sequence[Sequence[Sequence[int]]]  # of each prompt the answers, of each answer the first tokens


@dataclass(frozen=True)
class DistributionTest:
    """``p_value``: how often a lossless engine's samples differ at least as much."""

    prompts: int
    seeds: int
    tokens: int
    p_value: float

    @property
    def same(self) -> bool:
        return self.p_value >= REFUSED_BELOW

    def __str__(self) -> str:
        verdict = "" if self.same else ": the output is wrong"
        return (
            f"the first {self.tokens} tokens of {self.seeds} answers to each of {self.prompts} prompts with and "
            f"without speculation: p = {self.p_value:.4f}{verdict}"
        )


def compare_samples(plain: Samples, speculative: Samples, tokens: int, seed: int = 0) -> DistributionTest:
    """``plain`` and ``speculative``: answers to the same prompts, as many of each. ``tokens``: compared of each."""
    generator = np.random.default_rng(seed)
    observed, permuted_R = 0.0, np.zeros(PERMUTATIONS)
    for ours, theirs in zip(plain, speculative, strict=True):
        found, drawn_R = _statistics(_padded(ours, tokens), _padded(theirs, tokens), generator)
        observed += found
        permuted_R += drawn_R
    # Sums of the same terms in another order differ in their last bits.
    as_much = int((permuted_R >= observed * (1 - 1e-9)).sum())
    return DistributionTest(len(plain), len(plain[0]), tokens, (1 + as_much) / (1 + PERMUTATIONS))


def _padded(answers: Sequence[Sequence[int]], tokens: int) -> np.ndarray:
    """[N, T]"""
    return np.array([[*answer[:tokens], *[_ENDED] * (tokens - len(answer))] for answer in answers])


def _statistics(ours_NT: np.ndarray, theirs_NT: np.ndarray, generator: np.random.Generator) -> tuple[float, np.ndarray]:
    """The statistic of one prompt: as observed, and [R] under labels drawn anew."""
    both_NT = np.concatenate([ours_NT, theirs_NT])
    is_pair_NM = np.concatenate(
        [_indicators(both_NT[:, max(t - 1, 0) : t + 1]) for t in range(both_NT.shape[1])], axis=1
    )
    signs_N = np.repeat([1.0, -1.0], [len(ours_NT), len(theirs_NT)])
    drawn_RN = generator.permuted(np.tile(signs_N, (PERMUTATIONS, 1)), axis=1)
    differences_RM = np.vstack([signs_N, drawn_RN]) @ is_pair_NM
    statistics_R = (differences_RM**2 / is_pair_NM.sum(0)).sum(1)
    return float(statistics_R[0]), statistics_R[1:]


def _indicators(tokens_Nk: np.ndarray) -> np.ndarray:
    """[N, number of different rows]: which of them each row is, as 0 and 1."""
    different, number_N = np.unique(tokens_Nk, axis=0, return_inverse=True)
    return np.eye(len(different))[number_N.reshape(-1)]
