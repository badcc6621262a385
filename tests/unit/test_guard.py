"""Whatever dies, nothing that was started under a guard is left, not even processes that moved to a session of their
own.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from spectrain.engines.vllm.guard import guarded

PATIENCE_S = 30.0

# Three generations: the command, a child of it, and a grandchild in a session of its own that ignores SIGTERM. Each
# notes its number.
COMMAND = """
import os, signal, subprocess, sys, time
folder, depth = sys.argv[1], int(sys.argv[2])
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[3], folder, str(depth - 1), sys.argv[3]],
                     start_new_session=depth == 1)
if depth == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if depth == 2:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
with open(f"{folder}/{depth}.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{folder}/{depth}.new", f"{folder}/{depth}.pid")
time.sleep(3600)
"""
# What spectrain is to the guard: it holds the writing end of the pipe, and waits.
PARENT = """
import subprocess, sys, time
guard = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, start_new_session=True)
with open(sys.argv[1], "w") as file:
    file.write(str(guard.pid))
time.sleep(3600)
"""


@pytest.fixture
def family(tmp_path):
    """The parent and the numbers of the guard and the three generations, once all run; all are killed at the end."""
    command = [sys.executable, "-c", COMMAND, str(tmp_path), "2", COMMAND]
    (tmp_path / "scratch").mkdir()
    guard = guarded(command, grace_s=1.0, scratch=tmp_path / "scratch")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "guard.pid"), *guard], process_group=0)
    numbers = []
    try:
        for name in ("guard", "2", "1", "0"):
            wait_for(lambda name=name: (tmp_path / f"{name}.pid").exists() and (tmp_path / f"{name}.pid").read_text())
            numbers.append(int((tmp_path / f"{name}.pid").read_text()))
        yield parent, numbers
    finally:
        for number in [parent.pid, *numbers]:
            if is_alive(number):
                os.kill(number, signal.SIGKILL)
        parent.wait()


def wait_for(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


def is_alive(number):
    """A zombie does not count: its parent may be slow to notice."""
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("victim", ["parent", "parent's group", "command", "told"])
def test_nothing_is_left(family, victim, tmp_path):
    parent, numbers = family
    assert all(map(is_alive, numbers))
    if victim == "parent":
        parent.kill()
    elif victim == "parent's group":
        os.killpg(parent.pid, signal.SIGKILL)
    elif victim == "command":
        os.kill(numbers[1], signal.SIGKILL)
    else:
        os.kill(numbers[0], signal.SIGTERM)
    wait_for(lambda: not any(map(is_alive, numbers)))
    assert not (tmp_path / "scratch").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for a signal")
def test_without_its_guard_the_command_is_told_to_end(family):
    _, (guard, command, _, _) = family
    os.kill(guard, signal.SIGKILL)
    wait_for(lambda: not is_alive(command))


@pytest.mark.parametrize(
    ("code", "expected"), [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_is_the_commands(code, expected):
    guard = subprocess.Popen(guarded([sys.executable, "-c", code], grace_s=1.0), stdin=subprocess.PIPE)
    assert guard.wait(PATIENCE_S) == expected
