"""The evaluation record: its figures against sums done by hand, its file, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from evaluation_records import CONDITIONS

from spectrain.decoding.acceptance import Round, acceptance
from spectrain.errors import InputError, RunError
from spectrain.evaluation.records import (
    Conditions,
    EvaluationRecord,
    PromptResult,
    build_record,
    measurement_name,
    read_record,
    read_records,
)
from spectrain.evaluation.reliability import ConfidenceStats
from spectrain.evaluation.report.sweep_report import markdown_table, sweep_drawings
from spectrain.evaluation.report.tables import compare_with_simulation, distinct_names


def result(
    key: str, accepted: list[int], seconds: float, tokens: int = 4, drafted: int = 3, batch: int | None = None
) -> PromptResult:
    return PromptResult(
        key, [Round(i, drafted, k) for i, k in enumerate(accepted)], list(range(tokens)), seconds, batch
    )


def changed(**values: object) -> Conditions:
    return dataclasses.replace(CONDITIONS, **values)


def test_figures_against_sums_by_hand():
    ours = [result("a", [3, 0, 1], seconds=2.0, tokens=8), result("b", [2], seconds=1.0, tokens=4)]
    plain = [
        result("b", [0] * 4, seconds=3.0, tokens=4, drafted=0),
        result("a", [0] * 8, seconds=4.5, tokens=8, drafted=0),
    ]
    record = build_record(CONDITIONS, ours, plain, draft_s_per_round=0.1, verify_s_per_round=0.2, peak_memory_bytes=7)
    assert (record.num_prompts, record.rounds, record.drafted_tokens, record.accepted_tokens) == (2, 4, 12, 6)
    assert record.acceptance_length == pytest.approx(1 + 6 / 4)
    assert record.acceptance_rate == pytest.approx(6 / 12)
    assert record.acceptance_per_position == pytest.approx((3 / 4, 2 / 4, 1 / 4))
    assert record.conditional_acceptance_per_position == pytest.approx((3 / 4, 2 / 3, 1 / 2))
    assert record.output_tokens == 12
    assert record.output_tokens_per_s == pytest.approx(12 / 3.0)
    assert record.baseline_tokens_per_s == pytest.approx(12 / 7.5)
    assert record.speedup == pytest.approx(7.5 / 3.0)  # prompts are matched by key, whatever their order
    assert record.speedup == pytest.approx(record.output_tokens_per_s / record.baseline_tokens_per_s)
    assert (record.draft_s_per_round, record.verify_s_per_round, record.peak_memory_bytes) == (0.1, 0.2, 7)
    assert record.output_identical is True
    assert record.target == "tiny"
    assert record.is_drafter


def test_rounds_cut_by_the_length_limit_are_left_out():
    cut = PromptResult("a", [Round(0, 3, 2), Round(3, 3, 1, cut=True)], [1, 2, 3, 4], 1.0)
    record = build_record(CONDITIONS, [cut])
    assert (record.rounds, record.cut_rounds, record.accepted_tokens) == (1, 1, 2)


def test_without_speculation_a_round_makes_one_token():
    plain = build_record(
        changed(method="none", drafter=None, num_speculative_tokens=0), [result("a", [0, 0, 0], 1.0, drafted=0)]
    )
    assert plain.acceptance_length == 1.0
    assert plain.acceptance_rate is None  # nothing was drafted: not zero
    assert plain.acceptance_per_position == ()
    assert (plain.speedup, plain.speedup_interval, plain.output_identical) == (None, None, None)
    assert not plain.is_drafter


def test_speedup_interval_is_paired():
    """Every prompt twice as fast: no doubt about the ratio, though the prompts' lengths differ a hundredfold."""
    seconds = [0.1, 1.0, 2.0, 10.0, 0.5]
    ours = [result(str(i), [1], s) for i, s in enumerate(seconds)]
    plain = [result(str(i), [0], 2 * s) for i, s in enumerate(seconds)]
    record = build_record(CONDITIONS, ours, plain)
    assert record.speedup_interval == pytest.approx((2.0, 2.0))
    uneven = build_record(CONDITIONS, ours, [result(str(i), [0], (1 + i) * s) for i, s in enumerate(seconds)])
    low, high = uneven.speedup_interval
    assert 1.0 < low < uneven.speedup < high < 5.0


