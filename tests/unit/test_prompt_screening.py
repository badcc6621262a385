"""What only the template tells of prompts: too long, and the same as others after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_chat import make_tokenizer
from tiny import tiny_target

from spectrain import cli
from spectrain.config.data_schema import DataConfig
from spectrain.data.chat import ChatTemplate
from spectrain.data.prompt_screening import PromptScreen
from spectrain.data.prompts import Conversation, PromptSplit
from spectrain.errors import ConfigError, InputError


@pytest.fixture(scope="module")
def trimming() -> ChatTemplate:
    """Llama 3's template trims what the user says."""
    return ChatTemplate(make_tokenizer("llama3"))


def asked(*texts: str) -> list[Conversation]:
    return [Conversation(id=text, turns=tuple(text.split("|")), source=f"f:{text}") for text in texts]


def ids(conversations: list[Conversation]) -> list[str]:
    return [conversation.id for conversation in conversations]


NAMED, DIVIDED = DataConfig(train=("t",), heldout=("h",)), DataConfig(train=("t",))
SPLIT = PromptSplit(train=asked("a", "b ", " c|d", "e|f"), heldout=asked("b", "c|d\n", "e"))


def test_named_heldout_prompts_that_become_training_prompts_are_refused(trimming: ChatTemplate) -> None:
    with pytest.raises(ConfigError, match=r"^data\.heldout: 2 of its 3 prompts .* after the chat template.*f:b .*f:b "):
        PromptScreen(trimming, 100).screened(SPLIT, NAMED)


def test_training_prompts_that_become_held_out_ones_are_left_out_and_counted(trimming: ChatTemplate) -> None:
    screened = PromptScreen(trimming, 100).screened(SPLIT, DIVIDED)
    assert (ids(screened.train), ids(screened.heldout)) == (["a", "e|f"], ["b", "c|d\n", "e"])
    assert (screened.alike, screened.too_long) == (2, 0)
    assert screened.notes()[0].split()[2] == "2"


def test_a_template_that_keeps_blanks_keeps_the_prompts_apart() -> None:
    screened = PromptScreen(ChatTemplate(make_tokenizer("chatml")), 1000).screened(SPLIT, NAMED)
    assert (screened.train, screened.heldout) == (SPLIT.train, SPLIT.heldout)
    assert screened.notes() == []


def test_rows_of_a_data_set_that_the_template_rejects_are_left_out_and_counted() -> None:
    """Gemma's template takes no system prompt. A prompt file's own is an error there."""
    screen = PromptScreen(ChatTemplate(make_tokenizer("gemma")), 100)
    told = Conversation(id="told", turns=("x",), system="s", source="f:told")
    split = PromptSplit(train=[*asked("a", "b", "c" * 100), told], heldout=asked("d"))
    screened = screen.screened(split, DataConfig(path="org/set"))
    assert (ids(screened.train), screened.rejected, screened.too_long) == (["a", "b"], 1, 1)
    assert any("1 are none that the chat template takes" in note for note in screened.notes())
    with pytest.raises(InputError, match="f:told"):
        screen.screened(split, DIVIDED)
    with pytest.raises(InputError, match="f:told"):
        screen.screened(PromptSplit(train=[told], heldout=asked("d")), DataConfig(path="org/set"))


@pytest.mark.parametrize("spare", [0, 1])
def test_prompts_without_room_are_an_error_or_skipped(trimming: ChatTemplate, spare: int) -> None:
    split = PromptSplit(train=asked("a", "b" * 50, "c"), heldout=asked("d", "e" * 50))
    room = len(trimming.first_prompt_ids(split.heldout[1])) + spare
    if spare:
        assert PromptScreen(trimming, room).screened(split, NAMED).notes() == []
        return
    with pytest.raises(InputError, match=r"f:b+: prompt b+ is too long.*data\.skip_too_long"):
        PromptScreen(trimming, room).screened(split, NAMED)
    skipping = DataConfig(train=("t",), heldout=("h",), skip_too_long=True)
    screened = PromptScreen(trimming, room).screened(split, skipping)
    assert (ids(screened.train), ids(screened.heldout), screened.too_long) == (["a", "c"], ["d"], 2)
    with pytest.raises(InputError, match=r"all training prompts .*target\.max_length=3"):
        PromptScreen(trimming, 3).screened(split, skipping)


def test_no_training_prompt_is_left(trimming: ChatTemplate) -> None:
    with pytest.raises(ConfigError, match=r"data\.train.*the same"):
        PromptScreen(trimming, 100).screened(PromptSplit(train=asked("a "), heldout=asked("a")), DIVIDED)


# By command


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose template trims."""
    folder = tiny_target("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=7)
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("message['content']", "message['content'] | trim"))
    return folder


def run(capsys: pytest.CaptureFixture[str], target: Path, folder: Path, command: str, *more: str) -> tuple[int, str]:
    sizes = [
        "target.max_length=100",
        "sampling.max_new_tokens=8",
        "sampling.temperature=0",
        "trainer.packed_length=256",
    ]
    paths = [f"run.dir={folder / 'run'}", f"target.path={target}", "data=jsonl", "drafter.draft_vocab_size=100"]
    code = cli.main([command, *paths, *sizes, *more])
    return code, capsys.readouterr().err


def prompts(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    return str(path)


def test_generate_counts_what_it_leaves_out(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path) -> None:
    train = prompts(tmp_path / "t.jsonl", "one", "two", "two", "x " * 100, "three")
    heldout = prompts(tmp_path / "h.jsonl", "four", "five")
    files = [f"data.train=[{train}]", f"data.heldout=[{heldout}]"]
    code, said = run(capsys, target, tmp_path, "generate", *files)
    assert code == 2 and f"{train}:4" in said and "data.skip_too_long" in said
    assert not (tmp_path / "run" / "responses").exists()
    code, said = run(capsys, target, tmp_path, "generate", *files, "data.skip_too_long=true")
    assert code == 0 and "generate: 5 responses" in said
    assert said.count("note: prompts: 1 ") == 2
    asked = [*files, "data.skip_too_long=true"]
    assert run(capsys, target, tmp_path, "capture", *asked)[0] == 0
    code, said = run(capsys, target, tmp_path, "capture", *asked)  # what is left out is not missing
    assert code == 0 and "generate: unchanged" in said and "capture: unchanged" in said


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_prompts_that_the_template_makes_equal_are_found_before_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, dry: list[str]
) -> None:
    train, other = prompts(tmp_path / "t.jsonl", "one", "two", "three"), prompts(tmp_path / "h.jsonl", "two ", "four")
    code, said = run(capsys, target, tmp_path, "run", f"data.train=[{train}]", f"data.heldout=[{other}]", *dry)
    assert code == 2 and "data.heldout: 1 of its 2" in said and f"{other}:1" in said and f"{train}:2" in said
    unseen = prompts(tmp_path / "u.jsonl", "four")
    suite = ["suite=jsonl", f"suite.prompts={other}", f"data.train=[{train}]", f"data.heldout=[{unseen}]"]
    code, said = run(capsys, target, tmp_path, "run", *suite, *dry)
    assert code == 2 and "suite.prompts: 1 of its" in said and f"{other}:1" in said
    assert not (tmp_path / "run" / "responses").exists()
