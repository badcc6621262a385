"""Cells that were not run, predicted from hand-made ones whose costs are known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_sweep_advice import record

from spectrain.evaluation.records import EvaluationRecord
from spectrain.evaluation.report.sweep_report import SUMMARY, write_summary
from spectrain.evaluation.sweep_advice import advise
from spectrain.evaluation.sweep_predictions import predicted_cells, prediction_errors

RELATIVE = 1e-12


def cost(method: str, n: int, size: int, context: int | None = None) -> tuple[float, float, float, float]:
    """(acceptance length, seconds of drafting, of verifying, of a plain step): all grow as a constant and a multiple of
    the batch, and of the context.
    """
    tokens = context or 0
    length = (2.5 if method == "eagle3" else 1.25) - tokens / 16384
    draft_s = n * (0.002 + 0.0005 * size + 1e-6 * tokens)
    verify_s = 0.010 + 0.001 * n * size + 4e-6 * tokens
    plain_s = 0.010 + 0.002 * size + 3e-6 * tokens
    return length, draft_s, verify_s, plain_s


def speedup(method: str, n: int, size: int, context: int | None = None) -> float:
    length, draft_s, verify_s, plain_s = cost(method, n, size, context)
    return length * plain_s / (draft_s + verify_s)


def cell(method: str, n: int, size: int, context: int | None = None, **more: Any) -> EvaluationRecord:
    length, draft_s, verify_s, _ = cost(method, n, size, context)
    known = {
        "speedup": speedup(method, n, size, context),
        "concurrency": size,
        "context_tokens": context,
        "draft_s_per_round": draft_s,
        "verify_s_per_round": verify_s,
        "shares": ((length - 1) / n,) * n,
    }
    return record(method, n, **{**known, **more})


def found(cells: list[EvaluationRecord], **asked: tuple[int, ...]) -> dict[tuple[Any, ...], float]:
    return {
        (c.method, c.num_speculative_tokens, c.concurrency, c.context_tokens): made.speedup
        for made in predicted_cells(cells, (), asked)  # type: ignore[arg-type]
        for c in [made.conditions]
    }


def test_between_measured_numbers_of_drafts_speed_is_predicted_and_judged():
    def cell(n: int) -> EvaluationRecord:
        # Every draft accepted with .5 given the ones before; a round costs 1 + .1 n plain steps.
        shares = tuple(0.5**j for j in range(1, n + 1))
        return record("eagle3", n, (1 + sum(shares)) / (1 + 0.1 * n), shares=shares)

    (advice,) = advise([cell(1), cell(4)], step_by_step=["eagle3"])
    predicted = {c.num_speculative_tokens: c.speedup for c in advice.choices if c.predicted}
    assert predicted == pytest.approx({2: 1.75 / 1.2, 3: 1.875 / 1.3})
    assert advice.best.num_speculative_tokens == 1 or not advice.best.predicted
    assert not [
        c for a in advise([cell(1), cell(4)]) for c in a.choices if c.predicted
    ]  # a block's beginning is another
    errors = prediction_errors([cell(1), cell(2), cell(4)], ["eagle3"])
    assert [(e.num_speculative_tokens, round(e.relative, 9)) for e in errors] == [(1, 0.0), (2, 0.0)]
    # One that is off the line, predicted from the two that are on it.
    slow = record("eagle3", 2, 0.8 * (cell(2).speedup or 0.0), shares=cell(2).acceptance_per_position)
    found = {e.num_speculative_tokens: e.relative for e in prediction_errors([cell(1), slow, cell(4)], ["eagle3"])}
    assert found[2] == pytest.approx(0.25)


def test_between_measured_concurrencies_linear_costs_give_exact_predictions():
    cells = [cell(method, n, size) for method in ("eagle3", "ngram") for n in (1, 3) for size in (1, 8)]
    predicted = found(cells, concurrency=(1, 3, 8, 32))
    # Doublings of what was measured, and what was asked for; nothing beyond, and nothing that was measured.
    keys = [(method, n, size, None) for method in ("eagle3", "ngram") for n in (1, 3) for size in (2, 3, 4)]
    assert predicted.keys() == set(keys)
    for key in keys:
        assert predicted[key] == pytest.approx(speedup(*key), rel=RELATIVE)
    # An interpolated speed-up would be another: it is no straight line.
    ends = speedup("eagle3", 3, 1), speedup("eagle3", 3, 8)
    assert abs(predicted["eagle3", 3, 4, None] / (ends[0] + 3 / 7 * (ends[1] - ends[0])) - 1) > 0.02


def test_between_measured_lengths_of_context_too():
    cells = [cell("eagle3", 3, 1, context) for context in (1000, 6000)]
    predicted = found(cells, context_tokens=(1000, 6000, 5000, 9000))
    assert predicted == pytest.approx(
        {("eagle3", 3, 1, k): speedup("eagle3", 3, 1, k) for k in (2000, 4000, 5000)}, rel=RELATIVE
    )
    assert not found([cell("eagle3", 3, 1), cell("eagle3", 3, 1, 4000)])  # prompts as they are have no length


def test_only_like_cells_with_known_seconds_are_joined():
    assert not found([cell("eagle3", 3, 1), cell("eagle3", 2, 8), cell("ngram", 3, 8)])
    assert not found([cell("eagle3", 3, 1), cell("eagle3", 3, 8, suite="other")])
    assert not found([cell("eagle3", 3, 1), cell("eagle3", 3, 8, temperature=1.0)])
    unknown = {"draft_s_per_round": None, "verify_s_per_round": None}  # as vLLM's are
    assert not found([cell("eagle3", 3, size, **unknown) for size in (1, 8)])
    # The nearest ones count: what is further away need not lie on the same line.
    steep = cell("eagle3", 3, 64, verify_s_per_round=9.0)
    assert found([cell("eagle3", 3, 1), cell("eagle3", 3, 8), steep])["eagle3", 3, 4, None] == pytest.approx(
        speedup("eagle3", 3, 4), rel=RELATIVE
    )


def test_a_group_that_was_not_run_gets_advice_that_says_so():
    cells = [cell("eagle3", 3, size) for size in (1, 4)] + [record("none", 0, None, concurrency=s) for s in (1, 4)]
    one, two, four = advise(cells)
    assert [(a.concurrency, a.predicted) for a in (one, two, four)] == [(1, False), (2, True), (4, False)]
    assert two.best.predicted and not two.certain and two.best.interval is None
    assert two.best.speedup == pytest.approx(speedup("eagle3", 3, 2), rel=RELATIVE)
    assert not one.best.predicted and not four.best.predicted
    # A cell that lacks where others were measured is predicted beside them, but is not recommended.
    lacking = [*cells, record("ngram", 3, 1.01, concurrency=2)]
    beside = advise(lacking)[1]
    assert not beside.predicted and beside.best.method == "ngram"
    assert [(c.method, c.predicted) for c in beside.choices] == [("eagle3", True), ("ngram", False), ("none", False)]


def test_each_measured_cell_is_left_out_in_turn():
    bent = cell("eagle3", 3, 4, verify_s_per_round=1.5 * cost("eagle3", 3, 4)[2], speedup=0.8 * speedup("eagle3", 3, 4))
    sizes = [cell("eagle3", 3, 1), cell("eagle3", 3, 2), bent, cell("eagle3", 3, 8)]
    contexts = [cell("ngram", 2, 1, k) for k in (500, 1000, 3000)]
    errors = {(e.over, e.method, e.concurrency, e.context_tokens): e for e in prediction_errors(sizes + contexts)}
    assert errors.keys() == {
        ("concurrency", "eagle3", 2, None),
        ("concurrency", "eagle3", 4, None),
        ("context_tokens", "ngram", 1, 1000),
    }
    assert errors["context_tokens", "ngram", 1, 1000].relative == pytest.approx(0, abs=1e-9)
    # From 2 and 8, which lie on the line, 4 is what it would be on it: 1 / .8 of what was measured.
    assert errors["concurrency", "eagle3", 4, None].relative == pytest.approx(0.25)
    # From 1 and the bent one at 4, by hand: a third of the way.
    length, draft_s, verify_s, plain_s = cost("eagle3", 3, 4)
    bent_s = draft_s + 1.5 * verify_s
    bent_plain_s = bent.speedup * bent_s / length
    first = cost("eagle3", 3, 1)
    round_s = 2 / 3 * (first[1] + first[2]) + 1 / 3 * bent_s
    step_s = 2 / 3 * first[3] + 1 / 3 * bent_plain_s
    assert errors["concurrency", "eagle3", 2, None].predicted == pytest.approx(length * step_s / round_s)


def test_the_summary_marks_them_and_says_how_far_off_they_are(tmp_path, capsys):
    cells = [cell("eagle3", 1, size) for size in (1, 8)] + [record("none", 0, None, concurrency=s) for s in (1, 8)]
    best = write_summary(tmp_path, cells, {}, (), {"concurrency": (1, 8)})
    assert best == pytest.approx(speedup("eagle3", 1, 8))
    written = json.loads((tmp_path / SUMMARY).read_text())["suites"]
    assert [(a["concurrency"], a["predicted"], a["best"]["predicted"]) for a in written] == [
        *((1, False, False), (2, True, True), (4, True, True), (8, False, False))
    ]
    said = " ".join("".join(capsys.readouterr()).split())
    assert "(predicted)" in said and "is not known" in said
    pictures = {path.name for path in (tmp_path / SUMMARY).parent.glob("*.svg")}
    assert "concurrency-s.svg" in pictures
    write_summary(tmp_path, cells[:1], {}, (), {})  # of one concurrency there is no such figure
    assert {path.name for path in (tmp_path / SUMMARY).parent.glob("*.svg")} == pictures - {"concurrency-s.svg"}
    capsys.readouterr()
    middle = [*cells, cell("eagle3", 1, 4), record("none", 0, None, concurrency=4)]
    write_summary(tmp_path, middle, {}, (), {})
    said = " ".join("".join(capsys.readouterr()).split())
    assert "predicted from other concurrencies, 1 measured cells are off by 0.0%" in said and "not known" not in said


def test_where_speculation_stops_to_pay_is_narrowed_by_predictions(tmp_path):
    cells = [cell("eagle3", 3, size, speedup=value) for size, value in ((1, 1.4), (16, 0.9))]
    write_summary(tmp_path, cells, {}, (), {})
    (told,) = json.loads((tmp_path / SUMMARY).read_text())["pays_up_to"]
    # By hand: seconds of a round .0205 and .088, of a plain step 1.4 · .0205 / 2.5 and .9 · .088 / 2.5; at 2, 4, 8 on
    # lines between them the speed-up is 1.28, 1.14, 1.005.
    assert (told["concurrency"], told["predicted"]) == (1, 8)
