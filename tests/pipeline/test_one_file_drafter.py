"""A kind of drafter that is one file outside the package (``one_linear_drafter.py``) goes through every command, with
the promise kept: what its simulation predicts is what the loop accepts, and the target's text is unchanged.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from one_linear_drafter import OneLinear, OneLinearMethod
from workplace import make

from spectrain import cli
from spectrain.drafters.drafter_folder import load_drafter, read_shape
from spectrain.drafters.registry import find_method, load_module
from spectrain.evaluation.records import read_records

MINE = ["drafter=one_linear", "drafter.module=one_linear_drafter", "drafter.options.eps=1e-5"]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*make(tmp_path_factory.mktemp("workplace")), *MINE]


@pytest.fixture(scope="module")
def finished(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "finished"
    assert cli.main(["run", *arguments, "trainer.optimizer=muon", f"run.dir={path}"]) == 0
    return path


def test_it_is_trained_and_simulated(finished: Path) -> None:
    steps = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    losses = [step["loss"] for step in steps if "loss" in step]
    assert losses[-1] < losses[0]
    assert max(step.get("simulated_acceptance_length", 0) for step in steps) > 1


def test_it_is_decoded_without_loss_as_was_predicted(finished: Path) -> None:
    records = {record.method: record for record in read_records(finished / "eval")}
    assert set(records) == {"none", "ngram", "one_linear"}
    mine = records["one_linear"]
    assert mine.output_identical and mine.rounds > 10
    assert mine.simulated_acceptance_length == mine.acceptance_length
    assert mine.simulated_rounds == mine.rounds


def test_it_is_saved_and_loaded(finished: Path) -> None:
    config = json.loads((finished / "drafter" / "config.json").read_text())
    assert (config["architectures"], config["speculators_model_type"]) == (["OneLinearDrafter"], "one_linear")
    found = load_drafter(finished / "drafter")
    assert isinstance(found, OneLinear) and found.taps == () and found.shape.eps == 1e-5
    assert read_shape(finished / "drafter") == found.shape
    assert found.body.linear.weight.abs().max() > 0 and torch.isfinite(found.body.linear.weight).all()


def test_it_is_in_the_report(finished: Path) -> None:
    assert "one-linear drafter" in (finished / "report.html").read_text(encoding="utf-8")


def test_it_is_planned(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments, f"run.dir={tmp_path / 'run'}"]) == 0
    assert "one_linear, taps [], draft vocabulary of 100" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "run").exists()


def test_it_is_trained_further_and_measured_again(
    arguments: list[str], finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = shutil.copytree(finished / "drafter", tmp_path / "old")
    run = tmp_path / "run"
    assert cli.main(["fit", *arguments, f"drafter.path={old}", f"run.dir={run}"]) == 0, capsys.readouterr().err
    assert load_drafter(run / "drafter").shape == load_drafter(old).shape
    assert cli.main(["eval", *arguments, f"run.dir={run}"]) == 0
    assert {record.method for record in read_records(run / "eval")} == {"none", "ngram", "one_linear"}


def test_its_drafts_cannot_be_asked_of_vllm(
    arguments: list[str], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM has no such kind, and that is said before anything starts."""
    code = cli.main(["serve", f"drafter.path={finished / 'drafter'}", "drafter.module=one_linear_drafter", "--print"])
    assert code == 2
    assert "one_linear" in capsys.readouterr().err


def test_vllm_has_no_such_kind_to_measure(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *arguments, "engine=vllm", f"run.dir={tmp_path / 'run'}"]) == 2
    assert "vLLM has no one_linear drafters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("no_such_module_of_mine", "drafter.module=no_such_module_of_mine cannot be imported (ModuleNotFoundError"),
        ("workplace", "drafter.module=workplace registers no kind of drafter"),
    ],
)
def test_a_module_without_a_kind_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], module: str, message: str
) -> None:
    options = [option for option in arguments if not option.startswith("drafter.module")]
    code = cli.main(["fit", *options, f"drafter.module={module}", f"run.dir={tmp_path / 'run'}"])
    assert code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_its_module_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_pkg").mkdir()
    text = (Path(__file__).parent / "one_linear_drafter.py").read_text(encoding="utf-8")
    (tmp_path / "my_pkg" / "my_drafter.py").write_text(text.replace('"one_linear"', '"mine"'), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    load_module("my_pkg.my_drafter")
    assert find_method("mine").architecture == "OneLinearDrafter"


def test_it_is_registered_by_its_module_alone() -> None:
    load_module("one_linear_drafter")
    assert isinstance(find_method("one_linear"), OneLinearMethod)