def test_prompts_decoded_together_are_drawn_together():
    """Within a batch the shares vary, but the batches agree, and only batches were timed."""
    ours = [result(str(i), [1], s, batch=i // 2) for i, s in enumerate([1.0, 3.0, 2.0, 2.0])]
    plain = [result(str(i), [0], s, batch=i // 2) for i, s in enumerate([6.0, 2.0, 1.0, 7.0])]
    record = build_record(CONDITIONS, ours, plain)
    assert record.speedup == pytest.approx(2.0)
    assert record.speedup_interval == pytest.approx((2.0, 2.0))
    alone = build_record(
        CONDITIONS,
        [dataclasses.replace(r, batch=None) for r in ours],
        [dataclasses.replace(r, batch=None) for r in plain],
    )
    assert alone.speedup_interval[0] < 1.8


def test_one_prompt_gives_no_interval():
    record = build_record(CONDITIONS, [result("a", [1, 2], 1.0)], [result("a", [0], 2.0)])
    assert (record.speedup, record.speedup_interval, record.acceptance_length_interval) == (2.0, None, None)


def test_sampled_answers_of_other_lengths_are_compared_by_the_token():
    ours, plain = [result("a", [1], 2.0, tokens=20)], [result("a", [0], 2.0, tokens=10)]
    record = build_record(changed(temperature=0.7), ours, plain)
    assert record.speedup == pytest.approx(2.0)
    assert record.output_identical is None  # nothing has to be equal above temperature 0


def test_one_differing_token_is_seen():
    other = PromptResult("a", [Round(0, 3, 1)], [0, 1, 2, 9], 1.0)
    assert build_record(CONDITIONS, [other], [result("a", [0], 1.0)]).output_identical is False


@pytest.mark.parametrize("baseline_keys", [["a"], ["a", "c"], ["a", "b", "c"], ["a", "a"]])
def test_baseline_of_other_prompts_is_refused(baseline_keys):
    ours = [result("a", [1], 1.0), result("b", [1], 1.0)]
    with pytest.raises(RunError, match="different prompts"):
        build_record(CONDITIONS, ours, [result(key, [0], 1.0) for key in baseline_keys])


def test_nothing_to_record_is_refused():
    with pytest.raises(RunError, match="no result"):
        build_record(CONDITIONS, [])
    with pytest.raises(RunError, match="no time"):
        build_record(CONDITIONS, [result("a", [1], 0.0)])


def full_record() -> EvaluationRecord:
    ours = [result("a", [3, 0], 1.0), result("b", [1, 2], 1.1)]
    simulated = acceptance([r.rounds for r in ours])
    return build_record(
        CONDITIONS, ours, [result("a", [0], 2.0), result("b", [0], 2.5)], simulated, peak_memory_bytes=5
    )


def test_written_and_read_again_it_is_the_same(tmp_path):
    record = full_record()
    path = record.write(tmp_path)
    assert path.name == "heldout-hf-eagle3-n3-t0.json"
    assert read_record(path) == record
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    values = json.loads(path.read_text())
    assert values["acceptance_length_interval"] == list(record.acceptance_length_interval)
    assert values["simulated_acceptance_length"] == values["acceptance_length"]


def test_confidence_figures_survive_the_file(tmp_path):
    stats = ConfidenceStats(5, (0.1, None), (0.2, 0.3), (0.9, None), ((0.25, 0.5, 3), (0.9, 1.0, 2)), ((0.3, 0.4, 5),))
    record = dataclasses.replace(full_record(), confidence=stats, draft_policy="scheduler", concurrency=8)
    path = record.write(tmp_path)
    assert path.name == "heldout-hf-eagle3-n3-t0-scheduler-c8.json"
    assert read_record(path) == record
    values = json.loads(path.read_text())
    for broken in ({"ece": ["x"]}, {"rounds": None}, {"more": 1}):
        path.write_text(json.dumps(values | {"confidence": values["confidence"] | broken}))
        with pytest.raises(InputError, match="confidence has a wrong type"):
            read_record(path)


def test_file_names_differ_where_the_measurement_does():
    same = [CONDITIONS, changed(target="other")]
    different = [
        changed(suite="gsm8k"),
        changed(engine="vllm"),
        changed(method="ngram"),
        changed(num_speculative_tokens=4),
        changed(temperature=0.5),
        changed(temperature=1.0),
        changed(draft_policy="threshold", draft_threshold=0.3),
        changed(draft_policy="threshold", draft_threshold=0.4),
        changed(draft_policy="scheduler"),
        changed(concurrency=8),
    ]
    names = [build_record(c, [result("a", [1], 1.0)]).file_name() for c in same + different]
    assert names[0] == names[1]
    assert len(set(names)) == 1 + len(different)
    assert (
        build_record(changed(suite="../my suite"), [result("a", [1], 1.0)]).file_name()
        == ".._my_suite-hf-eagle3-n3-t0.json"
    )
    assert measurement_name("gsm8k", "vllm", 3, 0.5) == "gsm8k-vllm-n3-t0.5"  # of all methods and batch sizes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": "many"}, "rounds"),
        ({"speedup": True}, "speedup"),
        ({"speedup_interval": [1.0]}, "speedup_interval"),
        ({"acceptance_per_position": [0.5, "x"]}, "acceptance_per_position"),
        ({"colour": 1}, "unknown field colour"),
        ({"suite": ...}, "missing field suite"),
        ({"acceptance_length": math.nan}, "acceptance_length: no figure is nan"),
        ({"speedup": math.inf}, "speedup: no figure is inf"),
        ({"rounds": -1}, "rounds: no figure is -1"),
        ({"output_tokens": 10**400}, "output_tokens"),
        ({"acceptance_length_interval": [math.nan, 2.0]}, "acceptance_length_interval"),
        ({"schema_version": 2}, "schema version 2, this spectrain reads 1"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, change, message):
    path = full_record().write(tmp_path)
    values = json.loads(path.read_text()) | change
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    with pytest.raises(InputError, match=message) as caught:
        read_record(path)
    assert str(path) in str(caught.value)


def test_a_figure_that_was_changed_is_found(tmp_path):
    path = full_record().write(tmp_path)
    assert read_record(path) == full_record()
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"output_tokens": values["output_tokens"] ^ 1}))
    with pytest.raises(InputError, match="has changed since it was written") as caught:
        read_record(path)
    assert str(path) in str(caught.value)
    del values["digest"]  # as earlier versions wrote it
    path.write_text(json.dumps(values))
    assert read_record(path) == full_record()


@pytest.mark.parametrize("seconds", [math.nan, -1.0])
def test_a_prompt_in_no_time_or_less_is_refused(tmp_path, seconds):
    path = full_record().write(tmp_path)
    values = json.loads(path.read_text())
    del values["digest"]
    values["prompts"][0]["seconds"] = seconds
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match="seconds: no figure is"):
        read_record(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"rounds": ' + "9" * 5000 + "}", "[]", "\x00"])
def test_text_that_is_no_record_is_refused_by_name(tmp_path, text):
    (path := tmp_path / "record.json").write_text(text)
    with pytest.raises(InputError, match="not a readable") as caught:
        read_record(path)
    assert str(path) in str(caught.value)


def test_missing_or_cut_off_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="no evaluation record"):
        read_record(tmp_path / "none.json")
    path = full_record().write(tmp_path)
    path.write_text(path.read_text()[:50])
    with pytest.raises(InputError, match="not a readable"):
        read_record(path)


