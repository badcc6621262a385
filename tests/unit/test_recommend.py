"""The number of drafts that evaluation recommends: measurements where there are some, arithmetic for shorter rounds."""

from __future__ import annotations

from typing import Any

import pytest

from spectrain.evaluation.recommend import recommend
from spectrain.evaluation.records import EvaluationRecord


def record(n: int, **figures: Any) -> EvaluationRecord:
    """Of an imaginary drafter with ``n`` drafts; every draft is accepted in half of the rounds that reach it."""
    shares = tuple(0.5**j for j in range(1, n + 1))
    known: dict[str, Any] = {
        "target": "t",
        "target_revision": "r",
        "drafter": "d",
        "method": "eagle3",
        "engine": "hf",
        "engine_version": "1",
        "suite": "s",
        "num_speculative_tokens": n,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "proposal_policy": "greedy",
        "concurrency": 1,
        "num_prompts": 4,
        "rounds": 100,
        "cut_rounds": 0,
        "drafted_tokens": 100 * n,
        "accepted_tokens": int(100 * sum(shares)),
        "acceptance_length": 1 + sum(shares),
        "acceptance_length_interval": None,
        "acceptance_rate": 0.5,
        "acceptance_per_position": shares,
        "conditional_acceptance_per_position": (0.5,) * n,
        "output_tokens": 100,
        "output_tokens_per_s": 10.0,
        "baseline_tokens_per_s": 10.0,
        "speedup": 1.0,
    }
    return EvaluationRecord(**{**known, **figures})


def test_nothing_measured_nothing_recommended():
    assert recommend([], autoregressive=True) is None
    assert recommend([record(2, rounds=0)], autoregressive=True) is None
    assert (
        recommend([record(2, draft_policy="threshold")], autoregressive=True) is None
    )  # a server verifies what it drafts


@pytest.mark.parametrize("autoregressive", [True, False])
def test_the_fastest_of_those_measured(autoregressive):
    found = recommend([record(1, speedup=1.2), record(3, speedup=1.5), record(5, speedup=1.4)], autoregressive)
    assert (found.num_speculative_tokens, found.speedup) == (3, 1.5)
    assert found.reason == "1.50x measured (suite s, engine hf, temperature 0)"


def test_of_equally_fast_numbers_the_smaller_one():
    found = recommend([record(5, speedup=1.5), record(3, speedup=1.5), record(4, speedup=1.5)], autoregressive=False)
    assert found.num_speculative_tokens == 3


def test_without_a_baseline_tokens_per_second_decide():
    slow, fast = record(3, speedup=None, output_tokens_per_s=20.0), record(2, speedup=None, output_tokens_per_s=30.0)
    found = recommend([slow, fast], autoregressive=False)
    assert (found.num_speculative_tokens, found.speedup) == (2, None)
    assert found.reason.startswith("30 tokens/s measured")
    # One record without a baseline makes the others' speed-ups useless for comparing.
    assert (
        recommend([slow, record(2, speedup=9.0, output_tokens_per_s=15.0)], autoregressive=False).num_speculative_tokens
        == 3
    )


def test_shorter_rounds_of_a_autoregressive_drafter_follow_from_a_longer_one():
    """By hand: a pass of the target takes 0.1 s (10 tokens/s without drafts), so does one over 5 tokens; a draft takes
    0.05 s.

    Tokens per second: n = 1: 1.5/.15 = 10, n = 2: 1.75/.2 = 8.75, n = 4: 1.9375/.3 = 6.5.
    """
    long = record(4, draft_s_per_round=0.2, verify_s_per_round=0.1, speedup=0.6)
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
    dear = recommend([record(4, draft_s_per_round=0.0, verify_s_per_round=0.3)], autoregressive=True)
    assert (dear.num_speculative_tokens, dear.speedup) == (1, pytest.approx((1.5 / 0.15) / (1.9375 / 0.3)))
    free = recommend([record(4, draft_s_per_round=0.0, verify_s_per_round=0.1)], autoregressive=True)
    assert (free.num_speculative_tokens, free.speedup) == (4, 1.0)


def test_conversations_decoded_together_share_a_pass():
    """Eight together at 80 tokens/s: a pass takes 0.1 s, not 1/80 s; drafts are free, so the longest round is best."""
    together = record(4, concurrency=8, baseline_tokens_per_s=80.0, draft_s_per_round=0.0, verify_s_per_round=0.1)
    assert recommend([together], autoregressive=True).num_speculative_tokens == 4


def test_a_measurement_stands_against_an_estimate():
    costs = {"draft_s_per_round": 0.2, "verify_s_per_round": 0.1}
    found = recommend([record(1, speedup=0.5), record(4, speedup=0.6, **costs)], autoregressive=True)
    assert found.num_speculative_tokens == 2  # 1 would be estimated as better, but was measured to be worse
    found = recommend([record(3, speedup=0.1), record(4, speedup=0.6, **costs)], autoregressive=True)
    assert found.num_speculative_tokens == 1
    assert "estimated from 4 drafts measured" in found.reason  # not from the nearest, whose costs are unknown


def test_figures_of_different_measurements_are_not_compared():
    """Another suite, engine, temperature or load is another question; vLLM's own figures come first."""
    ours = [record(n, speedup=s) for n, s in ((1, 2.0), (3, 3.0), (5, 9.0))]
    assert recommend([*ours, record(2, engine="vllm", speedup=1.1)], autoregressive=True).num_speculative_tokens == 2
    for change in ({"suite": "other"}, {"temperature": 1.0}, {"concurrency": 8}, {"top_k": 5}):
        assert (
            recommend([*ours[:2], record(7, speedup=50.0, **change)], autoregressive=True).num_speculative_tokens == 3
        )
