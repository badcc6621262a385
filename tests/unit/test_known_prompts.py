"""What is remembered of a run's prompts: true as long as files, settings and target are the same, and then they are not
read.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pyarrow import feather
from workplace import make

from spectrain.config.commands import COMMANDS
from spectrain.config.loading import compose
from spectrain.data import prompts
from spectrain.data.prompt_screening import PromptScreen
from spectrain.data.responses import Response, ResponseStore
from spectrain.errors import ConfigError
from spectrain.files import FileState
from spectrain.stages import checks, known_prompts
from spectrain.stages.answer_suite import suite_prompts
from spectrain.stages.checks import prepare
from spectrain.stages.context import Context
from spectrain.stages.generate import generate


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make(tmp_path_factory.mktemp("workplace"))


@pytest.fixture
def begun(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory in which prompts were answered, its prompt files copied beside it."""
    monkeypatch.setattr(FileState, "settled", True)
    for name in ("train", "heldout"):
        source = next(Path(a.partition("=")[2]) for a in arguments if a.startswith(f"data.{name}="))
        (tmp_path / source.name).write_bytes(source.read_bytes())
    context = prepared(arguments, tmp_path)
    assert context.known is None
    with context.run_dir.locked():
        context.open_run_dir()
    tokens = {"input_ids": np.arange(3, dtype=np.int32), "loss_mask": np.array([0, 1, 1], dtype=np.uint8)}
    conversations = [*context.prompts.train, *context.prompts.heldout]
    ResponseStore(context.run_dir.responses).append(
        [
            Response(c, **tokens, finish_reason="stop", sampling=context.sampling, domain=None, split=split, key=key)
            for c, (key, split) in zip(conversations, context.splits.items(), strict=True)
        ]
    )
    return tmp_path


def prepared(arguments: list[str], folder: Path, *more: str, command: str = "generate") -> Context:
    own = [f"data.{name}={folder / name}.jsonl" for name in ("train", "heldout")]
    return prepare(compose([*arguments, *own, f"run.dir={folder / 'run'}", *more]), COMMANDS[command])


def facts(context: Context) -> tuple[object, ...]:
    split = context.prompts
    return list(context.splits.items()), context.named_prompts, len(split.train), len(split.heldout), split.notes()


