"""The top of the report: what its figures mean for the reader's own workload, and the next command."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from test_report import FULL, RECORDS, Page

from spectrain.config.loading import compose
from spectrain.evaluation.records import EvaluationRecord
from spectrain.evaluation.report.html import render_report
from spectrain.evaluation.report.next_step import TrainedOn, next_step
from spectrain.stages.run_report import _from_group

SHIPPED = TrainedOn(
    workload=("support.jsonl",), shipped=True, prompts=400, run_dir="runs/quickstart", again=("recipe=quickstart",)
)
OWN = dataclasses.replace(SHIPPED, workload=("a b.jsonl",), shipped=False, run_dir="runs/mi ne")


def measured(**changes: object) -> EvaluationRecord:
    """20 tokens/s without speculation, 1.5 times that with the drafter."""
    known = {"speedup": 1.5, "speedup_interval": (1.4, 1.6), "baseline_tokens_per_s": 20.0, "num_prompts": 16}
    return dataclasses.replace(RECORDS[2], **(known | changes))


def advice(record: EvaluationRecord, trained_on: TrainedOn) -> tuple[str, list[str]]:
    step = next_step(record, trained_on)
    assert step is not None
    return step.meaning, shlex.split(step.command)


def test_shipped_prompts_lead_to_ones_own() -> None:
    meaning, command = advice(measured(), SHIPPED)
    assert "16 held-out prompts of the same kind as the 400 prompts it was trained on (support.jsonl)" in meaning
    assert "300 tokens that took 15.0 s take 10.0 s" in meaning  # 300 / 20, and that over 1.5
    assert command[:2] == ["spectrain", "run"]
    config = compose(command[2:])  # the command is one that can be run
    assert (config.data.train, config.run.dir, config.drafter.method) == (("prompts.jsonl",), "runs/mine", "eagle3")


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((1.01, 1.2), "It pays there"),
        ((0.8, 0.99), "It does not pay"),
        ((0.9, 1.1), "not certain"),
        (None, "not certain"),
    ],
)
def test_it_says_that_it_pays_only_where_that_is_certain(interval: tuple[float, float] | None, words: str) -> None:
    for trained_on in (SHIPPED, OWN):
        assert words in advice(measured(speedup_interval=interval), trained_on)[0]


def test_without_a_baseline_nothing_is_said_about_speed() -> None:
    record = measured(speedup=None, speedup_interval=None, baseline_tokens_per_s=None)
    assert "not compared with no speculation" in advice(record, SHIPPED)[0]


def test_a_drafter_for_ones_own_prompts_is_served_where_it_pays_and_learns_more_where_it_does_not() -> None:
    assert advice(measured(), OWN)[1] == ["spectrain", "serve", "run.dir=runs/mi ne"]
    meaning, command = advice(measured(speedup=0.9, speedup_interval=(0.8, 0.95)), OWN)
    assert command == ["spectrain", "run", "run.dir=runs/mi ne", "data.train=[a b.jsonl,more.jsonl]"]
    assert "More prompts" in meaning


def test_another_suite_is_not_called_held_out() -> None:
    meaning, _ = advice(measured(suite="varied"), SHIPPED)
    assert "the suite varied, not on held-out ones" in meaning


def test_it_opens_the_page_before_any_table() -> None:
    text = re.sub(r"\s+", " ", Page(render_report(dataclasses.replace(FULL, trained_on=SHIPPED))).text)
    command = next_step(RECORDS[2], SHIPPED).command  # type: ignore[union-attr]
    assert 0 < text.index("pay") < text.index(command) < text.index("Methods")
    assert next_step(RECORDS[2], None) is None


def test_a_target_counts_as_the_recipes_only_with_its_own_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _from_group(compose(["recipe=quickstart"]).target)
    assert not _from_group(compose(["recipe=quickstart", "target.path=mine"]).target)
    assert not _from_group(compose(["target.path=mine"]).target)
