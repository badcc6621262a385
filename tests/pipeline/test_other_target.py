"""A drafter that meets another target than its own: an error where it cannot work, a note where it may, and no figure
that was measured with the other one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import tiny_target
from workplace import make

from spectrain import cli

Told = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workplace")


@pytest.fixture(scope="module")
def arguments(place: Path) -> list[str]:
    return make(place)


@pytest.fixture(scope="module")
def finished(arguments: list[str], place: Path) -> Path:
    run = place / "runs" / "finished"
    assert cli.main(["run", *arguments, "trainer.epochs=1", f"run.dir={run}"]) == 0
    return run


@pytest.fixture(scope="module")
def other(place: Path) -> Path:
    """Of the same shapes, with other weights: a finetune, say."""
    return tiny_target("llama", place / "finetune", seed=1, num_hidden_layers=7)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    def tell(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return tell


def revision_of(run: Path) -> str:
    return json.loads((run / "drafter/config.json").read_text())["spectrain"]["target_revision"]


COMMANDS = [["eval", "--dry-run"], ["eval", "parity", "--dry-run"], ["fit", "--dry-run"], ["serve", "--print"]]


@pytest.mark.vllm
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_another_target_of_the_same_shapes_is_noted(
    command: list[str], arguments: list[str], finished: Path, other: Path, tmp_path: Path, told: Told
) -> None:
    words = [*arguments, f"target.path={other}", f"drafter.path={finished / 'drafter'}", f"run.dir={tmp_path / 'run'}"]
    code, _, err = told(*command, *words)
    assert code == 0, err
    assert "was trained for" in err and f"at {revision_of(finished)[:12]}, this target is another" in err


@pytest.mark.vllm
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_copy_of_its_own_target_is_not(
    command: list[str], arguments: list[str], finished: Path, place: Path, tmp_path: Path, told: Told
) -> None:
    """The same weights under another name."""
    copied = shutil.copytree(place / "target", tmp_path / "copied")
    words = [*arguments, f"target.path={copied}", f"drafter.path={finished / 'drafter'}", f"run.dir={tmp_path / 'run'}"]
    code, _, err = told(*command, *words)
    assert code == 0, err
    assert "was trained for" not in err and "trained with" not in err


@pytest.mark.vllm
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_another_tokenizer_is_noted(
    command: list[str], arguments: list[str], finished: Path, place: Path, tmp_path: Path, told: Told
) -> None:
    copied = shutil.copytree(place / "target", tmp_path / "copied")
    with (copied / "chat_template.jinja").open("a", encoding="utf-8") as file:
        file.write("{# another #}")
    words = [*arguments, f"target.path={copied}", f"drafter.path={finished / 'drafter'}", f"run.dir={tmp_path / 'run'}"]
    code, _, err = told(*command, *words)
    assert code == 0, err
    assert "another tokenizer or chat template" in err


@pytest.mark.vllm
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    "changes", [{"hidden_size": 64, "head_dim": 16}, {"vocab_size": 320}, {"num_hidden_layers": 3}]
)
def test_another_shape_is_an_error(
    command: list[str], changes: dict[str, int], arguments: list[str], finished: Path, tmp_path: Path, told: Told
) -> None:
    fields = {"num_hidden_layers": 7, **changes}
    target = tiny_target("llama", tmp_path / "wide", **fields)
    words = [*arguments, f"target.path={target}", f"drafter.path={finished / 'drafter'}", f"run.dir={tmp_path / 'run'}"]
    code, out, err = told(*command, *words)
    assert code == 2, out
    assert "was trained for another target" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.vllm
def test_serve_quotes_what_was_measured_with_the_target_that_it_serves_alone(
    arguments: list[str], finished: Path, other: Path, place: Path, told: Told
) -> None:
    """The run's own evaluation recommends a number for its own target, by whatever name, and none for another."""
    drafter = f"drafter.path={finished / 'drafter'}"
    for words in ([drafter], [drafter, f"target.path={place / 'target'}"], [f"run.dir={finished}"]):
        code, _, err = told("serve", *words, "--print")
        assert code == 0 and ("measured (suite" in err or "estimated from" in err), err
    code, out, err = told("serve", drafter, f"target.path={other}", "--print")
    assert code == 0
    assert "suite" not in err and "tokens/s" not in err and "measured with another target" in err
    assert '"num_speculative_tokens": 3' in out  # what the folder says


def test_the_target_in_a_folder_that_was_trained_further_since_is_another_one(
    finished: Path, place: Path, other: Path, tmp_path: Path, told: Told
) -> None:
    """The drafter names its folder, and that has other weights now."""
    run = shutil.copytree(finished, tmp_path / "run")
    target = shutil.copytree(other, tmp_path / "target")
    config = json.loads((run / "drafter/config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    (run / "drafter/config.json").write_text(json.dumps(config))
    code, _, err = told("serve", f"drafter.path={run / 'drafter'}", "--print")
    assert code == 0
    assert "this target is another" in err and "tokens/s" not in err


def test_a_report_has_no_figure_of_the_other_target(
    arguments: list[str], finished: Path, other: Path, tmp_path: Path, told: Told
) -> None:
    run = tmp_path / "run"
    words = [*arguments, f"target.path={other}", f"drafter.path={finished / 'drafter'}", f"run.dir={run}"]
    code, _, err = told("eval", *words, "suite.max_prompts=1", "suite.baselines=[]")
    assert code == 0, err
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "of held-out generated tokens are in the draft vocabulary" not in page
    assert "this target is another" in page
    assert "of held-out generated tokens are in the draft vocabulary" in (finished / "report.html").read_text()


@pytest.mark.vllm
@pytest.mark.parametrize("command", [COMMANDS[0], COMMANDS[1], COMMANDS[3]], ids=" ".join)
def test_another_kind_than_the_folders_is_refused(command: list[str], finished: Path, told: Told) -> None:
    code, _, err = told(*command, f"run.dir={finished}", "drafter=dflash")
    assert code == 2
    assert "drafter=dflash" in err and "is a eagle3 drafter" in err
    assert told(*command, f"run.dir={finished}", "drafter=eagle3")[0] == 0


def test_taps_that_the_folder_does_not_have_are_refused(finished: Path, told: Told) -> None:
    code, _, err = told("eval", f"run.dir={finished}", "drafter.taps=[1]", "--dry-run")
    assert code == 2 and "drafter.taps=[1]" in err


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["--trust-remote-code", "-x", "a\x1b[31m", 7])
def test_a_target_whose_name_would_be_an_option_is_refused(
    finished: Path, tmp_path: Path, told: Told, name: object
) -> None:
    drafter = shutil.copytree(finished / "drafter", tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = name
    (drafter / "config.json").write_text(json.dumps(config))
    for words in (["serve", f"drafter.path={drafter}", "--print"], ["eval", f"run.dir={finished}", "--dry-run"]):
        code, out, err = told(*words, f"drafter.path={drafter}")
        assert code == 2, out
        assert "verifier.name_or_path" in err and "\x1b" not in err
