"""Engines beside each other: which greedy cells accept alike, and what a sweep says and draws of several engines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_compare_records import figures
from test_sweep_advice import record

from spectrain.evaluation.engine_agreement import engine_agreements
from spectrain.evaluation.report.sweep_report import markdown_table, sweep_drawings

OURS = record("eagle3", 2, 1.2, prompts=figures(1))
THEIRS = replace(OURS, engine="vllm", engine_version="y")


def test_equal_rounds_agree_and_a_shift_of_every_prompt_does_not():
    (same,) = engine_agreements([OURS, THEIRS])
    assert (same.engines, same.change, same.interval, same.agrees) == (("hf", "vllm"), 0.0, (0.0, 0.0), True)
    assert (same.same_output, same.prompts) == (12, 12)
    (apart,) = engine_agreements([OURS, replace(THEIRS, prompts=figures(1, shift=3))])
    rounds = sum(prompt.rounds for prompt in OURS.prompts)
    assert apart.change == pytest.approx(12 * 3 / rounds) and not apart.agrees


def test_one_prompt_that_parts_is_within_the_interval():
    """A tie that went the other way in one of twelve answers: 0 is among what chance explains."""
    first, *others = OURS.prompts
    moved = replace(first, accepted_tokens=first.accepted_tokens + 4, output_digest="other")
    (found,) = engine_agreements([OURS, replace(THEIRS, prompts=(moved, *others))])
    assert found.change > 0 and found.agrees and (found.same_output, found.prompts) == (11, 12)
    (alone,) = engine_agreements([replace(OURS, prompts=(first,)), replace(THEIRS, prompts=(moved,))])
    assert alone.interval is None and not alone.agrees


@pytest.mark.parametrize(
    "other",
    [
        replace(THEIRS, temperature=0.7),
        replace(THEIRS, num_speculative_tokens=4),
        replace(THEIRS, suite="another"),
        replace(THEIRS, concurrency=8),
        replace(THEIRS, context_tokens=2048),
        replace(THEIRS, target="another"),
    ],
)
def test_other_cells_are_not_compared(other):
    assert engine_agreements([OURS, other]) == []


def test_no_speculation_has_no_acceptance_to_compare():
    plain = record("none", 0, None, prompts=figures(1))
    assert engine_agreements([plain, replace(plain, engine="vllm")]) == []


def test_tables_and_figures_of_several_engines_name_them():
    assert "engine" not in markdown_table([OURS])
    head, rule, *rows = markdown_table([OURS, THEIRS]).splitlines()
    assert head.count("|") == rule.count("|") == rows[0].count("|") == 10
    assert [row.split("|")[2].strip() for row in rows] == ["hf", "vllm"]
    names = {drawing.name for drawing in sweep_drawings([OURS, THEIRS])}
    assert {drawing.name for drawing in sweep_drawings([OURS])} == {name[:-3] for name in names if name.endswith("-hf")}
    assert {"speedup-s-hf", "speedup-s-vllm"} <= names
