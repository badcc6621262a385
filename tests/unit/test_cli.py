"""The command line: help, errors, exit codes, and what is imported when."""

import subprocess
import sys

import pytest

from spectrain import cli
from spectrain.config.folders import GROUP_FOLDERS, group_options
from spectrain.config.help_text import COMMANDS, command_help, overview
from spectrain.errors import ConfigError, RunError


@pytest.fixture(autouse=True)
def _no_work(monkeypatch):
    """A command line that gets as far as work has passed every check that this file is about."""
    monkeypatch.setattr(
        "spectrain.stages.checks.prepare", lambda *arguments, **named: pytest.fail("work was about to start")
    )


def run(capsys, *arguments):
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_without_arguments_the_overview(capsys):
    code, out, _ = run(capsys)
    assert code == 2
    assert out.strip() == overview()
    assert run(capsys, "--help")[:2] == (0, out)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_groups_options_keys_and_an_example(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"spectrain {command}: {COMMANDS[command].summary}" in out
    assert f"  spectrain {command}" in out  # an example
    for key in COMMANDS[command].keys:
        assert f"  {key}=" in out
    for group in set(COMMANDS[command].sections) & set(GROUP_FOLDERS):
        assert all(option in out for option in group_options(group))
    assert max(map(len, out.splitlines())) <= 120


def test_help_explains_keys_with_the_comments_of_the_dataclasses():
    text = command_help("fit")
    assert "drafter.draft_vocab_size=null" in text
    assert "None: the target's whole vocabulary" in text
    assert "trainer.learning_rate=0.001" in text


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("spectrain 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["genrate"], "unknown command 'genrate': did you mean generate?"),
        (["fly"], "unknown command 'fly': use one of generate, capture"),
        (["fit", "--dryrun"], "unknown option --dryrun: the options are --dry-run"),
        (["fit", "trainer.learning_rat=1"], "unknown key trainer.learning_rat: did you mean trainer.learning_rate?"),
        (["fit", "recipe=quickstart", "trainer.epochs=abc"], "trainer.epochs must be a whole number, got 'abc'"),
        (["fit"], "no target is chosen: add recipe=quickstart"),
        (["fit", "target.path=x"], "no prompts are chosen"),
        (["fit", "-m", "recipe=quickstart", "trainer.epochs=1,0"], "trainer.epochs=0 must be at least 1"),
        (["plan", "-m", "recipe=quickstart", "trainer.epochs=1,2"], "plan takes no -m"),
        (["inspect"], "inspect what?"),
        (["inspect", "respones"], "unknown word 'respones': did you mean responses?"),
        (["inspect", "responses", "--limit", "x"], "--limit must be a whole number"),
        (["inspect", "responses", "--split=valid"], "unknown split 'valid'"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("wrong"), 2, "error: wrong\n"),
        (RunError("broke\nin two lines"), 1, "error: broke in two lines\n"),
        (KeyboardInterrupt(), 130, "interrupted: finished work is kept, the same command continues\n"),
        (ZeroDivisionError("a bug"), 1, "error: ZeroDivisionError: a bug (unexpected; --debug shows where)\n"),
    ],
)
def test_exit_codes(capsys, monkeypatch, error, code, text):
    def fail(command):
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert run(capsys, "fit") == (code, "", text)
    if isinstance(error, Exception):
        assert "Traceback" in run(capsys, "fit", "--debug")[2]


def test_flags_may_stand_anywhere():
    command = cli.parse(["--debug", "fit", "a=1", "-m", "b=2", "--dry-run"])
    assert (command.command, command.overrides) == ("fit", ("a=1", "b=2"))
    assert command.debug and command.multirun and command.dry_run
    command = cli.parse(["inspect", "responses", "--limit=4", "run.dir=x", "--split", "train"])
    assert (command.words, command.values, command.overrides) == (
        ("responses",),
        {"limit": "4", "split": "train"},
        ("run.dir=x",),
    )


SLOW = ("torch", "transformers", "accelerate", "pyarrow")
CODE = f"""
import sys
from spectrain.cli import main
code = main(sys.argv[1:])
print(code, [name for name in {SLOW!r} if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["fit", "--help"], 0), (["fit", "recipe=quickstart", "trainer.epochs=x"], 2), (["run", "target.path=x"], 2)],
)
def test_help_and_configuration_errors_import_nothing_slow(arguments, code):
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{code} []"


def test_python_dash_m():
    done = subprocess.run(
        [sys.executable, "-m", "spectrain", "fit", "nonsense"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "error: cannot read 'nonsense': write key=value or group=option\n")
