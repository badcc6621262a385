"""Simulated acceptance: the acceptance length (τ, tau) that decoding will measure, from one teacher-forced pass and
without decoding.

A text the target generated already holds every outcome of verification. Take its first generated token as anchor and
look at the drafts there: slot j is accepted with probability min(1, p_j(x) / q_j(x)), where x is the text's own token,
p the drafter's and q the target's distribution of it. A round ends at the first rejected slot or after n slots; the
next anchor is the correction (or bonus) token after the accepted ones.

Why that is exact: speculative sampling emits token x as an accepted draft with probability p(x)·min(1, q(x)/p(x)) =
min(p(x), q(x)), and emits it at all with probability q(x). Given x, the chance that it was an accepted draft is
therefore min(1, p(x)/q(x)). At temperature 0 this is 1 where the drafter's argmax is x, else 0, and the simulation's
rounds are the loop's, one by one; so they are for argmax drafts at any temperature, whose p is one-hot. Averages over
uniformly drawn anchors, or products of per-position means, are not what is measured in decoding.

Legend: D spans, L tokens of the longest span, K or n draft slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spectrain.decoding.acceptance import Round


@dataclass(frozen=True)
class Span:
    """One answer of a text, ready to simulate. L is the answer's length.

    start: position in the text of the answer's first token. accept: [L, K], row i for the anchor at ``start + i``,
    column j - 1 the probability (or truth) that slot j there accepts the text's token at ``start + i + j``; entries
    beyond the answer are ignored. stopped: the answer ended with its own end token, not at the length limit.
    confidence: [L, K], what a confidence head says of the same slots; ``None`` without one.
    """

    start: int
    accept: np.ndarray
    stopped: bool
    confidence: np.ndarray | None = None


@dataclass(frozen=True)
class ExpectedAcceptance:
    """Expected sums over all random choices of the simulation; rounds cut by the length limit are left out.

    survival[j]: expected number of rounds in which at least j + 1 drafts were accepted; accepted_tokens is their sum.
    """

    rounds: float
    survival: np.ndarray

    @property
    def accepted_tokens(self) -> float:
        return float(self.survival.sum())

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, bonus included; NaN without rounds."""
        return 1.0 + self.accepted_tokens / self.rounds if self.rounds else float("nan")


def acceptance_probability(draft_log_probs: Tensor, target_log_probs: Tensor) -> Tensor:
    """min(1, p(x) / q(x)), elementwise, from the two log-probabilities of the text's own token x. Where q(x) = 0, the
    ratio counts as 0.
    """
    return (draft_log_probs - target_log_probs).clamp(max=0.0).exp().masked_fill(target_log_probs.isneginf(), 0.0)


def simulate(span: Span, n: int, rng: np.random.Generator | None = None) -> list[Round]:
    """Rounds of one span with n drafts each. ``rng`` decides slots whose probability is neither 0 nor 1; argmax drafts
    have none such.
    """
    length, slots = span.accept.shape
    _check_slots(n, slots)
    last = length - 1
    rounds, anchor = [], 0
    while anchor < last:
        visible = min(n, last - anchor)
        chances = span.accept[anchor, :visible]
        uniforms = np.zeros(visible) if rng is None else rng.random(visible)
        if rng is None and not np.isin(chances, (0, 1)).all():
            raise ValueError("a simulation over acceptance probabilities other than 0 and 1 needs a random generator")
        failures = np.flatnonzero(uniforms >= chances)
        accepted = int(failures[0]) if len(failures) else visible
        cut = accepted == visible < n and not span.stopped
        rounds.append(Round(anchor=span.start + anchor, drafted=n, accepted=accepted, cut=cut))
        anchor += accepted + 1
    return rounds


def expected_acceptance(spans: Sequence[Span], n: int) -> ExpectedAcceptance:
    """The sums of ``simulate`` in expectation, exactly, by carrying the probability that a round starts at each token
    from left to right.

    Spares the sampling noise of ``simulate`` at temperature > 0; for truths instead of probabilities the two agree.
    O(L·n) steps for all spans.
    """
    if not spans:
        return ExpectedAcceptance(0.0, np.zeros(n))
    lengths_D = np.array([len(span.accept) for span in spans])
    longest = int(lengths_D.max())
    accept_DLn = np.zeros((len(spans), longest, n))
    for row, span in zip(accept_DLn, spans, strict=True):
        _check_slots(n, span.accept.shape[1])
        row[: len(span.accept)] = span.accept[:, :n]
    left_DL = lengths_D[:, None] - 1 - np.arange(longest)  # tokens after each anchor, hence slots that can be seen
    seen_DLn = np.arange(n) < left_DL[..., None]
    # P(at least j + 1 drafts are accepted), 0 beyond the text.
    survival_DLn = np.cumprod(np.where(seen_DLn, accept_DLn, 0.0), axis=-1)

    # All visible drafts are accepted and more were drafted: cut by the length limit, unless the text ended by itself.
    all_accepted_DL = np.take_along_axis(survival_DLn, left_DL.clip(1, n)[..., None] - 1, axis=-1)[..., 0]
    cut_DL = np.where((left_DL > 0) & (left_DL < n), all_accepted_DL, 0.0)
    cut_DL[np.array([span.stopped for span in spans])] = 0.0

    reach_DL = np.zeros((len(spans), longest + n + 1))  # P(some round starts at this token)
    reach_DL[:, 0] = 1.0
    # P(exactly k drafts are accepted), k = 0 … n.
    exactly_DLm = -np.diff(survival_DLn, axis=-1, prepend=1.0, append=0.0)
    for anchor in range(longest):
        reach_DL[:, anchor + 1 : anchor + n + 2] += reach_DL[:, anchor, None] * exactly_DLm[:, anchor]
    reach_DL = np.where(left_DL > 0, reach_DL[:, :longest], 0.0)

    cut_accepted_DLn = cut_DL[..., None] * seen_DLn  # a cut round's drafts are left out together with the round
    survival_n = (reach_DL[..., None] * (survival_DLn - cut_accepted_DLn)).sum(axis=(0, 1))
    return ExpectedAcceptance(float((reach_DL * (1.0 - cut_DL)).sum()), survival_n)


def expected_acceptance_by_length(spans: Sequence[Span], max_n: int) -> list[ExpectedAcceptance]:
    """Expected sums for n = 1 … max_n drafts a round (element n - 1): how many tokens to draft, from the same
    numbers.
    """
    return [expected_acceptance(spans, n) for n in range(1, max_n + 1)]


def _check_slots(n: int, slots: int) -> None:
    if not 1 <= n <= slots:
        raise ValueError(f"cannot simulate with {n} drafts a round: acceptance is known for {slots} slots")
