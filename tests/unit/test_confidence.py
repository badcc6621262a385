"""Calibration, its measures, and the two policies, against brute force and worked examples."""

import math

import numpy as np
import pytest
import torch

from spectrain.decoding.confidence import (
    Calibration,
    ConfidenceSamples,
    auroc,
    calibration_error,
    fit_calibration,
    reliability,
    survival,
)
from spectrain.decoding.scheduler import SchedulerPolicy, StepCost, ThresholdPolicy, schedule
from spectrain.errors import ConfigError


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def logit(p):
    return np.log(p / (1 - p))


def test_calibration_divides_logits_by_the_slots_temperature():
    raw = np.array([[0.9, 0.2, 0.7], [0.5, 0.6, 0.1]])
    calibrated = Calibration((2.0, 0.5)).apply(raw)
    assert calibrated[:, 0] == pytest.approx(sigmoid(logit(raw[:, 0]) / 2))
    assert calibrated[:, 1] == pytest.approx(sigmoid(logit(raw[:, 1]) / 0.5))
    assert calibrated[:, 2] == pytest.approx(raw[:, 2])  # beyond the last temperature
    assert Calibration().apply(raw) == pytest.approx(raw)
    assert Calibration((2.0, 0.5)).inverse().apply(calibrated) == pytest.approx(raw)
    extremes = Calibration((3.0,)).apply(np.array([[0.0], [1.0]]))
    assert np.isfinite(extremes).all() and extremes[0] < 0.5 < extremes[1]


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_impossible_temperatures_are_refused(temperature):
    with pytest.raises(ConfigError, match="temperature"):
        Calibration((1.0, temperature))


