"""How far a drafter's own confidence reaches: calibration, survival, and drafting no further than a threshold.

A drafter with a confidence head says of each slot j how likely its draft is accepted, given that the drafts before it
were accepted: c_j. The chance that draft j becomes text at all is the *survival* a_j = c_1 · … · c_j. A head that was
trained to order slots well still errs in the level, so each slot gets a temperature, c = σ(logit(c) / T), fitted from
left to right so that the running product is right on held-out text (sequential temperature scaling, the DSpark paper).

Cutting a draft short leaves the distribution of the output alone as long as keeping slot j is decided without looking
at the draft in slot j or after it: a draft that is kept is then still drawn from the distribution that verification
divides by. c_j depends on the anchor and the drafts before slot j only, survival falls with j, and the kept slots are a
prefix: so "while survival is at least the threshold" is such a rule.

What a confidence head says in the rounds of a simulation (or of the loop), and what becomes of those drafts: the
samples that calibration is fitted on and judged by.

Rounds, not all positions: a round starts where a draft has just been rejected, where the next one is likelier to be
rejected, too. A head that is right on average over all positions would be too sure where it is asked.

Legend: B batch, R rounds, L tokens of an answer, n or K draft slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spectrain.decoding.acceptance import Round
from spectrain.decoding.simulate import Span, simulate
from spectrain.errors import ConfigError

ECE_BINS = 15
# Temperatures tried for a slot: 1 and a geometric grid around it, then a finer one around the best.
_COARSE = np.exp(np.linspace(-np.log(16), np.log(16), 65))
_FINE = np.exp(np.linspace(-np.log(16) / 32, np.log(16) / 32, 17))
_EDGE = 1e-6  # confidences are kept so far from 0 and 1, where a logit has no end


@dataclass(frozen=True)
class Calibration:
    """One temperature per slot; slots beyond the last one keep what the drafter says. Empty: nothing is changed."""

    temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            if not (np.isfinite(temperature) and temperature > 0):
                raise ConfigError(
                    f"a calibration temperature of {temperature} makes no sense: temperatures are positive numbers"
                )

    def apply(self, confidence_Rn: np.ndarray) -> np.ndarray:
        """Calibrated confidences [R, n] in (0, 1), float64."""
        n = confidence_Rn.shape[-1]
        own = list(self.temperatures[:n])
        return _sigmoid(_logit(confidence_Rn) / np.array(own + [1.0] * (n - len(own))))

    def inverse(self) -> Calibration:
        """Its ``apply`` leads from calibrated confidences back to what the drafter said."""
        return Calibration(tuple(1 / temperature for temperature in self.temperatures))


def survival(confidence_Bn: Tensor) -> Tensor:
    """Chance [B, n] that draft j and all drafts before it are accepted."""
    return confidence_Bn.cumprod(-1)


# --- fitting and judging -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfidenceSamples:
    """What a drafter said in R rounds and what became of it.

    confidence: [R, K] its own, uncalibrated. accepted: [R, K], whether the drafts up to and with this slot were
    accepted, or how likely that was. seen: [R, K], False for slots whose outcome is unknown (not drafted, or beyond the
    end of the text).
    """

    confidence: np.ndarray
    accepted: np.ndarray
    seen: np.ndarray

    @property
    def slots(self) -> int:
        return self.confidence.shape[1]

    def survival(self, calibration: Calibration) -> np.ndarray:
        """Predicted survival [R, K], float64."""
        return calibration.apply(self.confidence).cumprod(-1)


def fit_calibration(samples: ConfidenceSamples) -> Calibration:
    """A temperature per slot, from left to right: of those that do not raise the calibration error of the running
    product up to the slot, the one with the least cross-entropy.

    Not simply the least calibration error, as in the paper: where about half of the drafts are accepted, a temperature
    so high that every confidence becomes one half has hardly any, and leaves nothing by which a draft could be told
    from another. A slot that no round has seen keeps temperature 1. If the whole is not better than no calibration on
    the very samples it was fitted to (mean error over slots), nothing is calibrated.
    """
    temperatures: list[float] = []
    before_R = np.ones(len(samples.confidence))
    logit_RK = _logit(samples.confidence)
    for slot in range(samples.slots):
        seen_R = samples.seen[:, slot]
        temperature = 1.0
        if seen_R.any():
            temperature = _fit_slot(before_R[seen_R], logit_RK[seen_R, slot], samples.accepted[seen_R, slot])
        temperatures.append(temperature)
        before_R = before_R * _sigmoid(logit_RK[:, slot] / temperature)
    fitted = Calibration(tuple(temperatures))
    if _mean_error(samples, fitted) < _mean_error(samples, Calibration()):
        return fitted
    return Calibration((1.0,) * samples.slots)


def _fit_slot(before_R: np.ndarray, logit_R: np.ndarray, accepted_R: np.ndarray) -> float:
    """The temperature of a slot whose confidences have these logits, before which drafts survive with chance
    ``before_R``.
    """

    def cost(temperature: float) -> float:
        survival_R = before_R * _sigmoid(logit_R / temperature)
        allowed = calibration_error(survival_R, accepted_R) <= most
        return _cross_entropy(survival_R, accepted_R) if allowed else np.inf

    most = calibration_error(before_R * _sigmoid(logit_R), accepted_R)
    # 1 comes first: of equal costs the first wins.
    best = min([1.0, *_COARSE], key=cost)
    return float(min([best, *(best * _FINE)], key=cost))


def _cross_entropy(predicted: np.ndarray, happened: np.ndarray) -> float:
    clipped = np.clip(predicted, _EDGE, 1 - _EDGE)
    return float(-(happened * np.log(clipped) + (1 - happened) * np.log1p(-clipped)).mean())


def calibration_error(predicted: np.ndarray, happened: np.ndarray, bins: int = ECE_BINS) -> float:
    """Expected calibration error: Σ over bins of equal width of share · |mean prediction − mean outcome| (Guo et al.
    2017).

    NaN without samples. Outcomes may be probabilities.
    """
    if len(predicted) == 0:
        return float("nan")
    index = _bin_of(predicted, bins)
    gap = np.bincount(index, weights=predicted, minlength=bins) - np.bincount(index, weights=happened, minlength=bins)
    return float(np.abs(gap).sum() / len(predicted))


@dataclass(frozen=True)
class ReliabilityBin:
    """Predictions of one bin: their mean, the share of them that came true, and how many there are."""

    predicted: float
    happened: float
    count: int


def reliability(predicted: np.ndarray, happened: np.ndarray, bins: int = 10) -> tuple[ReliabilityBin, ...]:
    """The bins that are not empty, ascending: what a reliability diagram draws."""
    index = _bin_of(predicted, bins)
    counts = np.bincount(index, minlength=bins)
    means, shares = (
        np.bincount(index, weights=values, minlength=bins) / np.maximum(counts, 1) for values in (predicted, happened)
    )
    return tuple(ReliabilityBin(float(means[i]), float(shares[i]), int(counts[i])) for i in range(bins) if counts[i])


def auroc(score: np.ndarray, happened: np.ndarray) -> float:
    """Chance that a case that happened has a higher score than one that did not, equal scores counted half. NaN if all
    are alike.

    ``happened`` may be probabilities: each case then counts in part on both sides.
    """
    order = np.argsort(score, kind="stable")
    values, yes = score[order], np.asarray(happened, dtype=np.float64)[order]
    no = 1.0 - yes
    if yes.sum() <= 0 or no.sum() <= 0:
        return float("nan")
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    yes_t, no_t = np.add.reduceat(yes, starts), np.add.reduceat(no, starts)  # per distinct score
    below_t = np.cumsum(no_t) - no_t
    return float((yes_t * (below_t + no_t / 2)).sum() / (yes.sum() * no.sum()))


def _mean_error(samples: ConfidenceSamples, calibration: Calibration) -> float:
    predicted = samples.survival(calibration)
    errors = [
        calibration_error(predicted[seen, k], samples.accepted[seen, k])
        for k, seen in enumerate(samples.seen.T)
        if seen.any()
    ]
    return float(np.mean(errors)) if errors else 0.0


def _bin_of(predicted: np.ndarray, bins: int) -> np.ndarray:
    return np.clip((predicted * bins).astype(np.int64), 0, bins - 1)


def _logit(p: np.ndarray) -> np.ndarray:
    clipped = np.clip(p.astype(np.float64), _EDGE, 1 - _EDGE)
    return np.log(clipped) - np.log1p(-clipped)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def simulated_samples(span: Span, n: int, rng: np.random.Generator | None = None) -> ConfidenceSamples:
    """Of the simulated rounds of one answer, which has confidences, with n drafts each.

    Outcomes are the chances that drafts are accepted (0 or 1 when greedy), which say more than one throw of the dice.
    """
    if span.confidence is None:
        raise ValueError("this span has no confidences to sample")
    anchors_R = np.array([round_.anchor - span.start for round_ in simulate(span, n, rng)], dtype=np.int64)
    left_R = len(span.accept) - 1 - anchors_R
    return ConfidenceSamples(
        confidence=span.confidence[anchors_R, :n],
        accepted=np.cumprod(span.accept[anchors_R, :n], axis=1, dtype=np.float64),
        seen=np.arange(n) < left_R[:, None],
    )


def loop_samples(rounds: Sequence[Round], n: int, eos_ids: Sequence[int] = ()) -> ConfidenceSamples:
    """Of rounds that the loop decoded with up to n drafts each.

    Rounds without confidences, and those that the length limit cut, say nothing; drafts after an accepted end token
    were never decided.
    """
    known = [round_ for round_ in rounds if round_.confidence and not round_.cut]
    confidence_Rn = np.full((len(known), n), 0.5)
    accepted_Rn, seen_Rn = np.zeros((len(known), n)), np.zeros((len(known), n), dtype=bool)
    for row, round_ in enumerate(known):
        ended = any(draft in eos_ids for draft in round_.drafts[: round_.accepted][-1:])
        confidence_Rn[row, : round_.drafted] = round_.confidence
        accepted_Rn[row, : round_.accepted] = 1.0
        seen_Rn[row, : round_.accepted if ended else round_.drafted] = True
    return ConfidenceSamples(confidence_Rn, accepted_Rn, seen_Rn)


def joined(samples: Sequence[ConfidenceSamples]) -> ConfidenceSamples | None:
    """All of them as one; ``None`` if there are none."""
    if not samples:
        return None
    confidence, accepted, seen = (
        np.concatenate([getattr(one, name) for one in samples]) for name in ("confidence", "accepted", "seen")
    )
    return ConfidenceSamples(confidence, accepted, seen)


def error_per_position(samples: ConfidenceSamples, calibration: Calibration) -> list[float]:
    """Expected calibration error of the survival up to each slot; NaN where none was seen."""
    predicted = samples.survival(calibration)
    return [calibration_error(predicted[seen, k], samples.accepted[seen, k]) for k, seen in enumerate(samples.seen.T)]
