"""What a confidence head says in the rounds of a simulation (or of the loop), and what becomes of those drafts: the
samples that calibration is fitted on and judged by.

Rounds, not all positions: a round starts where a draft has just been rejected, where the next one is likelier to be
rejected, too. A head that is right on average over all positions would be too sure where it is asked.

Legend: L tokens of an answer, R rounds, n draft slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spectrain.decoding.acceptance import Round
from spectrain.decoding.confidence import Calibration, ConfidenceSamples, calibration_error
from spectrain.decoding.simulate import Span, simulate


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
