"""What is remembered of a run's prompts: true as long as files, settings and target are the same, and then they are not
read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pyarrow import feather
from workplace import make

from spectrain.config.commands import COMMANDS
from spectrain.config.loading import compose
from spectrain.data import prompts
from spectrain.data.responses import Response, ResponseStore
from spectrain.files import FileState
from spectrain.stages import known_prompts
from spectrain.stages.checks import prepare
from spectrain.stages.context import Context


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


@pytest.mark.parametrize(
    "change",
    ["data.max_train=9", "data.seed=5", "target.max_length=255", "sampling.max_new_tokens=11", "data.system=Hello."],
)
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
