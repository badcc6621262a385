"""A full disk, real where this user may mount one: every writer names the disk, what was being written, how much room
that takes and how much there is, and leaves what was there before.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disks import mounted
from drafter_tools import Options, random_drafter
from state_stores import make_meta, make_states, shard_of_tokens
from test_checkpointing import Training
from test_records import full_record
from test_responses import make_response

from spectrain import cli, files
from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.responses import ResponseStore
from spectrain.drafters.drafter_folder import load_drafter, save_drafter
from spectrain.errors import RunError
from spectrain.files import append_line, write_atomically
from spectrain.stages.run_dir import Inputs, RunDir


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    with mounted(tmp_path / "disk", "1m") as disk:
        yield disk


def fill_up(disk: Path) -> Path:
    """Take all room that is left."""
    path = disk / "ballast"
    path.write_bytes(b"x" * shutil.disk_usage(disk).free)
    return path


def hidden_states(folder: Path, number: int) -> None:
    meta = make_meta()
    with HiddenStatesWriter(folder, meta, shard_of_tokens(meta, 20)) as writer:
        writer.add(make_states(number, 1000))


def checkpoint(folder: Path, number: int) -> None:
    training = Training()
    training.step()
    training.save(folder, number)


def drafter(folder: Path, number: int) -> None:
    random = random_drafter(Options(), seed=number)
    save_drafter(random, folder, target="t", target_architectures=("L",), num_speculative_tokens=number)


def stage(folder: Path, number: int) -> None:
    run_dir = RunDir(folder)
    with (
        run_dir.locked(),
        run_dir.running(run_dir.decide("capture", Inputs({}, {"n": number}), lambda: "all")) as outputs,
    ):
        outputs["text"] = "x" * 9000


WRITERS: dict[str, tuple[Callable[[Path, int], object], str, Callable[[Path], object]]] = {
    "hidden states": (hidden_states, "hidden states", lambda folder: StoredHiddenStates(folder).keys),
    "responses": (
        lambda folder, number: ResponseStore(folder).append([make_response(number, length=9000)]),
        "1 responses",
        lambda folder: ResponseStore(folder).keys(),
    ),
    "checkpoint": (
        checkpoint,
        "the checkpoint of step 2",
        lambda folder: Training().load(folder),
    ),
    "drafter": (drafter, "the drafter", lambda folder: load_drafter(folder).vocab.ids_D.shape),
    "record": (lambda folder, _: full_record().write(folder), "an evaluation record", os.listdir),
    "text": (lambda folder, number: write_atomically(folder / "a", "x" * 9000), "a", os.listdir),
    "line": (lambda folder, number: append_line(folder / "a", "x" * 9000), "a", os.listdir),
    "manifest": (stage, "the run's manifest", lambda folder: RunDir(folder).manifest()["stages"]["capture"]["status"]),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_is_named_and_takes_nothing_that_was_there(small_disk: Path, kind: str) -> None:
    write, what, read = WRITERS[kind]
    folder = small_disk / "runs" / kind
    folder.mkdir(parents=True)
    write(folder, 1)
    before = read(folder)
    ballast = fill_up(small_disk)
    with pytest.raises(RunError) as caught:
        write(folder, 2)
    told = str(caught.value)
    assert told.startswith(f"{what} could not be written to {small_disk}"), told
    assert f"the disk mounted on {small_disk} is full" in told
    needed, unit = re.search(r"\((\d[\d.]*) (bytes|kB|MB) needed, [\d.]+ (?:bytes|kB) free\)", told).groups()  # type: ignore[union-attr]
    assert float(needed) * {"bytes": 1, "kB": 1e3, "MB": 1e6}[unit] > 200
    assert read(folder) == before
    ballast.unlink()
    write(folder, 2)  # the same again, once there is room
    assert [path.name for path in folder.rglob(".*") if path.name != ".lock"] == []


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "its quota is used up"),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "is full"),
        (OSError(errno.EROFS, "x"), "Read-only file system"),
        (OSError(errno.EFBIG, "x"), "File too large"),
    ],
)
def test_why_a_file_could_not_be_written(tmp_path: Path, error: Exception, says: str) -> None:
    with pytest.raises(RunError) as caught, files.replacing(tmp_path / "a.json", "what it is", 2_500_000):
        raise error
    told = str(caught.value)
    assert told.startswith(f"what it is could not be written to {tmp_path} ") or f"to {tmp_path}:" in told
    assert says in told
    assert ("2.5 MB needed" in told) == (says in ("is full", "its quota is used up"))
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_failure_of_writing_passes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), files.replacing(tmp_path / "a"):
        raise ValueError("mine")


def test_a_library_that_meets_a_full_disk_is_no_bug_of_ours(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "cache/blob"))

    monkeypatch.setattr("spectrain.cli._dispatch", full)
    assert cli.main(["help"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "unexpected" not in error
    assert str(tmp_path / "cache") in error and "is full" in error
