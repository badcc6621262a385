"""Acceptance length τ (tau) and the other acceptance statistics of rounds, whoever made them: the decoding loop, the
simulation, vLLM.

All figures are ratios of sums over rounds, never means of per-prompt means: vLLM's counters add up rounds too. Rounds
that the length limit cut are left out, because how many of their drafts would have been accepted was not seen; rounds
that ended with an end token are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

BOOTSTRAP_RESAMPLES = 2000


@dataclass(frozen=True)
class Round:
    """One verification by the target.

    anchor: position in the text of the last token committed before. drafted: drafts proposed. accepted: drafts that
    became text. cut: the length limit ended the text while every draft so far had been accepted and more were to come.
    drafts: their ids, where they are known. confidence: what the drafter's confidence head said of each, where it has
    one. Rounds are equal if their outcomes are.
    """

    anchor: int
    drafted: int
    accepted: int
    cut: bool = False
    drafts: tuple[int, ...] = field(default=(), compare=False)
    confidence: tuple[float, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class AcceptanceStats:
    """Counts and ratios over complete rounds. Ratios are NaN where nothing was counted.

    acceptance_length: τ, tokens a round commits, bonus included: 1 + accepted_tokens / rounds. acceptance_rate:
    accepted / drafted tokens. acceptance_per_position[j]: share of rounds in which at least j + 1 drafts were accepted
    (unconditional survival, as vLLM reports it). conditional_acceptance_per_position[j]: that share among the rounds
    that drafted slot j + 1 and in which the j drafts before it were accepted.
    interval: bootstrap interval of acceptance_length over prompts; ``None`` with fewer than two prompts that have
    rounds.
    """

    rounds: int
    cut_rounds: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_length: float
    acceptance_rate: float
    acceptance_per_position: tuple[float, ...]
    conditional_acceptance_per_position: tuple[float, ...]
    interval: tuple[float, float] | None


def acceptance(
    rounds_per_prompt: Sequence[Sequence[Round]],
    num_positions: int | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> AcceptanceStats:
    """Statistics of the rounds of several prompts. ``num_positions``: draft slots to report, default the most that any
    round drafted.
    """
    complete = [[r for r in rounds if not r.cut] for rounds in rounds_per_prompt]
    flat = [r for rounds in complete for r in rounds]
    drafted = np.array([r.drafted for r in flat], dtype=np.int64)
    accepted = np.array([r.accepted for r in flat], dtype=np.int64)
    positions = int(drafted.max(initial=0)) if num_positions is None else num_positions
    survived = [int((accepted >= j).sum()) for j in range(positions + 1)]
    reached = [int(((accepted >= j) & (drafted > j)).sum()) for j in range(positions)]
    mean_accepted = _ratio(int(accepted.sum()), len(flat))
    interval = bootstrap_ratio_interval(
        [sum(r.accepted for r in rounds) for rounds in complete],
        [len(rounds) for rounds in complete],
        confidence=confidence,
        seed=seed,
    )
    return AcceptanceStats(
        rounds=len(flat),
        cut_rounds=sum(r.cut for rounds in rounds_per_prompt for r in rounds),
        drafted_tokens=int(drafted.sum()),
        accepted_tokens=int(accepted.sum()),
        acceptance_length=1.0 + mean_accepted,
        acceptance_rate=_ratio(int(accepted.sum()), int(drafted.sum())),
        acceptance_per_position=tuple(_ratio(survived[j + 1], len(flat)) for j in range(positions)),
        conditional_acceptance_per_position=tuple(_ratio(survived[j + 1], reached[j]) for j in range(positions)),
        interval=None if interval is None else (1.0 + interval[0], 1.0 + interval[1]),
    )


def bootstrap_ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = BOOTSTRAP_RESAMPLES,
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of sum(numerators) / sum(denominators), resampling the pairs (one pair a prompt).

    Rounds of one prompt resemble each other, so prompts, not rounds, are what is drawn. Pairs with denominator zero
    carry nothing and are left out; ``None`` when fewer than two remain.
    """
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    top, bottom = top[bottom > 0], bottom[bottom > 0]
    if len(top) < 2:
        return None
    # How often each prompt is drawn: one matrix product resamples everything at once.
    counts = np.random.default_rng(seed).multinomial(len(top), np.full(len(top), 1 / len(top)), size=resamples)
    return percentile_interval((counts @ top) / (counts @ bottom), confidence)


def resampled_sums(
    figures: Sequence[Sequence[float]], seed: int = 0, resamples: int = BOOTSTRAP_RESAMPLES
) -> np.ndarray:
    """[resamples, k] sums of the k figures of each prompt, over prompts drawn with replacement.

    All figures of a prompt are drawn together, so whatever is computed of the sums is compared in pairs.
    """
    figures_Pk = np.asarray(figures, dtype=np.float64)
    prompts = len(figures_Pk)
    counts_RP = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    return counts_RP @ figures_Pk


def percentile_interval(values: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """The interval that holds this share of resampled ``values``, as much left out below as above."""
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else float("nan")
