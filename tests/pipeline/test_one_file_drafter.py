"""A kind of drafter that is one file outside the package (``one_linear_drafter.py``) goes through every command, with
the promise kept: what its simulation predicts is what the loop accepts, and the target's text is unchanged.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from one_linear_drafter import OneLinear, OneLinearMethod
from workplace import make

from spectrain import cli
from spectrain.drafters import registry
from spectrain.drafters.drafter_folder import load_drafter, read_shape
from spectrain.drafters.registry import find_method, load_module
from spectrain.errors import ConfigError
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
    assert cli.main(["serve", f"run.dir={finished}", "--print"]) == 2
    assert "vLLM has no one_linear drafters" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def broken(:", "cannot be imported (SyntaxError"),
        ("import sys\nsys.exit('bye')", "cannot be imported (SystemExit: bye"),
        ("from one_linear_drafter import OneLinearMethod\nMETHOD = OneLinearMethod", "registers no kind of drafter"),
        (
            "from spectrain.drafters.registry import DrafterMethod\n\n\nclass Mine(DrafterMethod):\n    pass\n\n\n"
            "METHOD = Mine()",
            "a kind of drafter has no name",
        ),
        (
            "from one_linear_drafter import OneLinearMethod\n\n\nclass Mine(OneLinearMethod):\n    name = 'half'\n"
            "    from spectrain.drafters.registry import DrafterMethod\n    describe = DrafterMethod.describe\n\n\n"
            "METHOD = Mine()",
            "class Mine in no_good_half has no method describe",
        ),
    ],
    ids=["syntax", "exit", "class", "nameless", "half"],
)
def test_a_module_that_is_no_good_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, text: str, message: str
) -> None:
    name = f"no_good_{request.node.callspec.id}"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_module(name)
    assert f"drafter.module={name}" in str(error.value) and message in str(error.value)


def test_a_module_may_register_what_another_one_defines_and_be_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registers_it.py").write_text(
        "from one_linear_drafter import OneLinearMethod\nfrom spectrain.drafters.registry import register\n\n"
        "register(OneLinearMethod())\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_module("registers_it") == load_module("registers_it") == ("one_linear",)


def test_a_broken_package_is_named_and_hides_no_other_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = metadata.EntryPoint("broken", "no.such.module", "spectrain.drafters")
    found = metadata.EntryPoints([entry])
    monkeypatch.setattr(registry, "entry_points", lambda **chosen: found.select(**chosen))
    with pytest.raises(ConfigError, match=r"drafter.method=broken: an installed package declares it as no.such.module"):
        find_method("broken")
    assert {"eagle3", "dflash"} <= set(registry.method_names())
    assert "broken" not in registry.method_names()


def test_a_module_that_is_loaded_and_not_chosen_is_noted(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [option for option in arguments if option not in ("drafter=one_linear", "drafter.options.eps=1e-5")]
    assert cli.main(["fit", *options, f"run.dir={tmp_path / 'run'}", "--dry-run"]) == 0
    assert "registers one_linear, but the drafter is eagle3: drafter=one_linear?" in capsys.readouterr().err


def test_kinds_that_ship_read_no_options(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [option for option in arguments if option not in MINE]
    assert cli.main(["fit", *options, "drafter.options.depth=2", f"run.dir={tmp_path / 'run'}", "--dry-run"]) == 2
    assert "drafter.options.depth: drafter.method=eagle3 does not read drafter.options" in capsys.readouterr().err


def test_a_kind_says_whether_it_reads_options(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever package it comes from."""
    assert not any(find_method(name).reads_options for name in ("eagle3", "dflash", "dspark", "dflash2"))
    monkeypatch.setattr(OneLinearMethod, "reads_options", False)
    assert cli.main(["fit", *arguments, f"run.dir={tmp_path / 'run'}", "--dry-run"]) == 2
    assert "drafter.method=one_linear does not read drafter.options" in capsys.readouterr().err


def test_a_sweep_over_kinds_refuses_a_key_of_one_of_them_before_the_first_job(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [option for option in arguments if option not in MINE]
    sweep = ["drafter=dflash,eagle3", "drafter.block.anchors=5", f"run.dir={tmp_path / 'run'}"]
    assert cli.main(["fit", "-m", *options, *sweep]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()


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
