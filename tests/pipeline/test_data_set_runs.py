"""Commands over prompts of data sets: a folder of Parquet from end to end; sets of the Hub that cannot be reached."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spectrain import cli
from spectrain.data.responses import ResponseStore

ANIMALS = ("cats", "dogs", "owls", "bees", "frogs", "cows", "goats", "hens")


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


def of_target(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if not argument.startswith("data")]


def test_a_folder_of_parquet_is_answered_and_recorded(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], unreachable: None
) -> None:
    rows = [{"question": f"What do {name} eat, and when?", "answer": "x"} for name in ANIMALS]
    (tmp_path / "set").mkdir()
    pq.write_table(pa.Table.from_pylist([*rows, rows[0], {"question": " "}]), tmp_path / "set" / "train.parquet")
    run_dir = tmp_path / "run"
    base = [*of_target(arguments), f"run.dir={run_dir}", "data=hub", f"data.path={tmp_path / 'set'}"]
    base += ["data.columns={prompt: question}", "data.license=mit", "data.max_train=5", "data.overlap_words=null"]
    assert cli.main(["generate", *base]) == 0
    err = capsys.readouterr().err
    assert "10 rows read" in err and "1 an empty prompt" in err and "1 equal to another prompt" in err
    responses = ResponseStore(run_dir / "responses").load()
    assert {response.conversation.turns[0] for response in responses} < {row["question"] for row in rows}
    (source,) = json.loads((run_dir / "manifest.json").read_text())["stages"]["generate"]["outputs"]["sources"]
    assert (source["rows"], source["train"], source["license"]) == (10, 5, "mit") and len(source["revision"]) == 16
    assert source["unusable"] == {"an empty prompt": 1} and source["repeated"] == 1
    # The next command goes on with the prompts of the run directory, and asks for none of the sets again.
    assert cli.main(["generate", f"run.dir={run_dir}"]) == 0
    assert "rows read" not in capsys.readouterr().err
    shutil.rmtree(run_dir / "prompts")
    shutil.rmtree(tmp_path / "set")
    assert cli.main(["generate", f"run.dir={run_dir}"]) == 2
    assert f"data.path={tmp_path / 'set'}" in capsys.readouterr().err


def test_a_set_that_cannot_be_reached_is_one_line_before_any_work(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], unreachable: None
) -> None:
    base = [*of_target(arguments), f"run.dir={tmp_path / 'run'}", "data=ultrachat", "data.max_train=50"]
    assert cli.main(["generate", *base]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "data.path=HuggingFaceH4/ultrachat_200k" in line
    assert not (tmp_path / "run").exists()
    assert cli.main(["plan", *base]) == 0  # of which a plan needs no prompt
    out = " ".join(capsys.readouterr().out.split())
    assert "at most 50 training, 64 held out, of HuggingFaceH4/ultrachat_200k" in out and "of hidden states" in out


def test_variables_of_the_template_are_part_of_what_was_answered(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [*arguments, f"run.dir={tmp_path / 'run'}", "data.max_train=2", "data.max_heldout=1"]
    assert cli.main(["generate", *base]) == 0
    told = "target.template_kwargs={enable_thinking: false}"
    assert cli.main(["generate", *base, told]) == 0
    fixed = json.loads((tmp_path / "run" / "manifest.json").read_text())["stages"]["generate"]["inputs"]["fixed"]
    assert fixed["target.template_kwargs.enable_thinking"] is False
    assert cli.main(["generate", *base, "target.template_kwargs={tokenize: true}"]) == 2
    assert "target.template_kwargs.tokenize" in capsys.readouterr().err
