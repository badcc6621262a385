"""Records side by side: paired intervals by a bootstrap written out, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_sweep_advice import record

from spectrain.errors import InputError
from spectrain.evaluation.compare_records import compare, differing_conditions, pairs, records_of
from spectrain.evaluation.prompt_figures import PromptFigures


def figures(seed: int, shift: int = 0, count: int = 12) -> tuple[PromptFigures, ...]:
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        rounds = int(rng.integers(20, 40))
        accepted = int(rng.integers(10, 30)) + shift
        correct = bool(number % 2) if seed else None
        found.append(
            PromptFigures(
                f"p{number}", "d", rounds, accepted, rounds + accepted, 0.1 * rounds, None, None, "o", correct
            )
        )
    return tuple(found)


def test_differences_are_over_common_prompts_with_paired_intervals():
    first = record("eagle3", 2, None, prompts=figures(1))
    second = record("eagle3", 4, None, prompts=figures(1, shift=6)[2:])
    made = compare(first, second)
    assert made.prompts == 10 and made.same_output == 10
    by_name = {difference.name: difference for difference in made.differences}
    length = by_name["acceptance length"]
    ours = np.array([(p.rounds, p.accepted_tokens) for p in first.prompts[2:]])
    assert length.first == pytest.approx(1 + ours[:, 1].sum() / ours[:, 0].sum())
    assert length.change == pytest.approx(60 / ours[:, 0].sum())
    # Written out: the same prompts are drawn for both sides, so only 6 drafts a prompt more differ.
    rng = np.random.default_rng(5)
    drawn = [ours[rng.integers(0, 10, 10), 0].sum() for _ in range(4000)]
    assert length.interval == pytest.approx(np.quantile(60 / np.array(drawn), [0.025, 0.975]), rel=0.02)
    assert length.certain and by_name["tokens/s"].change > 1
    assert by_name["accuracy"].change == 0 and not by_name["accuracy"].certain


def test_other_conditions_are_refused_by_name_unless_asked_for():
    first = record("eagle3", 2, None, prompts=figures(0))
    warm = replace(first, temperature=0.7, concurrency=8)
    assert differing_conditions(first, warm) == ["temperature 0 and 0.7", "concurrency 1 and 8"]
    with pytest.raises(InputError, match=r"temperature 0 and 0\.7; concurrency 1 and 8.*--anyway"):
        compare(first, warm)
    made = compare(first, warm, anyway=True)
    assert made.differing == ("temperature 0 and 0.7", "concurrency 1 and 8") and made.same_output is None
    assert differing_conditions(first, replace(first, drafter="other", num_speculative_tokens=5)) == []


def test_what_cannot_be_compared_is_named(tmp_path):
    first = record("eagle3", 2, None, prompts=figures(0))
    with pytest.raises(InputError, match="no figures of single prompts"):
        compare(first, replace(first, prompts=()))
    strangers = tuple(replace(prompt, key=f"other{i}") for i, prompt in enumerate(first.prompts))
    with pytest.raises(InputError, match="no prompt in common"):
        compare(first, replace(first, prompts=strangers))
    with pytest.raises(InputError, match="neither a record"):
        records_of(str(tmp_path / "nothing"))


def test_records_of_two_runs_are_paired_by_what_they_measure(tmp_path):
    cells = [record("eagle3", n, None, prompts=figures(0), drafter="d", concurrency=c) for n in (1, 2) for c in (1, 8)]
    for one in cells[:2]:
        one.write(tmp_path / "a" / "eval" / "sweep")
    cells[3].write(tmp_path / "a" / "eval")
    found = records_of(str(tmp_path / "a"))
    assert sorted((r.num_speculative_tokens, r.concurrency) for r in found) == [(1, 1), (1, 8), (2, 8)]
    longer = [replace(r, max_new_tokens=99) for r in found]
    assert all(a.max_new_tokens is None for a, _ in pairs([*found, *longer], found))
    others = [replace(r, drafter="e") for r in cells if (r.num_speculative_tokens, r.concurrency) != (1, 8)]
    assert [(a.num_speculative_tokens, b.drafter) for a, b in pairs(found, others)] == [(1, "e"), (2, "e")]
    assert len(pairs(cells[:1], cells[3:])) == 1
