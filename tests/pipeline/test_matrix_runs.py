"""One multirun trains a drafter for each choice of prompts; ``eval matrix`` measures them on common suites."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from workplace import make, write_prompts

from spectrain import cli
from spectrain.evaluation.records import read_record

RUNS = ("data.max_train=16", "data.max_train=4")


@pytest.fixture(scope="module")
def mixes(tmp_path_factory):
    """(folder of a multirun, suites) of the tiny target."""
    folder = tmp_path_factory.mktemp("mixes")
    write_prompts(folder / "few.jsonl", range(40, 44))
    write_prompts(folder / "more.jsonl", range(50, 56))
    command = ["fit", "-m", *make(folder), f"run.dir={folder / 'runs'}", "data.max_train=4,16"]
    assert cli.main(command) == 0
    return folder / "runs", f"few:{folder / 'few.jsonl'},{folder / 'more.jsonl'}"


def cells(runs: Path) -> dict[tuple[str, str], Path]:
    return {
        (run, suite): runs / run / "eval" / "sweep" / f"{suite}-hf-eagle3-n3-t0.json"
        for run in RUNS
        for suite in ("few", "more")
    }


def test_what_is_missing_is_measured_once_and_the_matrix_shows_it(mixes, tmp_path, capsys):
    runs, suites = mixes
    command = ["eval", "matrix", str(runs), "--suites", suites, "--out", str(tmp_path / "out"), "suite.max_prompts=3"]
    assert cli.main([*command, "--dry-run"]) == 0
    assert not any(path.exists() for path in [*cells(runs).values(), tmp_path / "out"])
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    records = {key: read_record(path) for key, path in cells(runs).items()}
    assert {record.num_prompts for record in records.values()} == {3}
    taus = {key: record.acceptance_length for key, record in records.items()}
    assert all(f"{tau:.2f}" in shown for tau in taus.values())
    lines = (tmp_path / "out" / "data-matrix.md").read_text().splitlines()
    table = [re.split(r" *\| *", line.strip("| ")) for line in lines if line.startswith("|")]
    assert table[0] == ["run", "few", "more"] and [row[0] for row in table[2:]] == list(RUNS)
    for row in table[2:]:
        for suite, text in zip(table[0][1:], row[1:], strict=True):
            assert text.strip("*").replace(" ≈", "").startswith(f"{taus[row[0], suite]:.2f} (")
            assert text.startswith("**") == (taus[row[0], suite] == max(taus[run, suite] for run in RUNS))
    assert (tmp_path / "out" / "data-matrix.png").read_bytes().startswith(b"\x89PNG")
    for name in ("data-matrix", "positions-few", "positions-more"):
        assert "<svg" in (tmp_path / "out" / f"{name}.svg").read_text()
    before = {path: path.stat().st_mtime_ns for path in cells(runs).values()}
    assert cli.main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in cells(runs).values()} == before


def test_mistakes_are_one_line_before_work(mixes, tmp_path, capsys):
    runs, _ = mixes
    for arguments, code, named in (
        ([str(runs / RUNS[0])], 2, "two or more runs"),
        ([str(tmp_path / "nothing"), str(runs)], 2, "no folder"),
        ([str(runs), "--suites", "few,few"], 2, "--suites"),
        ([str(runs), "suite.max_prompts=3"], 2, "--suites"),
        ([str(runs), "--suites", "varied", "suite.max_prompts=0"], 2, "suite.max_prompts=0"),
        ([str(runs), "--suites", "nothing"], 2, "no suite nothing"),
        ([str(runs), str(tmp_path), "--suites", "varied"], 2, "has no drafter"),
        ([str(runs), str(tmp_path)], 2, "holds no evaluation records"),
    ):
        assert cli.main(["eval", "matrix", *arguments]) == code
        assert named in capsys.readouterr().err
