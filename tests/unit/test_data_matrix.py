"""The matrix of runs and suites, by hand: which cells it holds, and what it says of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_sweep_advice import record

from spectrain.console import SafeConsole
from spectrain.errors import InputError
from spectrain.evaluation.data_matrix import data_matrices
from spectrain.evaluation.prompt_figures import PromptFigures
from spectrain.evaluation.records import EvaluationRecord
from spectrain.evaluation.report.matrix_report import markdown, position_drawings, terminal_table


def measured(suite: str, accepted: list[int], **changes: object) -> EvaluationRecord:
    """Ten rounds a prompt, of which so many drafts were accepted."""
    prompts = tuple(
        PromptFigures(f"{suite}{i}", None, 10, count, 10 + count, 1.0, None, None, "o", None)
        for i, count in enumerate(accepted)
    )
    tau = 1 + sum(accepted) / (10 * len(accepted))
    figures = {"suite": suite, "prompts": prompts, "acceptance_length": tau, "num_prompts": len(prompts)}
    return record("eagle3", 3, None, drafter="d", **(figures | changes))


def test_the_best_of_a_column_and_what_is_level_with_it():
    # Prompt by prompt, "b" is one draft behind "a" every time: certain, though the prompts themselves differ far more.
    spread = [2, 30, 5, 25, 9, 20, 12, 16]
    behind = [count - 1 for count in spread]
    noisy = [count + (3 if i % 2 else -3) for i, count in enumerate(behind)]
    runs = {"a": [measured("x", spread)], "b": [measured("x", behind)], "c": [measured("x", noisy)]}
    (matrix,) = data_matrices(runs)
    cells = {run: matrix.cells[run]["x"] for run in "abc"}
    assert [cells[run].best for run in "abc"] == [True, False, False]
    assert [cells[run].level for run in "abc"] == [False, False, True]
    assert cells["a"].tau == pytest.approx(1 + sum(spread) / 80) and cells["a"].prompts == 8
    table = [line for line in markdown(matrix).splitlines() if line.startswith("|")]
    assert table[2:] == [
        f"| a | **{cells['a'].tau:.2f}** |",
        f"| b | {cells['b'].tau:.2f} |",
        f"| c | {cells['c'].tau:.2f} ≈ |",
    ]


def test_six_suites_fit_a_terminal_of_eighty_columns():
    interval = (1.11, 1.33)
    names = ["alpaca", "gsm8k", "humaneval", "mt_bench", "support", "varied"]
    cells = [measured(name, [5, 6, 4], acceptance_length_interval=interval) for name in names]
    (matrix,) = data_matrices({"support": cells, "mixed": cells})
    console = SafeConsole(width=80)
    with console.capture() as captured:
        console.print(terminal_table(matrix))
    assert captured.get().count("1.11–1.33") == 12 and all(f" {name} " in captured.get() for name in names)


def test_a_column_is_of_the_same_prompts_under_the_same_conditions():
    runs = {
        "a": [measured("x", [5, 6]), measured("own", [5, 6]), measured("x", [9, 9], num_speculative_tokens=5)],
        "b": [measured("x", [4, 6]), measured("own", [5, 6, 7]), measured("only", [1, 2])],
        "c": [measured("x", [4, 6], temperature=0.7)],
    }
    (matrix,) = data_matrices(runs)
    assert (matrix.runs, matrix.suites, matrix.own_prompts) == (("a", "b"), ("x",), ("own",))
    assert matrix.shared.num_speculative_tokens == 3 and matrix.shared.temperature == 0
    both = {
        run: [*records, measured("y", [1, 2], num_speculative_tokens=5), measured("x", [1], max_new_tokens=9)]
        for run, records in runs.items()
    }
    assert [(m.suites, m.runs) for m in data_matrices(both)][1:] == [
        (("y",), ("a", "b", "c")),
        (("x",), ("a", "b", "c")),
    ]
    with pytest.raises(InputError, match="--suites"):
        data_matrices({"a": runs["a"], "c": runs["c"]})
    with pytest.raises(InputError, match="--suites"):
        data_matrices(runs, ["only"])


def test_what_is_no_drafter_of_the_run_has_no_cell():
    others = [record("ngram", 3, None, suite="x"), replace(measured("x", [9, 9]), method="eagle3-untuned")]
    ours = replace(measured("x", [1, 2]), acceptance_length=1.5)
    (matrix,) = data_matrices({"a": [ours, *others], "b": [measured("x", [8, 8])]})
    assert matrix.cells["a"]["x"].tau == 1.5 and not matrix.cells["a"]["x"].best


def test_targets_methods_and_positions_are_one_heatmap_a_suite():
    short = measured("x", [5, 6], num_speculative_tokens=1, acceptance_per_position=(0.9,))
    longer = measured("x", [5, 6], target="org/one", acceptance_per_position=(0.8, 0.4, 0.2))
    other = replace(longer, target="org/two", method="dflash", acceptance_per_position=(0.6, 0.3, 0.1))
    runs = {"a": [longer, replace(short, target="org/one")], "b": [other], "c": [replace(other, suite="y"), longer]}
    drawings = {drawing.name: drawing for drawing in position_drawings(runs, [])}
    assert drawings.keys() == {"positions-x", "positions-y"}
    told = drawings["positions-x"].description.split(": ", 1)[1].split("; ")
    assert told == ["one, EAGLE-3, a .80 .40 .20", "one, EAGLE-3, c .80 .40 .20", "two, DFlash .60 .30 .10"]
    assert [drawing.name for drawing in position_drawings(runs, ["y"])] == ["positions-y"]
