"""Whole commands on a tiny target: a sweep that is stopped and goes on, a simulation, and records side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from workplace import write_prompts

from spectrain import cli
from spectrain.data.prompts import Conversation
from spectrain.evaluation.prompt_figures import PromptFigures
from spectrain.evaluation.records import read_record, read_records


@pytest.fixture(scope="module")
def swept(finished, arguments, tmp_path_factory):
    """(run directory, the command) of a sweep over two suites."""
    prompts = tmp_path_factory.mktemp("suites") / "others.jsonl"
    write_prompts(prompts, range(40, 44))
    command = [
        *("eval", "sweep", f"run.dir={finished}", "sweep.num_speculative_tokens=[1,3]"),
        *("sweep.methods=[eagle3,ngram,suffix,none]", f"sweep.suites=[heldout,others:{prompts}]"),
        *("sweep.concurrency=[1,2]", "suite.max_prompts=2", "suite.max_new_tokens=8"),
    ]
    assert cli.main(command) == 0
    return finished, command


def cells(run_dir: Path) -> dict[str, Path]:
    return {path.name: path for path in (run_dir / "eval" / "sweep").glob("*.json")}


def test_every_combination_is_a_cell_of_its_own(swept):
    run_dir, _ = swept
    found = [read_record(path) for path in cells(run_dir).values()]
    assert len(found) == 2 * 2 * (3 * 2 + 1)
    assert {(r.suite, r.method, r.num_speculative_tokens, r.concurrency) for r in found} == {
        (suite, method, n, size)
        for suite in ("heldout", "others")
        for size in (1, 2)
        for method, n in [("none", 0), *((m, n) for m in ("eagle3", "ngram", "suffix") for n in (1, 3))]
    }
    for record in found:
        assert record.num_prompts == len(record.prompts) == 2
        assert record.output_identical is (None if record.method == "none" else True)
        assert (record.speedup is None) == (record.method == "none")
        assert sum(prompt.accepted_tokens for prompt in record.prompts) == record.accepted_tokens
        assert sum(prompt.output_tokens for prompt in record.prompts) == record.output_tokens


def test_the_summary_recommends_for_each_suite_and_for_the_workload(swept):
    run_dir, _ = swept
    folder = run_dir / "eval" / "sweep" / "summary"
    summary = json.loads((folder / "recommendation.json").read_text())
    records = {
        (r.suite, r.concurrency, r.method, r.num_speculative_tokens): r
        for r in map(read_record, cells(run_dir).values())
    }
    assert len(summary["suites"]) == 4 and len(summary["workload"]["choices"]) == 2
    for advice in summary["suites"]:
        best, measured = advice["best"], [c for c in advice["choices"] if not c["predicted"]]
        assert best["speedup"] == max(choice["speedup"] for choice in measured) >= 1.0
        for choice in measured:
            assert choice["cost"] == pytest.approx(1 - choice["speedup"] / best["speedup"])
            if choice["method"] != "none":
                key = (advice["suite"], advice["concurrency"], choice["method"], choice["num_speculative_tokens"])
                assert records[key].speedup == choice["speedup"]
    pictures = {path.name for path in folder.iterdir()}
    for name in (
        "positions-heldout",
        "speedup-others",
        "concurrency-heldout",
        "rounds-others",
        "suites-eagle3",
        "memory",
    ):
        assert {f"{name}.svg", f"{name}.png"} <= pictures
    page = (run_dir / "report.html").read_text()
    assert "Speed-up by number of drafts, others" in page and "<h2>Examples" in page


def test_what_is_there_is_not_measured_again_and_what_lacks_is(swept, capsys):
    run_dir, command = swept
    before = {name: path.stat().st_mtime_ns for name, path in cells(run_dir).items()}
    gone, broken = sorted(before)[0], sorted(before)[5]
    (run_dir / "eval" / "sweep" / gone).unlink()
    (run_dir / "eval" / "sweep" / broken).write_text("{")
    assert cli.main(command) == 0
    after = {name: path.stat().st_mtime_ns for name, path in cells(run_dir).items()}
    assert after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} == {gone, broken}
    assert "28 cells, 26 of them measured already" in capsys.readouterr().err
    # What is there is summarised, and nothing is measured.
    there = cells(run_dir).keys()
    wider = ["sweep.num_speculative_tokens=[1,2,3]", "sweep.measure=false"]
    assert cli.main([*command, *wider]) == 0
    assert "40 cells, 28 of them measured already" in capsys.readouterr().err
    assert cells(run_dir).keys() == there
    assert cli.main([*command, *wider, "suite.max_new_tokens=6"]) == 2
    assert "none of these cells is there" in capsys.readouterr().err
    fewer = ["sweep.suites=[heldout]", "sweep.methods=[none]", "sweep.concurrency=[1]"]
    assert cli.main([*command, *fewer, "suite.max_new_tokens=7"]) == 0  # another measurement
    assert "1 cells, 0 of them measured already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("sweep.methods=[eagle3,ngrams]", "did you mean ngram"),
        ("sweep.methods=[dspark]", "sweep.methods: dspark"),
        ("sweep.methods=[draft_model]", "decoding.draft_model"),
        ("sweep.suites=[nothing]", "no suite nothing"),
        ("sweep.suites=[heldout:absent.jsonl]", "suite.path"),
        ("sweep.num_speculative_tokens=[1,1]", "twice"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_work(finished, override, named, capsys):
    assert cli.main(["eval", "sweep", f"run.dir={finished}", override]) == 2
    assert named in capsys.readouterr().err


def test_methods_without_a_drafter_are_baselines_of_eval(run_dir):
    command = [
        "eval",
        f"run.dir={run_dir}",
        "suite.baselines=[none,suffix]",
        "suite.max_prompts=2",
        "suite.max_new_tokens=9",
    ]
    assert cli.main(command) == 0
    found = {record.method: record for record in read_records(run_dir / "eval")}
    assert found["suffix"].output_identical is True and found["suffix"].drafter is None


def test_simulation_is_what_the_loop_measures(run_dir, arguments, capsys):
    assert cli.main(["eval", f"run.dir={run_dir}", "suite.max_prompts=6", "suite.baselines=[]"]) == 0
    (measured,) = (r for r in read_records(run_dir / "eval") if r.is_drafter and r.num_prompts == 6)
    command = ["eval", "simulate", f"run.dir={run_dir}", f"drafter.path={run_dir / 'drafter'}"]
    assert cli.main(command) == 0
    (file,) = (run_dir / "eval" / "simulation").glob("*.json")
    found = json.loads(file.read_text())
    assert (found["all"]["rounds"], found["all"]["acceptance_length"]) == (measured.rounds, measured.acceptance_length)
    assert tuple(found["all"]["acceptance_per_position"]) == measured.acceptance_per_position
    assert found["acceptance_length_by_n"][measured.num_speculative_tokens - 1] == pytest.approx(
        measured.acceptance_length
    )
    (beside,) = (
        line
        for line in found["measured"]
        if (line["engine"], line["num_prompts"], line["num_speculative_tokens"]) == ("hf", 6, 3)
    )
    assert (beside["rounds"], beside["acceptance_length"]) == (measured.rounds, measured.acceptance_length)
    assert "hf, n = 3, 6 prompts" in " ".join(capsys.readouterr().out.split())
    assert {"eagle3-drafts.svg", "eagle3-drafts.png"} <= {path.name for path in file.parent.iterdir()}
    for lines in found["parts"].values():
        assert sum(line["rounds"] for line in lines) == measured.rounds
    # By language, as the loop's answers give it, prompt by prompt.
    answered: dict[str, list[PromptFigures]] = {"en": [], "de": []}
    (heldout,) = (Path(a.removeprefix("data.heldout=")) for a in arguments if a.startswith("data.heldout="))
    for line in heldout.read_text().splitlines():
        asked = json.loads(line)
        digest = Conversation("", tuple(asked["turns"]), asked.get("system")).prompt_digest()
        answered[asked["language"]] += [prompt for prompt in measured.prompts if prompt.key == digest[:16]]
    for line in found["parts"]["language"]:
        figures = answered.pop(line["name"])
        rounds = sum(prompt.rounds for prompt in figures)
        assert (line["texts"], line["rounds"]) == (3, rounds)
        assert line["acceptance_length"] == 1 + sum(prompt.accepted_tokens for prompt in figures) / rounds
    assert not answered
    # Without the stored hidden states they are computed, and nothing changes.
    for shard in (run_dir / "hidden_states").glob("*"):
        shard.unlink()
    assert cli.main(command) == 0
    again = json.loads(file.read_text())
    assert (again["all"], again["parts"]) == (found["all"], found["parts"])


def test_records_side_by_side(swept, tmp_path, capsys):
    run_dir, _ = swept
    names = cells(run_dir)
    one, two = (str(names[f"heldout-hf-eagle3-n{n}-t0.json"]) for n in (1, 3))
    assert cli.main(["eval", "compare", one, two]) == 0
    shown = capsys.readouterr().out
    first, second = read_record(one), read_record(two)
    assert f"{first.acceptance_length:.3f}" in shown and f"{second.acceptance_length:.3f}" in shown
    assert "2 of 2" in shown
    other = str(names["heldout-hf-eagle3-n1-t0-c2.json"])
    assert cli.main(["eval", "compare", one, other]) == 2
    assert "concurrency 1 and 2" in capsys.readouterr().err
    assert cli.main(["eval", "compare", one, other, "--anyway"]) == 0
    assert "concurrency 1 and 2" in capsys.readouterr().err
    assert cli.main(["eval", "compare", str(run_dir), str(run_dir)]) == 0
    for wrong, named in (([one], "two or more"), ([one, str(tmp_path)], "holds no evaluation records")):
        assert cli.main(["eval", "compare", *wrong]) == 2
        assert named in capsys.readouterr().err


def test_a_sweep_of_methods_that_need_no_drafter_needs_none(arguments, tmp_path, capsys):
    run_dir = tmp_path / "new"
    command = [
        *("eval", "sweep", *arguments, f"run.dir={run_dir}", "sweep.num_speculative_tokens=[2]"),
        *(
            "sweep.methods=[ngram,suffix,none]",
            "suite.max_prompts=2",
            "suite.max_new_tokens=8",
            "sweep.baseline=shared",
        ),
    ]
    assert cli.main([*command, "--dry-run"]) == 0
    assert "ngram, suffix, none" in capsys.readouterr().out and not run_dir.exists()
    assert cli.main(command) == 0
    found = {record.method: record for record in map(read_record, cells(run_dir).values())}
    assert found.keys() == {"ngram", "suffix", "none"}
    assert found["suffix"].output_identical is True and found["suffix"].speedup is not None
    page = (run_dir / "report.html").read_text()
    assert "without a drafter" in page and "not measured yet" not in page and "<h2>Examples" in page
    config = (run_dir / "config.yaml").read_bytes()
    assert cli.main([*command, "sweep.methods=[ngram,none]"]) == 0
    assert "2 cells, 2 of them measured already" in capsys.readouterr().err
    assert (run_dir / "config.yaml").read_bytes() == config
    assert cli.main([*command, "sweep.methods=[eagle3,none]"]) == 2
    assert "holds no drafter" in capsys.readouterr().err


def test_answers_in_code_are_graded_where_it_may_be_run(run_dir, tmp_path, capsys):
    """The target's answers are noise: what counts is who is graded, by what, and that nothing else is run."""
    tests = {"role": "assistant", "content": "assert True"}
    lines = [
        {
            "messages": [
                {"role": "user", "content": "Write anything."},
                {"role": "assistant", "content": "assert False"},
            ]
        },
        {"messages": [{"role": "user", "content": "Write what is no program."}, tests]},
        {"turns": ["Write more."]},
    ]
    prompts = tmp_path / "code.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [
        *("eval", f"run.dir={run_dir}", "suite=humaneval", f"suite.path={prompts}", "suite.baselines=[none]"),
        *("suite.max_prompts=3", "suite.max_new_tokens=6"),
    ]
    assert cli.main(command) == 0
    assert all(record.accuracy is None for record in read_records(run_dir / "eval") if record.suite == "humaneval")
    capsys.readouterr()
    assert cli.main([*command, "suite.execute_code=true"]) == 0
    shown = capsys.readouterr()
    assert "1 of 3 prompts bring no tests: 0 of them" in shown.err and "right" in shown.out
    for record in read_records(run_dir / "eval"):
        if record.suite == "humaneval":
            assert record.prompts[0].correct is False and record.prompts[2].correct is None
            assert record.accuracy is not None
    assert cli.main(["eval", f"run.dir={run_dir}", "suite.execute_code=true"]) == 2
    assert "suite.execute_code=true: suite heldout is not graded by tests" in capsys.readouterr().err
