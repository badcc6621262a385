"""Acceptance figures counted by hand, and the bootstrap against a written-out resampling."""

import math

import numpy as np
import pytest

from spectrain.decoding.acceptance import Round, acceptance, bootstrap_ratio_interval


def test_figures_of_a_hand_counted_example():
    rounds = [
        [Round(9, 3, 2), Round(12, 3, 0), Round(13, 3, 1, cut=True)],
        [Round(4, 3, 3), Round(8, 1, 1)],
    ]
    stats = acceptance(rounds)
    assert (stats.rounds, stats.cut_rounds, stats.drafted_tokens, stats.accepted_tokens) == (4, 1, 10, 6)
    assert stats.acceptance_length == pytest.approx(1 + 6 / 4)
    assert stats.acceptance_rate == pytest.approx(6 / 10)
    assert stats.acceptance_per_position == pytest.approx((3 / 4, 2 / 4, 1 / 4))
    # Slot 2 was drafted and reached by two rounds, those with three drafts that accepted one at least.
    assert stats.conditional_acceptance_per_position == pytest.approx((3 / 4, 2 / 2, 1 / 2))


def test_length_is_a_ratio_of_sums_not_a_mean_of_prompts():
    long = [Round(i, 2, 0) for i in range(9)]
    assert acceptance([long, [Round(0, 2, 2)]]).acceptance_length == pytest.approx(1 + 2 / 10)


def test_survival_sums_to_the_length():
    rng = np.random.default_rng(0)
    rounds = [[Round(i, 5, int(rng.integers(0, 6))) for i in range(7)] for _ in range(5)]
    stats = acceptance(rounds)
    assert 1 + sum(stats.acceptance_per_position) == pytest.approx(stats.acceptance_length)
    assert np.prod(stats.conditional_acceptance_per_position) == pytest.approx(stats.acceptance_per_position[-1])


@pytest.mark.parametrize("rounds", [[], [[]], [[Round(0, 3, 1, cut=True)]]])
def test_nothing_counted_is_nan_not_an_error(rounds):
    stats = acceptance(rounds, num_positions=2)
    assert stats.rounds == 0
    assert stats.interval is None
    assert math.isnan(stats.acceptance_length)
    assert all(math.isnan(share) for share in stats.acceptance_per_position)
    assert len(stats.acceptance_per_position) == 2


def test_plain_decoding_has_length_one_and_no_rate():
    stats = acceptance([[Round(0, 0, 0), Round(1, 0, 0)], [Round(0, 0, 0)]])
    assert stats.acceptance_length == 1.0
    assert math.isnan(stats.acceptance_rate)
    assert stats.acceptance_per_position == ()
    assert stats.interval == (1.0, 1.0)


def test_bootstrap_agrees_with_a_written_out_one():
    rng = np.random.default_rng(5)
    bottom = rng.integers(5, 40, size=30)
    top = rng.binomial(bottom, 0.6)
    low, high = bootstrap_ratio_interval(top, bottom, resamples=4000)
    ratios = []
    for _ in range(4000):
        drawn = rng.integers(0, 30, size=30)
        ratios.append(top[drawn].sum() / bottom[drawn].sum())
    assert (low, high) == pytest.approx(np.quantile(ratios, [0.025, 0.975]), abs=0.005)
    assert low < top.sum() / bottom.sum() < high


def test_bootstrap_is_the_same_each_time_and_another_for_another_seed():
    rng = np.random.default_rng(3)
    bottom = rng.integers(50, 400, size=40)
    top = rng.binomial(bottom, 0.37)
    first, again, other = (bootstrap_ratio_interval(top, bottom, seed=seed, resamples=500) for seed in (1, 1, 2))
    assert first == again != other


def test_bootstrap_narrows_with_confidence():
    top, bottom = [1, 5, 2, 7], [4, 6, 5, 8]
    wide, narrow = (
        bootstrap_ratio_interval(top, bottom, confidence=0.95),
        bootstrap_ratio_interval(top, bottom, confidence=0.5),
    )
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_bootstrap_needs_two_prompts_with_rounds():
    assert bootstrap_ratio_interval([3], [5]) is None
    assert bootstrap_ratio_interval([3, 0], [5, 0]) is None


def test_cut_rounds_and_empty_prompts_do_not_move_the_interval():
    rounds = [[Round(i, 3, i % 3) for i in range(8)], [Round(i, 3, 2) for i in range(5)], [Round(0, 3, 1)] * 4]
    with_noise = [[*rounds[0], Round(9, 3, 3, cut=True)], *rounds[1:], [], [Round(3, 3, 0, cut=True)]]
    assert acceptance(with_noise).interval == acceptance(rounds).interval