def over_confident(rounds, true_temperatures, seed=0):
    """Rounds in which slot j is accepted with chance σ(z / T_j), while the drafter says σ(z)."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0.7, 1.5, (rounds, len(true_temperatures)))
    accepted = rng.random(z.shape) < sigmoid(z / np.array(true_temperatures))
    return ConfidenceSamples(sigmoid(z), np.cumprod(accepted, axis=1).astype(float), np.ones(z.shape, dtype=bool))


def test_temperatures_are_found_again_from_left_to_right():
    true = (2.5, 0.5, 1.0)
    fitted = fit_calibration(over_confident(60000, true)).temperatures
    assert fitted == pytest.approx(true, rel=0.05)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rounds", [3, 40, 2000])
def test_calibration_never_makes_the_fitted_set_worse(rounds, seed):
    samples = over_confident(rounds, (3.0, 0.4, 1.7, 2.0), seed)
    rng = np.random.default_rng(seed)
    samples.seen[:] = np.arange(4) < rng.integers(0, 5, rounds)[:, None]

    def error(calibration):
        predicted = samples.survival(calibration)
        return np.mean(
            [
                calibration_error(predicted[s, k], samples.accepted[s, k])
                for k, s in enumerate(samples.seen.T)
                if s.any()
            ]
        )

    fitted = fit_calibration(samples)
    assert len(fitted.temperatures) == 4
    assert error(fitted) <= error(Calibration())


def test_the_first_slot_is_the_likeliest_that_raises_no_error():
    samples = over_confident(3000, (3.0, 0.4))
    z, accepted = logit(samples.confidence[:, 0]), samples.accepted[:, 0]

    def likelihood(t):
        return np.log(np.where(accepted > 0, sigmoid(z / t), sigmoid(-z / t))).sum()

    best = fit_calibration(samples).temperatures[0]
    raw = calibration_error(samples.confidence[:, 0], accepted)
    allowed = [t for t in np.geomspace(0.1, 10, 200) if calibration_error(sigmoid(z / t), accepted) <= raw]
    assert calibration_error(sigmoid(z / best), accepted) <= raw
    assert likelihood(best) >= max(likelihood(t) for t in allowed) - 0.05


def test_what_tells_drafts_apart_is_not_traded_for_a_smaller_error():
    """Half of the drafts are accepted, and the head is a little wrong in every bin: the smallest error has a head that
    always says one half.
    """
    rng = np.random.default_rng(0)
    z = rng.normal(0.0, 1.0, 20000)
    said = sigmoid(z)
    accepted = (rng.random(len(z)) < said + 0.04 * (-1.0) ** np.floor(15 * said)).astype(float)
    assert calibration_error(sigmoid(z / 16), accepted) < calibration_error(said, accepted)
    (temperature,) = fit_calibration(
        ConfidenceSamples(said[:, None], accepted[:, None], np.ones((len(z), 1), dtype=bool))
    ).temperatures
    assert 0.8 < temperature < 1.25


def test_slots_that_nobody_saw_change_nothing():
    samples = over_confident(500, (2.0, 1.0))
    samples.seen[:, 1] = False
    other = ConfidenceSamples(samples.confidence, samples.accepted.copy(), samples.seen)
    other.accepted[:, 1] = 1 - other.accepted[:, 1]
    assert fit_calibration(samples) == fit_calibration(other)
    assert fit_calibration(samples).temperatures[1] == 1.0


def test_calibration_error_by_hand():
    # Two bins of ten: .10 and .12 of which one happened, .95 which did not.
    error = calibration_error(np.array([0.10, 0.12, 0.95]), np.array([1.0, 0.0, 0.0]), bins=10)
    assert error == pytest.approx((abs(0.22 - 1) + 0.95) / 3)
    assert math.isnan(calibration_error(np.array([]), np.array([])))
    assert calibration_error(np.array([1.0, 0.0]), np.array([1.0, 0.0])) == 0


def test_reliability_by_hand():
    first, last = reliability(np.array([0.02, 0.06, 1.0]), np.array([0.0, 1.0, 1.0]))
    assert (first.predicted, first.happened, first.count) == (pytest.approx(0.04), 0.5, 2)
    assert (last.predicted, last.happened, last.count) == (1.0, 1.0, 1)


@pytest.mark.parametrize("seed", range(4))
def test_auroc_equals_all_pairs(seed):
    rng = np.random.default_rng(seed)
    score, happened = rng.integers(0, 6, 40) / 5, rng.random(40) < 0.4
    pairs = [(a > b) + (a == b) / 2 for a in score[happened] for b in score[~happened]]
    assert auroc(score, happened) == pytest.approx(np.mean(pairs))
    # A case that happens in one of four draws weighs as four copies of which one happened.
    soft = rng.integers(0, 5, 40) / 4
    copies = np.concatenate([np.arange(4) < 4 * p for p in soft])
    assert auroc(score, soft) == pytest.approx(auroc(np.repeat(score, 4), copies))


def test_auroc_without_both_kinds_is_nothing():
    assert math.isnan(auroc(np.array([0.1, 0.2]), np.array([1.0, 1.0])))


def test_threshold_keeps_a_prefix_by_survival():
    confidence = torch.tensor([[0.9, 0.9, 0.9, 0.9], [0.5, 0.99, 0.99, 0.99], [0.99, 0.1, 0.99, 0.99]])
    assert survival(confidence)[0].tolist() == pytest.approx([0.9, 0.81, 0.729, 0.6561])
    assert ThresholdPolicy(0.7).lengths(confidence, [4, 4, 4]) == [3, 0, 1]
    assert ThresholdPolicy(0.7).lengths(confidence, [2, 4, 0]) == [2, 0, 0]
    assert ThresholdPolicy(0.0).lengths(confidence, [4, 4, 4]) == [4, 4, 4]


# --- scheduler -----------------------------------------------------------------------------------------------------


def table(throughputs, expected):
    """steps_per_s under which a batch of one row has exactly these tokens per second with 0, 1, 2 … drafts."""
    return lambda tokens: throughputs[tokens - 1] / expected[tokens - 1]


def test_it_stops_at_the_first_fall():
    """Throughput would be 1.0, 0.9, 1.13 with 0, 1, 2 drafts: the third is the best, and must not be looked at."""
    chances = np.array([[0.8, 0.7]])
    assert schedule(chances, [2], table([1.0, 0.9, 1.13], [1.0, 1.8, 2.5])) == [0]
    assert schedule(chances, [2], table([1.0, 1.1, 1.09], [1.0, 1.8, 2.5])) == [1]
    assert schedule(chances, [2], table([1.0, 1.1, 1.13], [1.0, 1.8, 2.5])) == [2]


def brute_force(chances, drafted, steps_per_s):
    """The rule in words, one decision at a time: among the next slots of all rows take the likeliest; keep it if that
    is faster.
    """
    kept = [0] * len(chances)

    def throughput(lengths):
        expected = sum(1 + sum(chances[r][:k]) for r, k in enumerate(lengths))
        return expected * steps_per_s(sum(1 + k for k in lengths))

    while True:
        following = [(chances[r][k], -k, -r) for r, k in enumerate(kept) if k < drafted[r]]
        if not following:
            return kept
        row = -max(following)[2]
        tried = [k + (r == row) for r, k in enumerate(kept)]
        if throughput(tried) <= throughput(kept):
            return kept
        kept = tried


@pytest.mark.parametrize("seed", range(20))
def test_schedule_equals_one_decision_at_a_time(seed):
    rng = np.random.default_rng(seed)
    rows, n = int(rng.integers(1, 6)), 4
    chances = np.cumprod(rng.choice([0.3, 0.6, 0.9, 0.97], (rows, n)), axis=1)
    drafted = rng.integers(0, n + 1, rows).tolist()
    seconds = np.cumsum(rng.random(rows * (n + 1) + 1)) + 3
    assert schedule(chances, drafted, lambda t: 1 / seconds[t]) == brute_force(
        chances.tolist(), drafted, lambda t: 1 / seconds[t]
    )


def test_what_a_later_slot_says_does_not_decide_an_earlier_one():
    """The lossless condition: whether slot j of a row is kept is the same for all confidences after it."""
    rng = np.random.default_rng(0)
    cost = StepCost(verify=((1, 1.0), (4, 1.15), (8, 2.0), (32, 6.0)))
    for _ in range(300):
        confidence = torch.from_numpy(rng.uniform(0.05, 1.0, (3, 4)))
        row, slot = int(rng.integers(3)), int(rng.integers(3))
        changed = confidence.clone()
        changed[row, slot + 1 :] = torch.from_numpy(rng.uniform(0.05, 1.0, 3 - slot))
        before, after = (SchedulerPolicy(cost).lengths(c, [4, 4, 4])[row] > slot for c in (confidence, changed))
        assert before == after


def test_full_batches_draft_less():
    """A pass that costs the same up to eight tokens and then by the token: alone, a row drafts all it has; among seven
    others, little.
    """
    cost = StepCost(verify=((1, 1.0), (8, 1.0), (80, 10.0)))
    confidence = torch.full((8, 7), 0.7)
    assert SchedulerPolicy(cost).lengths(confidence[:1], [7]) == [7]
    assert sum(SchedulerPolicy(cost).lengths(confidence, [7] * 8)) < 8
    certain = torch.full((8, 7), 0.999)
    assert SchedulerPolicy(StepCost(((1, 1.0), (8, 1.0), (80, 4.0)))).lengths(certain, [7] * 8) == [7] * 8


def test_cost_is_interpolated_and_goes_on():
    cost = StepCost(verify=((1, 1.0), (3, 2.0), (5, 2.0), (10, 7.0)), draft=((1, 0.5), (2, 1.0)))
    assert 1 / cost.steps_per_s(1, 2) == pytest.approx(1.5 + 0.5)
    assert 1 / cost.steps_per_s(2, 12) == pytest.approx(9.0 + 1.0)
    assert 1 / StepCost(((4, 2.0),)).steps_per_s(1, 9) == pytest.approx(2.0)
