"""What a sweep recommends, by arithmetic on paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from evaluation_records import record_of

from spectrain.evaluation.prompt_figures import PromptFigures
from spectrain.evaluation.records import EvaluationRecord
from spectrain.evaluation.sweep_advice import advise, advise_workload, pays_up_to


def prompt(number: int, seconds: float, plain_s: float, tokens: int = 100) -> PromptFigures:
    return PromptFigures(f"p{number}", None, 50, 50, tokens, seconds, plain_s, None, f"o{number}", None)


def record(method: str, n: int, speedup: float | None, **figures: Any) -> EvaluationRecord:
    drafts = figures.pop("shares", (0.5,) * n)
    ours = {"method": method, "drafter": None, "suite": "s", "speedup": speedup, "num_prompts": 10}
    ours |= {"num_speculative_tokens": n, "output_tokens_per_s": 10.0 * (speedup or 1.0)}
    return record_of(drafts, **(ours | {"conditional_acceptance_per_position": drafts} | figures))


def test_the_fastest_is_recommended_and_the_others_cost_what_they_lose():
    cells = [
        record("none", 0, None),
        record("eagle3", 1, 1.2, speedup_interval=(1.1, 1.3)),
        record("eagle3", 3, 1.5, speedup_interval=(1.4, 1.6)),
        record("ngram", 3, 0.75),
    ]
    (advice,) = advise(cells)
    assert (advice.best.method, advice.best.num_speculative_tokens, advice.certain) == ("eagle3", 3, True)
    costs = {(c.method, c.num_speculative_tokens): advice.cost_of(c) for c in advice.choices}
    assert costs == pytest.approx({("eagle3", 3): 0, ("eagle3", 1): 0.2, ("none", 0): 1 / 3, ("ngram", 3): 0.5})
    (unsure,) = advise([record("ngram", 1, 1.1, speedup_interval=(0.9, 1.3))])
    assert unsure.best.method == "ngram" and not unsure.certain


def test_where_nothing_is_faster_no_speculation_is():
    sizes = {1: 1.4, 2: 1.1, 4: 0.9, 8: 1.2}
    advices = advise([record("ngram", 2, speedup, concurrency=size) for size, speedup in sizes.items()])
    assert [advice.best.method for advice in advices] == ["ngram", "ngram", "none", "ngram"]
    assert pays_up_to(advices) == {("s", "hf", 0.0, None): 2}
    never = advise([record("ngram", 2, 0.8)])
    assert pays_up_to(never) == {("s", "hf", 0.0, None): None} and never[0].certain


def test_a_workload_is_weighted_by_tokens_and_needs_every_suite():
    fast = record("eagle3", 2, 2.0, suite="a", prompts=tuple(prompt(i, 1.0, 2.0) for i in range(4)))
    slow = record("eagle3", 2, 0.5, suite="b", prompts=tuple(prompt(i, 4.0, 2.0) for i in range(4)))
    only_here = record("ngram", 2, 3.0, suite="a", prompts=(prompt(0, 1.0, 3.0), prompt(1, 1.0, 3.0)))
    (advice,) = advise_workload([fast, slow, only_here], {"a": 3, "b": 1})
    # Plain seconds a token are .02 in both; ours .75 · .01 + .25 · .04.
    found = {choice.method: choice for choice in advice.choices}
    assert found.keys() == {"eagle3", "none"}
    assert found["eagle3"].speedup == pytest.approx(0.02 / 0.0175)
    assert found["eagle3"].interval == pytest.approx((0.02 / 0.0175,) * 2)  # all prompts alike
    # Where the suites are not equally fast without speculation: .75 · .02 + .25 · .06 a token.
    slower = record("eagle3", 2, 1.5, suite="b", prompts=tuple(prompt(i, 4.0, 6.0) for i in range(4)))
    (unlike,) = advise_workload([fast, slower], {"a": 3, "b": 1})
    assert unlike.best.speedup == pytest.approx(0.03 / 0.0175)
    (equal,) = advise_workload([fast, slow], {})
    assert equal.best.method == "none" and equal.choices[1].speedup == pytest.approx(0.02 / 0.025)


def test_its_interval_resamples_the_prompts_of_each_suite():
    rng = np.random.default_rng(0)
    seconds = rng.uniform(0.5, 1.5, size=(2, 6))
    cells = [
        record("eagle3", 2, 1.0, suite=suite, prompts=tuple(prompt(i, s, 1.0) for i, s in enumerate(row)))
        for suite, row in zip("ab", seconds, strict=True)
    ]
    (advice,) = advise_workload(cells, {})
    choice = next(c for c in advice.choices if c.method == "eagle3")
    draws = [rng.choice(row, size=(4000, 6)).mean(axis=1) for row in seconds]
    low, high = np.quantile(2.0 / (draws[0] + draws[1]), [0.025, 0.975])
    assert choice.interval == pytest.approx((low, high), abs=0.03)
