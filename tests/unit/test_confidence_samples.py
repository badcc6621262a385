"""From simulated and from decoded rounds to samples of what was said and what became of it."""

import numpy as np
import pytest

from spectrain.decoding.acceptance import Round
from spectrain.decoding.confidence import Calibration, error_per_position, joined, loop_samples, simulated_samples
from spectrain.decoding.simulate import Span
from spectrain.evaluation.reliability import confidence_stats


def test_samples_are_taken_where_the_simulation_starts_a_round():
    # Anchors of the answer's tokens 0 … 5; from 0 one draft is accepted, so the next round starts at 2, where both are
    # accepted, and the last at 5.
    accept = np.array([[1, 0], [9, 9], [1, 1], [9, 9], [9, 9], [0, 0]], dtype=float)
    confidence = np.arange(12).reshape(6, 2) / 12
    samples = simulated_samples(Span(3, accept, True, confidence), 2)
    assert samples.confidence.tolist() == confidence[[0, 2]].tolist()
    assert samples.accepted.tolist() == [[1, 0], [1, 1]]
    assert samples.seen.all()


def test_slots_beyond_the_text_are_not_seen():
    accept = np.array([[0, 0, 0], [1, 1, 1], [0, 0, 0]], dtype=float)
    samples = simulated_samples(Span(0, accept, True, np.full((3, 3), 0.5)), 3)
    assert samples.seen.tolist() == [[True, True, False], [True, False, False]]


def test_outcomes_of_a_sampled_simulation_are_chances():
    accept = np.full((40, 2), 0.5)
    samples = simulated_samples(Span(0, accept, False, np.full((40, 2), 0.9)), 2, np.random.default_rng(0))
    assert (samples.accepted == [0.5, 0.25]).all()


def test_a_span_without_confidences_has_no_samples():
    with pytest.raises(ValueError, match="no confidences"):
        simulated_samples(Span(0, np.zeros((2, 1)), True), 1)


def rounds():
    return [
        Round(0, 3, 3, drafts=(5, 6, 8), confidence=(0.9, 0.8, 0.7)),
        Round(4, 3, 1, drafts=(5, 6, 8), confidence=(0.6, 0.5, 0.4)),
        Round(6, 2, 0, drafts=(5, 6), confidence=(0.3, 0.2)),
        Round(7, 3, 1, cut=True, drafts=(5, 6, 8), confidence=(0.3, 0.3, 0.3)),
        Round(7, 3, 1, drafts=(5, 6, 8)),  # a proposer that says nothing
        Round(9, 3, 2, drafts=(5, 7, 8), confidence=(0.1, 0.1, 0.1)),  # 7 ends the text
    ]


def test_samples_of_the_loop():
    samples = loop_samples(rounds(), 3, eos_ids=(7,))
    assert samples.accepted.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert samples.seen.tolist() == [[True] * 3, [True] * 3, [True, True, False], [True, True, False]]
    assert samples.confidence[1].tolist() == [0.6, 0.5, 0.4]
    assert loop_samples(rounds(), 3).seen[3].all()  # 7 is a token like others


def test_nobody_says_anything():
    assert confidence_stats([Round(0, 3, 1)], 3, (), ()) is None
    assert joined([]) is None


def test_joined_samples_and_their_error():
    samples = joined([loop_samples(rounds()[:1], 3), loop_samples(rounds()[1:2], 3)])
    assert len(samples.confidence) == 2
    first = (abs(0.9 - 1) + abs(0.6 - 1)) / 2
    assert error_per_position(samples, Calibration())[0] == pytest.approx(first)


def test_figures_before_and_after_calibration():
    """Rounds carry calibrated confidences; what the drafter said is found from the temperatures."""
    said = [0.9, 0.8, 0.3]
    temperature = 2.0
    calibrated = Calibration((temperature,)).apply(np.array([said]).T)[:, 0]
    accepted = [1, 0, 0]
    stats = confidence_stats(
        [Round(0, 1, k, drafts=(1,), confidence=(float(c),)) for c, k in zip(calibrated, accepted, strict=True)],
        1,
        (temperature,),
        (),
    )
    assert stats.rounds == 3
    assert stats.raw_ece[0] == pytest.approx((0.1 + 0.8 + 0.3) / 3)
    assert stats.ece[0] == pytest.approx(np.abs(calibrated - accepted).sum() / 3)
    assert stats.auroc == (1.0,)
    assert [count for _, _, count in stats.raw_bins] == [1, 1, 1]
    assert stats.raw_bins[0][:2] == (pytest.approx(0.3), 0.0)


def test_discrimination_counts_only_rounds_that_got_so_far():
    those = [
        Round(0, 2, 2, drafts=(1, 1), confidence=(0.9, 0.8)),
        Round(0, 2, 1, drafts=(1, 1), confidence=(0.9, 0.4)),
        Round(0, 2, 0, drafts=(1, 1), confidence=(0.2, 0.9)),  # its second draft was never decided
    ]
    assert confidence_stats(those, 2, (), ()).auroc == (1.0, 1.0)