def test_records_of_a_folder_come_with_the_baselines_first(tmp_path):
    for method, drafter, n in (("eagle3", "d", 5), ("ngram", None, 3), ("eagle3", "d", 3), ("none", None, 0)):
        build_record(
            changed(method=method, drafter=drafter, num_speculative_tokens=n), [result("a", [0], 1.0, drafted=n)]
        ).write(tmp_path)
    records = read_records(tmp_path)
    assert [(r.method, r.num_speculative_tokens) for r in records] == [
        ("none", 0),
        ("ngram", 3),
        ("eagle3", 3),
        ("eagle3", 5),
    ]
    assert distinct_names(records) == ["no speculation", "n-gram", "EAGLE-3 drafter, n = 3", "EAGLE-3 drafter, n = 5"]


@pytest.mark.parametrize(
    ("temperature", "simulated", "expected"),
    [
        (0.0, 2.0, ("equal", True)),
        (0.0, 2.0004, ("equal", True)),
        (0.0, 2.1, ("-4.8%", False)),
        (1.0, 2.1, ("-4.8%, within the simulation's interval", True)),
        (1.0, 2.5, ("-20.0%", False)),
        (0.0, None, None),
    ],
)
def test_verdict_on_the_simulation(temperature, simulated, expected):
    interval = None if simulated is None else (simulated - 0.2, simulated + 0.2)
    record = dataclasses.replace(
        full_record(),
        temperature=temperature,
        acceptance_length=2.0,
        simulated_acceptance_length=simulated,
        simulated_acceptance_length_interval=interval,
    )
    assert compare_with_simulation(record) == expected


@pytest.mark.parametrize("folder", ["eval/results", "eval/results/quickstart"])
def test_what_is_committed_can_be_read_and_belongs_together(folder: str) -> None:
    results = Path(__file__).parents[2] / folder
    records = read_records(results / "cells")
    assert len(records) > 10 and not any(Path(record.drafter or "").is_absolute() for record in records)
    rows = (results / "table.md").read_text(encoding="utf-8").splitlines()
    assert sorted(rows) == sorted(markdown_table(records).splitlines())
    assert {path.stem for path in results.glob("*.svg")} <= {drawing.name for drawing in sweep_drawings(records)}
