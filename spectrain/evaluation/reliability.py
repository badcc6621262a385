"""Whether a drafter's confidence was right: calibration error, discrimination, and what a reliability diagram draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectrain.decoding.acceptance import Round
from spectrain.decoding.confidence import (
    Calibration,
    ConfidenceSamples,
    auroc,
    error_per_position,
    loop_samples,
    reliability,
)
from spectrain.files import finite_or_none


@dataclass(frozen=True)
class ConfidenceStats:
    """How a drafter's confidence compares with what happened, in ``rounds`` rounds of the decoding loop.

    Per position: ece, the expected calibration error of the predicted survival up to this position, and raw_ece, the
    same without calibration; auroc, the chance that confidence tells an accepted draft from a rejected one, among
    rounds that got so far. bins and raw_bins: (mean prediction, share that came true, number) of the predicted
    survivals of all positions, for a reliability diagram.
    """

    rounds: int
    ece: tuple[float | None, ...]
    raw_ece: tuple[float | None, ...]
    auroc: tuple[float | None, ...]
    bins: tuple[tuple[float, float, int], ...]
    raw_bins: tuple[tuple[float, float, int], ...]


def confidence_stats(
    rounds: Sequence[Round], n: int, temperatures: Sequence[float], eos_ids: Sequence[int]
) -> ConfidenceStats | None:
    """Of rounds that all verified their n drafts; ``None`` if the drafter states no confidence. ``temperatures``: its
    calibration.
    """
    samples = loop_samples(rounds, n, eos_ids)
    if not len(samples.confidence):
        return None
    calibrated, raw = Calibration(), Calibration(tuple(temperatures)).inverse()
    return ConfidenceStats(
        rounds=len(samples.confidence),
        ece=tuple(map(finite_or_none, error_per_position(samples, calibrated))),
        raw_ece=tuple(map(finite_or_none, error_per_position(samples, raw))),
        auroc=tuple(finite_or_none(_auroc(samples, slot)) for slot in range(n)),
        bins=_bins(samples, calibrated),
        raw_bins=_bins(samples, raw),
    )


def _auroc(samples: ConfidenceSamples, slot: int) -> float:
    reached_R = samples.seen[:, slot] & (samples.accepted[:, slot - 1] > 0 if slot else True)
    return auroc(samples.confidence[reached_R, slot], samples.accepted[reached_R, slot])


def _bins(samples: ConfidenceSamples, calibration: Calibration) -> tuple[tuple[float, float, int], ...]:
    predicted = samples.survival(calibration)
    found = reliability(predicted[samples.seen], samples.accepted[samples.seen])
    return tuple((one.predicted, one.happened, one.count) for one in found)
