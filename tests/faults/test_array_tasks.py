"""Tasks that share out ``generate`` and ``capture``: at once, killed, and merged to what one process makes."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from contents import assert_equal, contents, leftovers
from forked import ended, run, start

from spectrain import cli
from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.data.responses import ResponseStore

pytestmark = pytest.mark.slow


def task(command: str, arguments: list[str], path: Path, number: int, *more: str) -> list[str]:
    return [command, *arguments, f"run.dir={path}", f"run.task={number}", "run.tasks=2", *more]


@pytest.fixture(scope="module")
def undisturbed(arguments, tmp_path_factory):
    """Two tasks, merged by fit."""
    path = tmp_path_factory.mktemp("runs") / "undisturbed"
    for number in (0, 1):
        assert run(task("capture", arguments, path, number)) == 0
    assert run(["fit", *arguments, f"run.dir={path}"]) == 0
    return path


def test_two_at_once_of_which_one_is_killed(arguments, undisturbed, tmp_path):
    path = tmp_path / "run"
    first = start(task("capture", arguments, path, 0), kill_at=28)
    second = start(task("capture", arguments, path, 1))
    assert (ended(first), ended(second)) == (-signal.SIGKILL, 0)
    kept = ResponseStore(path / "tasks/0-of-2/responses").keys()
    assert 0 < len(kept) < 11
    assert run(task("capture", arguments, path, 0)) == 0
    # Merging is killed, too, before and after it has taken over a shard.
    for kill_at in (20, 25, 40, 60):
        assert run(["fit", *arguments, f"run.dir={path}"], kill_at=kill_at) == -signal.SIGKILL
    assert run(["fit", *arguments, f"run.dir={path}"]) == 0
    assert_equal(path, undisturbed)
    assert not (path / "tasks").exists()


def test_what_tasks_make_is_what_one_process_makes(arguments, undisturbed, finished):
    assert contents(undisturbed)["responses"] == contents(finished)["responses"]
    ours, theirs = (StoredHiddenStates(folder / "hidden_states") for folder in (undisturbed, finished))
    assert ours.keys == theirs.keys
    for number in range(len(theirs)):  # in other company, which moves the last bits
        np.testing.assert_allclose(ours[number].taps.numpy(), theirs[number].taps.numpy(), rtol=1e-4, atol=1e-5)


def test_what_a_task_did_not_finish_the_next_command_does(arguments, finished, tmp_path):
    """Without the task's command again: the run makes the rest itself."""
    path = tmp_path / "run"
    assert run(task("capture", arguments, path, 1), kill_at=25) == -signal.SIGKILL
    assert run(["capture", *arguments, f"run.dir={path}"]) == 0
    assert contents(path)["responses"] == contents(finished)["responses"]
    assert StoredHiddenStates(path / "hidden_states").keys == StoredHiddenStates(finished / "hidden_states").keys
    assert leftovers(path) == []
    assert not (path / "tasks").exists()


@pytest.fixture
def spectrain(arguments, tmp_path, capsys):
    """Run a command over one directory; returns exit code and what it said."""

    def run_it(command, *more):
        code = cli.main([command, *arguments, f"run.dir={tmp_path / 'run'}", *more])
        return code, capsys.readouterr().err

    return run_it


def test_generated_by_tasks_then_captured_by_tasks(spectrain, finished, tmp_path):
    path = tmp_path / "run"
    for number in (0, 1):
        assert spectrain("generate", f"run.task={number}", "run.tasks=2")[0] == 0
    code, said = spectrain("generate")
    assert code == 0 and not (path / "tasks").exists()
    before = {part.name for part in (path / "responses").iterdir()}
    for number in (0, 1):
        code, said = spectrain("capture", f"run.task={number}", "run.tasks=2")
        assert code == 0 and "11 of 22 prompts" in said
    assert spectrain("capture")[0] == 0
    assert {part.name for part in (path / "responses").iterdir()} == before  # nothing was answered again
    assert contents(path)["responses"] == contents(finished)["responses"]
    # What is there is no task's work any more; more prompts are.
    code, said = spectrain("capture", "run.task=0", "run.tasks=2")
    assert code == 0 and "0 of 22 prompts" in said


def test_a_damaged_shard_of_a_task_is_captured_again(spectrain, finished, tmp_path):
    path = tmp_path / "run"
    assert spectrain("capture", "run.task=1", "run.tasks=2")[0] == 0
    shard = sorted((path / "tasks/1-of-2/hidden_states").glob("shard-*"))[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    code, said = spectrain("capture")
    assert code == 0 and f"{shard} does not have the checksum of the index" in said
    states = StoredHiddenStates(path / "hidden_states")
    states.verify_checksums()
    assert states.keys == StoredHiddenStates(finished / "hidden_states").keys


def test_what_cannot_be_merged_is_named(spectrain, tmp_path):
    path = tmp_path / "run"
    assert spectrain("generate", "run.task=1", "run.tasks=2")[0] == 0
    code, said = spectrain("generate", "run.task=1", "run.tasks=3")
    assert (code, said.count("\n")) == (2, 1) and f"{path}/tasks/1-of-2" in said
    code, said = spectrain("generate", "target.max_length=250")
    assert code == 2 and re.search(r"1-of-2 was made with another target.max_length \(256, .* 250\)", said)
    code, said = spectrain("fit", "run.task=0", "run.tasks=2")
    assert code == 2 and "run.tasks=2" in said
    code, said = spectrain("generate", "run.task=2", "run.tasks=2")
    assert code == 2 and "--array=0-1" in said


def test_a_task_at_work_is_not_merged(spectrain, tmp_path, monkeypatch):
    from spectrain.stages.run_dir import RunDir

    path = tmp_path / "run"
    assert spectrain("generate", "run.task=0", "run.tasks=2")[0] == 0
    shutil.copytree(path / "tasks/0-of-2", path / "tasks/1-of-2")
    with RunDir(path / "tasks/1-of-2").locked():
        code, said = spectrain("generate")
    assert code == 2 and f"{path}/tasks/1-of-2 is in use by process" in said


def test_a_sweep_over_tasks_is_one_run(arguments, finished, tmp_path):
    """As submitit starts them: an array of jobs in one directory."""
    path = tmp_path / "run"
    assert cli.main(["capture", "-m", *arguments, f"run.dir={path}", "run.task=0,1", "run.tasks=2"]) == 0
    assert sorted(folder.name for folder in (path / "tasks").iterdir()) == ["0-of-2", "1-of-2"]
    assert cli.main(["capture", *arguments, f"run.dir={path}"]) == 0
    assert contents(path)["responses"] == contents(finished)["responses"]
