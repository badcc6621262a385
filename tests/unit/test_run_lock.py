"""One process in a run directory, also where the file system has no locks that every machine sees."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from spectrain.errors import InputError, RunError
from spectrain.files import write_atomically
from spectrain.processes import ProcessId
from spectrain.stages import run_lock
from spectrain.stages.run_dir import RunDir

HOLD = """
import sys, time
from pathlib import Path
from spectrain import signals
from spectrain.stages import run_lock
from spectrain.stages.run_dir import RunDir
run_lock.file_system = lambda path: sys.argv[2]
signals.install()
with RunDir(sys.argv[1]).locked():
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "file_system", lambda path: "nfs4")


def hold(folder: Path, kind: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def write_owner(folder: Path, process: ProcessId, silent_s: float = 0.0, **job: object) -> Path:
    path = folder / run_lock.OWNER
    path.write_text(json.dumps(asdict(run_lock._Owner(process, **job))))  # type: ignore[arg-type]
    os.utime(path, (time.time() - silent_s,) * 2)
    return path


ELSEWHERE = replace(ProcessId.of_this(), host="node7", boot="another", pid=12)


@pytest.mark.parametrize("kind", ["ext4", "nfs4", "lustre", "fuse.something"])
def test_another_process_is_kept_out_until_it_ends_however_it_ends(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(run_lock, "file_system", lambda path: kind)
    for end in (signal.SIGKILL, signal.SIGTERM):
        process = hold(tmp_path, kind)
        with pytest.raises(InputError, match=f"in use by process {process.pid}: wait"), RunDir(tmp_path).locked():
            pass
        assert (tmp_path / run_lock.OWNER).exists() == (kind != "ext4")
        process.send_signal(end)
        process.wait()
        # So a machine elsewhere may go on at once, too.
        assert (tmp_path / run_lock.OWNER).exists() == (kind != "ext4" and end == signal.SIGKILL)
        with RunDir(tmp_path).locked():
            pass
    assert {path.name for path in tmp_path.iterdir()} <= {run_lock.LOCK}


@pytest.mark.usefixtures("nfs")
def test_an_owner_on_another_machine(tmp_path):
    path = write_owner(tmp_path, ELSEWHERE)
    with pytest.raises(InputError, match="in use by process 12 on node7: wait"), RunDir(tmp_path).locked():
        pass
    write_owner(tmp_path, ELSEWHERE, silent_s=3600)
    with pytest.raises(InputError, match="60 minutes") as caught, RunDir(tmp_path).locked():
        pass
    assert "process 12 on node7" in str(caught.value) and f"remove {path}" in str(caught.value)
    path.unlink()
    with RunDir(tmp_path).locked():
        assert ProcessId(**json.loads(path.read_text())["process"]) == ProcessId.of_this()


@pytest.mark.usefixtures("nfs")
@pytest.mark.parametrize(
    ("process", "job"),
    [
        (replace(ELSEWHERE, host=ProcessId.of_this().host), {}),  # the machine was started anew
        (replace(ProcessId.of_this(), started="1"), {}),  # its number is another process's now
        (ELSEWHERE, {"job": "77", "restarts": 0}),  # Slurm has put the same job on this machine
    ],
)
def test_an_owner_that_has_surely_ended_is_followed_at_once(tmp_path, monkeypatch, process, job):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    write_owner(tmp_path, process, **job)
    with RunDir(tmp_path).locked():
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("nfs")
def test_of_many_that_find_an_ended_owner_one_goes_on(tmp_path, monkeypatch):
    """Each is a process of its own in what it says of itself; they begin together, and look before any replaces."""
    check = run_lock._check_ended
    monkeypatch.setattr(run_lock, "_check_ended", lambda *given: [check(*given), time.sleep(0.2)])
    write_owner(tmp_path, replace(ProcessId.of_this(), started="1"))
    barrier, outcomes = threading.Barrier(8), list[bool]()

    def take(number: int) -> None:
        this = run_lock._Owner(replace(ELSEWHERE, pid=number))
        barrier.wait()
        try:
            run_lock._take(tmp_path / run_lock.OWNER, this)
            outcomes.append(True)
        except InputError:
            outcomes.append(False)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 7 + [True]


@pytest.mark.usefixtures("nfs")
def test_an_owner_whose_file_is_another_processs_writes_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_BEAT_S", 0.01)
    with RunDir(tmp_path).locked():
        write_atomically(tmp_path / "a", "1")
        write_owner(tmp_path, ELSEWHERE)
        deadline = time.monotonic() + 30
        with pytest.raises(RunError, match="taken over by another process"):  # noqa: PT012
            while time.monotonic() < deadline:
                write_atomically(tmp_path / "a", "2")
    assert (tmp_path / run_lock.OWNER).exists()  # it is not ours to remove


@pytest.mark.usefixtures("nfs")
def test_an_owner_is_alive_as_long_as_it_works(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_BEAT_S", 0.01)
    with RunDir(tmp_path).locked():
        os.utime(tmp_path / run_lock.OWNER, (1, 1))
        deadline = time.monotonic() + 30
        while (tmp_path / run_lock.OWNER).stat().st_mtime < 1e6:
            assert time.monotonic() < deadline


@pytest.mark.usefixtures("nfs")
def test_without_links_and_where_nobody_can_be_kept_out(tmp_path, monkeypatch):
    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr("os.link", no_link)
    with RunDir(tmp_path).locked(), pytest.raises(InputError, match="in use by"), RunDir(tmp_path).locked():
        pass

    def unable(self: Path, mode: str = "r", **_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(Path, "open", unable)
    monkeypatch.setattr(Path, "write_text", lambda self, text, encoding: os.close(os.open(self, os.O_CREAT)))
    with pytest.raises(InputError, match=r"file system \(nfs4\) on which no process can keep others out"):
        RunDir(tmp_path).locked().__enter__()


def test_a_disk_without_locks_has_an_owners_file(tmp_path, monkeypatch):
    def no_lock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_lock)
    monkeypatch.setattr(run_lock, "file_system", lambda path: "ext4")
    with RunDir(tmp_path).locked():
        assert (tmp_path / run_lock.OWNER).exists()


@pytest.mark.usefixtures("nfs")
def test_a_damaged_owners_file_is_named(tmp_path):
    (tmp_path / run_lock.OWNER).write_text("{")
    with pytest.raises(InputError, match="if nobody does, remove it"), RunDir(tmp_path).locked():
        pass


def test_the_type_of_a_file_system_is_the_innermost_mounts(tmp_path, monkeypatch):
    (tmp_path / "with space" / "in").mkdir(parents=True)
    lines = [
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
        f"23 22 0:5 / {tmp_path} rw - nfs4 server:/home rw",
        rf"24 23 0:6 / {tmp_path}/with\040space rw shared:7 master:3 - lustre mgs:/fs rw",
        f"25 22 0:7 / {str(tmp_path)[:-1]} rw - tmpfs none rw",
    ]
    text = "\n".join(lines)
    monkeypatch.setattr(Path, "read_text", lambda self, **_: text if self.name == "mountinfo" else "")
    assert run_lock.file_system(tmp_path / "a" / "b") == "nfs4"
    assert run_lock.file_system(tmp_path / "with space" / "in" / "new") == "lustre"
    assert run_lock.file_system(Path("/")) == "ext4"
