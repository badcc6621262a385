"""A machine that misbehaves: a full disk, a disk that may not be written, bits that flip, a clock that runs backwards.
The same command ends, once it can, as if nothing had happened.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from contents import assert_equal
from disks import mounted, remount
from forked import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def other(finished, arguments, tmp_path_factory):
    """From the same hidden states another drafter, with more checkpoints."""
    path = Path(shutil.copytree(finished, tmp_path_factory.mktemp("runs") / "other"))
    assert run(["fit", *other_arguments(arguments), f"run.dir={path}"]) == 0
    return path


def other_arguments(arguments: list[str]) -> list[str]:
    return [*arguments, "trainer.seed=9", "trainer.checkpoint_every_steps=1"]


def said(file: Path) -> list[str]:
    lines = file.read_text().splitlines()
    file.unlink()
    return lines


def backwards() -> None:
    """Every look at the clock is an hour earlier than the one before."""
    hours, now, now_ns = count(), time.time, time.time_ns
    time.time = lambda: now() - 3600 * next(hours)
    time.time_ns = lambda: now_ns() - 3600 * 10**9 * next(hours)


def test_a_clock_that_runs_backwards(arguments, finished, tmp_path):
    path = tmp_path / "run"
    assert run(["fit", *arguments, f"run.dir={path}"], kill_at=30, before=backwards) == -signal.SIGKILL
    assert run(["run", *arguments, f"run.dir={path}"], before=backwards) == 0
    assert_equal(path, finished)


def plenty() -> None:
    """The disk says that it has room, until it is written."""
    shutil.disk_usage = lambda path: SimpleNamespace(total=1 << 50, used=0, free=1 << 50)


def test_a_disk_that_is_full_again_and_again(arguments, finished, tmp_path):
    needed = sum(file.stat().st_size for file in finished.rglob("*"))
    failures = 0
    with mounted(tmp_path / "disk", f"{needed // 20}") as disk:
        path, error = disk / "run", tmp_path / "error"
        for twentieths in range(1, 100, 3):
            remount(disk, f"size={needed * twentieths // 20}")
            code = run(["run", *arguments, f"run.dir={path}"], error, before=plenty)
            if code == 0:
                break
            failures += 1
            last = said(error)[-1]
            assert code == 1, last
            assert last.startswith("error: ") and "full" in last
        assert failures >= 3
        assert_equal(path, finished)


def test_a_run_directory_that_may_not_be_written(arguments, other, finished, tmp_path):
    with mounted(tmp_path / "disk", "64m") as disk:
        path, error = Path(shutil.copytree(finished, disk / "run")), tmp_path / "error"
        command = ["fit", *other_arguments(arguments), f"run.dir={path}"]
        remount(disk, "ro")
        assert run(command, error) == 2
        (line,) = said(error)
        assert f"run.dir={path} cannot be written (Read-only file system)" in line
        assert_equal(path, finished)
        remount(disk, "rw")
        assert run(command) == 0
        assert_equal(path, other)


DAMAGED = ("manifest.json", "hidden_states/index.json", "hidden_states/shard-*", "responses/part-*", "drafter/model*")


@pytest.mark.parametrize("pattern", DAMAGED)
@pytest.mark.parametrize("how", ["flipped", "cut short"])
def test_a_damaged_file_is_made_again(arguments, finished, other, tmp_path, pattern, how):
    """At a place that is drawn anew each time."""
    path = Path(shutil.copytree(finished, tmp_path / "run"))
    print(damage(random.choice(sorted(path.glob(pattern))), how))  # noqa: T201 (shown where the test fails)
    error = tmp_path / "error"
    assert run(["fit", *other_arguments(arguments), f"run.dir={path}"], error) == 0, said(error)
    for aside in path.glob("responses/*.damaged"):
        aside.unlink()
    assert_equal(path, other)


@pytest.mark.parametrize("how", ["flipped", "cut short"])
def test_a_damaged_checkpoint_is_passed_over(arguments, finished, other, tmp_path, how):
    path = Path(shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints")))
    command, error = ["fit", *other_arguments(arguments), f"run.dir={path}"], tmp_path / "error"
    kills = iter(range(60, 400, 10))
    while len(list((path / "checkpoints").glob("step-*"))) < 2:
        assert run(command, kill_at=next(kills)) == -signal.SIGKILL
    newest = max((path / "checkpoints").glob("step-*"))
    print(damage(random.choice(sorted(newest.iterdir())), how))  # noqa: T201
    assert run(command, error) == 0
    assert f"{newest} is damaged" in error.read_text()
    assert_equal(path, other)


def damage(file: Path, how: str) -> str:
    content = bytearray(file.read_bytes())
    place = random.randrange(len(content))
    if how == "flipped":
        content[place] ^= 1 << random.randrange(8)
        file.write_bytes(content)
    else:
        file.write_bytes(content[:place])
    return f"{file} {how} at byte {place}"
