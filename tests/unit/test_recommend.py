"""The number of drafts that evaluation recommends: measurements where there are some, arithmetic for shorter rounds."""

from __future__ import annotations

import pytest
from evaluation_records import halving_record

from spectrain.evaluation.recommend import recommend


def test_nothing_measured_nothing_recommended():
    assert recommend([], autoregressive=True) is None
    assert recommend([halving_record(2, rounds=0)], autoregressive=True) is None
    assert (
        recommend([halving_record(2, draft_policy="threshold")], autoregressive=True) is None
    )  # a server verifies what it drafts


@pytest.mark.parametrize("autoregressive", [True, False])
def test_the_fastest_of_those_measured(autoregressive):
    found = recommend(
        [halving_record(1, speedup=1.2), halving_record(3, speedup=1.5), halving_record(5, speedup=1.4)], autoregressive
    )
    assert (found.num_speculative_tokens, found.speedup) == (3, 1.5)
    assert found.reason == "1.50x measured (suite heldout, engine hf, temperature 0)"


def test_of_equally_fast_numbers_the_smaller_one():
    found = recommend(
        [halving_record(5, speedup=1.5), halving_record(3, speedup=1.5), halving_record(4, speedup=1.5)],
        autoregressive=False,
    )
    assert found.num_speculative_tokens == 3


def test_without_a_baseline_tokens_per_second_decide():
    slow, fast = (
        halving_record(3, speedup=None, output_tokens_per_s=20.0),
        halving_record(2, speedup=None, output_tokens_per_s=30.0),
    )
    found = recommend([slow, fast], autoregressive=False)
    assert (found.num_speculative_tokens, found.speedup) == (2, None)
    assert found.reason.startswith("30 tokens/s measured")
    # One record without a baseline makes the others' speed-ups useless for comparing.
    assert (
        recommend(
            [slow, halving_record(2, speedup=9.0, output_tokens_per_s=15.0)], autoregressive=False
        ).num_speculative_tokens
        == 3
    )


def test_shorter_rounds_of_a_autoregressive_drafter_follow_from_a_longer_one():
    """By hand: a pass of the target takes 0.1 s (10 tokens/s without drafts), so does one over 5 tokens; a draft takes
    0.05 s.

    Tokens per second: n = 1: 1.5/.15 = 10, n = 2: 1.75/.2 = 8.75, n = 4: 1.9375/.3 = 6.5.
    """
    long = halving_record(4, draft_s_per_round=0.2, verify_s_per_round=0.1, speedup=0.6)
    found = recommend([long], autoregressive=True)
    assert found.num_speculative_tokens == 1
    assert found.speedup == pytest.approx(0.6 * (1.5 / 0.15) / (1.9375 / 0.3))
    assert found.reason.startswith("0.93x estimated from 4 drafts measured")
    assert recommend([long], autoregressive=False).num_speculative_tokens == 4  # of a shorter block nothing is known


def test_verifying_more_tokens_costs_more():
    """By hand: drafting is free; a pass takes 0.1 s for one token and 0.3 s for five, so 0.05 s for each draft.

    Tokens per second: n = 1: 1.5/.15 = 10, n = 2: 1.75/.2 = 8.75, n = 3: 1.875/.25 = 7.5, n = 4: 6.46. With a pass that
    costs the same for any number of tokens, the longest round is best.
    """
    dear = recommend([halving_record(4, draft_s_per_round=0.0, verify_s_per_round=0.3)], autoregressive=True)
    assert (dear.num_speculative_tokens, dear.speedup) == (1, pytest.approx((1.5 / 0.15) / (1.9375 / 0.3)))
    free = recommend([halving_record(4, draft_s_per_round=0.0, verify_s_per_round=0.1)], autoregressive=True)
    assert (free.num_speculative_tokens, free.speedup) == (4, 1.0)


def test_conversations_decoded_together_share_a_pass():
    """Eight together at 80 tokens/s: a pass takes 0.1 s, not 1/80 s; drafts are free, so the longest round is best."""
    together = halving_record(
        4, concurrency=8, baseline_tokens_per_s=80.0, draft_s_per_round=0.0, verify_s_per_round=0.1
    )
    assert recommend([together], autoregressive=True).num_speculative_tokens == 4


def test_a_measurement_stands_against_an_estimate():
    costs = {"draft_s_per_round": 0.2, "verify_s_per_round": 0.1}
    found = recommend([halving_record(1, speedup=0.5), halving_record(4, speedup=0.6, **costs)], autoregressive=True)
    assert found.num_speculative_tokens == 2  # 1 would be estimated as better, but was measured to be worse
    found = recommend([halving_record(3, speedup=0.1), halving_record(4, speedup=0.6, **costs)], autoregressive=True)
    assert found.num_speculative_tokens == 1
    assert "estimated from 4 drafts measured" in found.reason  # not from the nearest, whose costs are unknown


def test_figures_of_different_measurements_are_not_compared():
    """Another suite, engine, temperature or load is another question; vLLM's own figures come first."""
    ours = [halving_record(n, speedup=s) for n, s in ((1, 2.0), (3, 3.0), (5, 9.0))]
    assert (
        recommend([*ours, halving_record(2, engine="vllm", speedup=1.1)], autoregressive=True).num_speculative_tokens
        == 2
    )
    for change in ({"suite": "other"}, {"temperature": 1.0}, {"concurrency": 8}, {"top_k": 5}):
        assert (
            recommend(
                [*ours[:2], halving_record(7, speedup=50.0, **change)], autoregressive=True
            ).num_speculative_tokens
            == 3
        )