def test_what_is_remembered_is_what_is_read(arguments: list[str], begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = prepared(arguments, begun, "run.dir=" + str(begun / "another"))
    assert read.known is None
    with monkeypatch.context() as nobody:
        nobody.setattr(prompts, "load_prompts", lambda path: pytest.fail("reads prompts"))
        nobody.setattr(known_prompts, "run_prompts", lambda *_, **__: pytest.fail("reads prompts"))
        known = prepared(arguments, begun)
        assert known.known is not None
        assert facts(known) == facts(read)
    assert list(known.prompts.train) == list(read.prompts.train)
    assert [c.where for c in known.prompts.heldout[1:3]] == [c.where for c in read.prompts.heldout[1:3]]


@pytest.fixture
def nobody_reads(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_prompts, "run_prompts", lambda *_, **__: pytest.fail("reads prompts"))


@pytest.mark.usefixtures("nobody_reads")
def test_responses_that_are_all_there_are_finished_without_a_prompt(arguments: list[str], begun: Path) -> None:
    context = prepared(arguments, begun)
    with context.run_dir.locked():
        context.open_run_dir()
        generate(context)
    made = context.run_dir.outputs("generate")
    assert made["responses"] == len(context.asked)
    assert (made["generated_tokens"], made["tokens"]) == (2 * len(context.asked), 3 * len(context.asked))


@pytest.mark.usefixtures("nobody_reads")
@pytest.mark.parametrize("command", ["run", "eval"])
def test_measuring_held_out_prompts_reads_no_training_prompt(
    arguments: list[str], begun: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "check_drafter_folder", lambda *_: None)
    monkeypatch.setattr(checks, "check_measured", lambda *_: None)
    monkeypatch.setattr(checks, "check_drafter_digests", lambda *_: None)
    context = prepared(arguments, begun, command=command)
    assert suite_prompts(context) == prompts.load_prompts(begun / "heldout.jsonl")[::2]  # three, evenly spaced


def suite(folder: Path, *texts: str) -> list[str]:
    lines = [json.dumps({"turns": [text]}) for text in texts]
    (folder / "asked.jsonl").write_text("\n".join(lines) + "\n")
    return ["suite=jsonl", f"suite.prompts={folder / 'asked.jsonl'}"]


@pytest.mark.usefixtures("nobody_reads")
def test_a_suite_of_new_prompts_is_compared_with_what_is_remembered(arguments: list[str], begun: Path) -> None:
    assert prepared(arguments, begun, *suite(begun, "Which of these is new?"), command="run").known is not None


def test_a_prompt_that_the_template_makes_equal_to_a_training_prompt_may_be_one(
    arguments: list[str], begun: Path
) -> None:
    context = prepared(arguments, begun)
    trained, screen = prompts.load_prompts(begun / "train.jsonl")[3], PromptScreen(context.template, 256)

    class Alike(PromptScreen):
        def digest(self, conversation: prompts.Conversation) -> bytes:
            return screen.digest(trained)

    new = prompts.Conversation("new", ("Which of these is new?",))
    assert context.known is not None
    assert not context.known.may_train_on([new], screen)
    assert context.known.may_train_on([new], Alike(context.template, 256))


def test_a_suite_with_a_training_prompt_is_refused_as_where_prompts_are_read(arguments: list[str], begun: Path) -> None:
    (_, trained, *_) = prompts.load_prompts(begun / "train.jsonl")
    asked = suite(begun, "Which of these is new?", trained.turns[0])
    refused = []
    for more in ([], ["run.dir=" + str(begun / "another")]):
        with pytest.raises(ConfigError) as error:
            prepared(arguments, begun, *asked, *more, command="run")
        refused.append(str(error.value))
    assert refused[0] == refused[1]
    assert "suite.prompts: 1 of its prompts" in refused[0]


@pytest.mark.parametrize("column", ["heldout prompt", "prompt digest"])
def test_a_further_column_that_changed_is_not_believed(arguments: list[str], begun: Path, column: str) -> None:
    path = begun / "run" / known_prompts.KNOWN_NAME
    table = feather.read_table(path, memory_map=False)
    number = table.column_names.index(column)
    changed = table[column].take(np.roll(np.arange(len(table)), 1))
    feather.write_feather(table.set_column(number, column, changed), str(path))
    context = prepared(arguments, begun)
    assert context.known is not None
    if column == "heldout prompt":
        assert list(context.prompts.heldout) == prompts.load_prompts(begun / "heldout.jsonl")
    else:
        assert context.known.may_train_on(context.prompts.heldout, PromptScreen(context.template, 256))


@pytest.mark.parametrize(
    "change",
    ["data.max_train=9", "data.seed=5", "target.max_length=255", "sampling.max_new_tokens=11", "data.system=Hello."],
)
@pytest.mark.slow
def test_other_settings_read_the_prompts_again(arguments: list[str], begun: Path, change: str) -> None:
    again = prepared(arguments, begun, change)
    assert again.known is None
    assert facts(again) == facts(prepared(arguments, begun, change, "run.dir=" + str(begun / "another")))


def test_a_changed_file_is_read_again(arguments: list[str], begun: Path) -> None:
    path = begun / "train.jsonl"
    path.write_text(path.read_text().replace("cat", "cow"))
    again = prepared(arguments, begun)
    assert again.known is None
    assert "cow" in again.prompts.train[0].turns[0]


@pytest.mark.parametrize("how", ["cut", "empty", "another key"])
def test_what_is_damaged_is_not_believed(arguments: list[str], begun: Path, how: str) -> None:
    path = begun / "run" / known_prompts.KNOWN_NAME
    whole = path.read_bytes()
    if how == "another key":
        table = feather.read_table(path, memory_map=False)
        keys = table["key"].to_pylist()
        feather.write_feather(table.set_column(0, "key", [["0" * 64, *keys[1:]]]), str(path))
    else:
        path.write_bytes(whole[:90] if how == "cut" else b"")
    assert prepared(arguments, begun).known is None


def test_files_so_new_that_a_change_would_not_show_are_not_remembered(
    arguments: list[str], begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (begun / "run" / known_prompts.KNOWN_NAME).unlink()
    monkeypatch.setattr(FileState, "settled", False)
    context = prepared(arguments, begun)
    with context.run_dir.locked():
        context.open_run_dir()
    assert not (begun / "run" / known_prompts.KNOWN_NAME).exists()


def test_prompts_that_changed_while_a_command_ran_end_it(arguments: list[str], begun: Path) -> None:
    context = prepared(arguments, begun)
    lines = (begun / "train.jsonl").read_text().splitlines()
    (begun / "train.jsonl").write_text("\n".join(lines[2:]) + "\n")
    with pytest.raises(known_prompts.RunError, match="have changed"):
        list(context.prompts.train)
