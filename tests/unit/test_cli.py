"""The command line: help, errors, exit codes, and what is imported when."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from spectrain import cli
from spectrain.config.commands import COMMANDS, PIPELINE
from spectrain.config.folders import GROUP_FOLDERS, group_options
from spectrain.config.help_text import command_help, example_of, explain, first_comment, help_of, overview
from spectrain.config.loading import compose
from spectrain.config.overrides import all_keys, sections
from spectrain.errors import ConfigError, RunError
from spectrain.stages import launching


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
    assert run(capsys, "help")[:2] == (0, out)


ENTRIES = [entry for command in COMMANDS.values() for entry in (command, *command.words)]


def one_line(text):
    return " ".join(text.split())


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_help_of_a_command_shows_groups_options_keys_and_an_example(capsys, entry):
    code, out, _ = run(capsys, *entry.name.split(), "--help")
    assert (code, out.strip()) == (0, command_help(entry))
    assert f"spectrain {entry.name}: {entry.summary}" in out
    assert f"  spectrain {entry.name}" in out  # an example
    for key in entry.keys:
        assert f"  {key}=" in out
        assert help_of(key) in one_line(out)
    for group in set(entry.sections) & set(GROUP_FOLDERS):
        names = list(group_options(group))
        if len(names) <= 40:
            assert all(name in out for name in names)
        else:  # those of one kind together, and where to read on
            kinds = Counter(name.partition("_")[0] for name in names)
            assert all(
                kind in out if count == 1 else f"{kind}_… ({count})" in one_line(out) for kind, count in kinds.items()
            )
            assert f"spectrain help {group}" in one_line(out)
    assert all(option.flag in out for option in entry.options)
    examples = {f"  {example}" for example in entry.examples}  # can be pasted as they are
    assert max(len(line) for line in out.splitlines() if line not in examples) <= 100


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("# @package _global_\n#\n# One. Two.\n# Three.\nkey: 1", "One. Two."),
        ("# A sentence that\n# runs on. Another\n# one.", "A sentence that runs on."),
        ("# A name: ORG/NAME\n# Another sentence.", "A name: ORG/NAME"),
        ("# It runs on\n\n# elsewhere.", "It runs on"),
        ("key: 1\n# Too late.", ""),
    ],
)
def test_an_option_is_explained_by_a_whole_sentence(tmp_path, comment, said):
    (tmp_path / "option.yaml").write_text(comment)
    assert first_comment(tmp_path / "option.yaml") == said


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_table_of_commands_is_whole(entry):
    assert entry.summary
    assert entry.detail
    assert entry.looks_only or callable(entry.load())
    assert {*entry.sections} <= {*sections(), *GROUP_FOLDERS}
    assert set(entry.stages) <= set(PIPELINE)


def test_help_shows_type_default_and_meaning_of_a_key():
    text = one_line(command_help(COMMANDS["fit"]))
    assert "trainer.learning_rate=0.001 a number; more than 0, at most 1000 greatest learning rate" in text
    assert "trainer.optimizer=adamw one of adamw, muon muon takes" in text


# --- spectrain help ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "lines"),
    [
        ("drafter.taps", ["type a list of whole numbers, or null", "default null"]),
        ("trainer.beta1", ["type a number", "bounds at least 0, less than 1", "default 0.9", "example trainer.beta1="]),
        ("trainer.schedule", ["type one of cosine, wsd, constant", "default cosine", "example trainer.schedule=wsd"]),
        ("data.seed", ["bounds at least 0, less than 2^63"]),
        ("engine.args", ["type a mapping of names to anything"]),
        ("suite.baselines", ["type a list of none, ngram", "default [none,ngram]"]),
    ],
)
def test_help_explains_one_key(capsys, key, lines):
    code, out, _ = run(capsys, "help", key)
    assert code == 0
    assert out.splitlines()[0] == key
    assert help_of(key) in one_line(out)
    assert all(line in one_line(out) for line in lines)


ALONE_IT_IS_REFUSED = {"run.task": ["run.tasks=2"], "data.mix": ["data.max_train=10"]}


@pytest.mark.parametrize("key", [key for key in all_keys() if key not in sections()])
@pytest.mark.slow
def test_every_key_can_be_explained_and_its_example_typed(key):
    assert explain([key]).startswith(key)
    if not key.startswith("drafter."):  # those say something only together with a method
        compose([f"{key}={example_of(key)}", *ALONE_IT_IS_REFUSED.get(key, ())])


def test_a_key_below_one_that_takes_any_is_explained_by_it():
    assert explain(["engine.args.max_model_len"]) == explain(["engine.args"])


@pytest.mark.parametrize("section", sections())
def test_help_of_a_section_shows_all_its_keys(capsys, section):
    code, out, _ = run(capsys, "help", section)
    assert code == 0
    keys = [key for key in all_keys() if key.startswith(f"{section}.") and key not in sections()]
    assert all(f"  {key}=" in out and help_of(key) in one_line(out) for key in keys)
    assert max(len(line) for line in out.splitlines() if not line.startswith("  spectrain ")) <= 100


@pytest.mark.parametrize("group", GROUP_FOLDERS)
def test_help_of_a_group_shows_what_each_option_says_of_itself(capsys, group):
    code, out, _ = run(capsys, "help", group)
    assert code == 0
    for option, file in group_options(group).items():
        comment = next(line for line in file.read_text().splitlines() if not line.startswith("# @"))
        assert comment.startswith("# "), f"{file} says nothing of itself"
        assert f"{option} {comment.removeprefix('# ')}" in one_line(out)


def test_help_of_a_command_is_its_help(capsys):
    assert run(capsys, "help", "fit") == run(capsys, "fit", "--help")
    assert run(capsys, "help", "eval", "parity") == run(capsys, "eval", "parity", "--help")
    both = run(capsys, "help", "capture")[1]
    assert "spectrain capture: " in both
    assert "capture.during_generation=false" in both


@pytest.mark.parametrize(
    ("topic", "near"),
    [("drafter.tap", "drafter.taps"), ("taps", "drafter.taps"), ("trainr", "trainer"), ("recipi", "recipe")],
)
def test_help_suggests_what_was_meant(capsys, topic, near):
    code, out, err = run(capsys, "help", topic)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert topic in err
    assert f"did you mean {near}?" in err


def test_help_of_something_that_does_not_exist(capsys):
    code, _, err = run(capsys, "help", "zzz")
    assert code == 2
    assert "unknown key zzz" in err


# --- the rest of the command line ----------------------------------------------------------------------------------


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("spectrain 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["genrate"], "unknown command 'genrate': did you mean generate?"),
        (["fly"], "unknown command 'fly': use one of generate, capture"),
        (["fit", "--dryrun"], "unknown option --dryrun: did you mean --dry-run?"),
        (["fit", "--wet"], "unknown option --wet: the options are --dry-run, -m, --multirun"),
        (["--wet"], "unknown option --wet"),
        (["fit", "--limit", "3"], "unknown option --limit"),
        (["fit", "--", "--port", "1"], "unknown option --"),
        (["fit", "trainer.learning_rat=1"], "unknown key trainer.learning_rat: did you mean trainer.learning_rate?"),
        (["fit", "recipe=quickstart", "trainer.epochs=abc"], "trainer.epochs must be a whole number, got 'abc'"),
        (["fit"], "no target is chosen: add recipe=quickstart"),
        (["fit", "target.path=x"], "no prompts are chosen"),
        (["fit", "-m", "recipe=quickstart", "trainer.epochs=1,0"], "trainer.epochs=0 must be at least 1"),
        (["plan", "-m", "recipe=quickstart", "trainer.epochs=1,2"], "plan takes no -m"),
        (["serve", "-m", "run.dir=a,b"], "serve takes no -m"),
        (["eval", "parity", "-m", "run.dir=a,b"], "eval parity takes no -m"),
        (["eval", "party", "run.dir=a"], "unknown word 'party': did you mean parity?"),
        (["inspect"], "inspect what?"),
        (["inspect", "responses", "--limit"], "--limit needs a value"),
        (["inspect", "responses", "--limit", "0"], "--limit must be a whole number of at least 1, got '0'"),
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
    line = cli.parse(["--debug", "fit", "a=1", "-m", "b=2", "--dry-run"])
    assert (line.command, line.overrides) == (COMMANDS["fit"], ("a=1", "b=2"))
    assert line.debug and line.multirun and line.dry_run
    assert not line.help
    line = cli.parse(["inspect", "--limit=4", "responses", "run.dir=x", "--split", "train"])
    assert (line.command, line.options, line.overrides) == (
        COMMANDS["inspect"].words[0],
        {"limit": 4, "split": "train"},
        ("run.dir=x",),
    )
    assert cli.parse(["inspect", "responses"]).options == {"limit": 3, "split": None}
    line = cli.parse(["eval", "run.dir=x", "parity"])
    assert (line.command.name, line.overrides) == ("eval parity", ("run.dir=x",))
    line = cli.parse(["serve", "--print", "run.dir=x", "--dry-run", "--", "--help", "-m", "--", "x=1"])
    assert (line.options, line.overrides, line.dry_run) == ({"print": True}, ("run.dir=x",), True)
    assert (line.flags, line.help, line.multirun) == (("--help", "-m", "--", "x=1"), False, False)


SLOW = ("torch", "transformers", "accelerate", "pyarrow")
CODE = f"""
import sys
from collections import Counter
from spectrain.cli import main
code = main(sys.argv[1:])
print(code, [name for name in {SLOW!r} if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["fit", "--help"], 0),
        (["help", "drafter.taps"], 0),
        (["help", "drafter.tap"], 2),
        (["fit", "recipe=quickstart", "trainer.epochs=x"], 2),
        (["run", "target.path=x"], 2),
        (["inspect"], 2),
        (["fit", "-m", "recipe=quickstart", "trainer.epochs=1,0"], 2),
    ],
)
def test_help_and_configuration_errors_import_nothing_slow(arguments, code):
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{code} []"


def test_python_dash_m():
    done = subprocess.run(
        [sys.executable, "-m", "spectrain", "fit", "nonsense"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "error: cannot read 'nonsense': write key=value or group=option\n")


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "4"}, 4),  # torchrun, accelerate launch
        ({"PMI_SIZE": "2"}, 2),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "16"}, 16),  # srun
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "2"}, 2),
        ({"SLURM_NTASKS": "16"}, 1),  # a batch script, before srun
    ],
)
def test_a_process_knows_from_its_environment_how_many_ranks_were_launched(monkeypatch, variables, ranks):
    for name in [name for name in os.environ if name.startswith(("WORLD_SIZE", "PMI_", "OMPI_", "MV2_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launching.launched() == ranks


@pytest.mark.parametrize(("swept", "shares"), [("strategy", True), ("trainer.learning_rate", True), ("target", False)])
def test_jobs_that_differ_in_training_alone_share_their_data(swept, shares):
    assert cli._share_data([swept], COMMANDS["fit"]) is shares
