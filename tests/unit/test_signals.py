"""Real signals to a process that has something to keep, wherever its main thread is."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

PATIENCE_S = 30.0
# Tells that it is ready, and what it keeps, through files of the folder that it is given.
BEGIN = """
import os, pathlib, subprocess, sys, threading, time
from spectrain import signals
folder = pathlib.Path(sys.argv[1])
def ready():
    (folder / "ready").touch()
def keep():
    (folder / "kept").write_text("whole")
    return "3 of 7 answers are stored"
signals.install()
"""
WAITS = "ready()\n    threading.Event().wait()"
KEEPS = f"{BEGIN}\nwith signals.keeping(lambda: 'outer'), signals.keeping(keep):\n    "


def start(tmp_path, script, **how):
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **how
    )
    wait_for(tmp_path / "ready")
    return process


def wait_for(path):
    end_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < end_s, f"{path.name} never came"
        time.sleep(0.01)


def end(process, *numbers):
    for number in numbers:
        process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, err


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130), ("SIGUSR1", 138)])
def test_what_is_in_memory_is_kept_and_one_line_says_so(tmp_path, name, code):
    """The main thread waits where it never comes back to Python, as in a long pass of the target."""
    process = start(tmp_path, KEEPS + "ready()\n    lock = threading.Lock(); lock.acquire(); lock.acquire()")
    found, err = end(process, getattr(signal, name))
    assert found == code
    assert err == f"stopped by {name}: 3 of 7 answers are stored\n"
    assert (tmp_path / "kept").read_text() == "whole"


def test_a_change_under_way_is_finished_first(tmp_path):
    """And none begins afterwards."""
    script = (
        KEEPS
        + """values = [0, 0]
    while True:
        with signals.held():
            values[0] += 1
            ready()
            time.sleep(0.05)
            values[1] += 1
            (folder / "values").write_text(repr([*values, time.monotonic_ns()]))
"""
    )
    begins = "def keep():\n    (folder / 'began').write_text(str(time.monotonic_ns()))\n    time.sleep(0.3)"
    process = start(tmp_path, script.replace("def keep():", begins))
    assert end(process, signal.SIGTERM)[0] == 143
    first, second, changed_ns = json.loads((tmp_path / "values").read_text())
    assert first == second
    assert int((tmp_path / "began").read_text()) > changed_ns


def test_errors_of_what_was_ended_are_not_reported(tmp_path):
    """The main thread notices that a child is gone before the process has ended: that is no failure of the run."""
    script = """
from spectrain import cli
def serve(line):
    child = subprocess.Popen(["sleep", "60"])
    signals.at_end(child.kill)
    (folder / "child").write_text(str(child.pid))
    ready()
    child.wait()
    raise cli.SpectrainError("the child is gone")
cli._dispatch = serve
slow = lambda: time.sleep(0.5) or ""
sys.argv = ["spectrain", "fit"]
with signals.keeping(slow):
    sys.exit(cli.main())
"""
    process = start(tmp_path, BEGIN.replace("signals.install()\n", "") + script)
    code, err = end(process, signal.SIGTERM)
    assert (code, err.count("\n")) == (143, 1), err
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "child").read_text()), 0)


def test_a_failure_to_keep_is_said(tmp_path):
    script = KEEPS.replace("signals.keeping(keep)", "signals.keeping(lambda: 1 / 0)") + WAITS
    code, err = end(start(tmp_path, script), signal.SIGTERM)
    assert code == 143
    assert "lost (division by zero)" in err


def test_another_signal_does_not_wait_for_what_takes_long(tmp_path):
    script = KEEPS.replace("(keep)", "(lambda: [ready2(), time.sleep(3600)])").replace(
        "signals.install()", "signals.install()\ndef ready2(): (folder / 'keeping').touch()"
    )
    process = start(tmp_path, script + WAITS)
    process.send_signal(signal.SIGHUP)
    wait_for(tmp_path / "keeping")
    while process.poll() is None:  # closed terminals send two within an instant: only a later one counts
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    code, err = end(process)
    assert code == 129
    assert "SIGTERM again" in err


def test_a_process_that_was_started_is_ended(tmp_path):
    script = BEGIN + (
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "signals.at_end(lambda: (child.kill(), child.wait()))\n"
        "forgotten = signals.at_end(lambda: (folder / 'called').touch())\nforgotten(); forgotten()\n"
        "(folder / 'child').write_text(str(child.pid))\nready()\ntime.sleep(60)"
    )
    assert end(start(tmp_path, script), signal.SIGINT)[0] == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "child").read_text()), 0)
    assert not (tmp_path / "called").exists()


def test_an_ignored_signal_stays_ignored(tmp_path):
    """As under nohup."""
    process = start(tmp_path, KEEPS + WAITS, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    assert end(process, signal.SIGTERM)[0] == 143


def test_without_a_terminal_that_reads_it_ends_all_the_same(tmp_path):
    process = start(tmp_path, KEEPS + WAITS)
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(PATIENCE_S) == 129
    assert (tmp_path / "kept").exists()


# A leader that keeps what it has once its follower has worked on meanwhile.
LEADS = (
    KEEPS.replace("signals.keeping(keep)", "signals.keeping(keep_late)").replace(
        "signals.install()",
        """def keep_late():
    (folder / "keeps").touch()
    end_s = time.monotonic() + 10
    while not (folder.parent / "follower/works").exists() and time.monotonic() < end_s:
        time.sleep(0.01)
    return keep()
signals.install()""",
    )
    + WAITS
)
FOLLOWS = (
    BEGIN
    + """
from dataclasses import replace
leader = signals.ProcessId.of_this()
from spectrain.processes import _state_and_start
pid = int(sys.argv[2])
signals.follow(replace(leader, pid=pid, started=_state_and_start(pid)[1]))
with signals.keeping(lambda: (folder / "mine").touch() or "mine"):
    ready()
    while True:
        with signals.held():
            if (folder.parent / "leader/keeps").exists():
                (folder / "works").touch()
        time.sleep(0.01)
"""
)


def start_follower(folder, leader):
    process = subprocess.Popen(
        [sys.executable, "-c", FOLLOWS, str(folder), str(leader.pid)], stderr=subprocess.PIPE, text=True
    )
    wait_for(folder / "ready")
    return process


@pytest.mark.parametrize("also_the_leader", [False, True])
def test_a_follower_has_its_leader_keep_and_ends_after_it(tmp_path, also_the_leader):
    """Whoever of the two got the signal: one line, the leader's, and one code."""
    folders = [tmp_path / "leader", tmp_path / "follower"]
    for folder in folders:
        folder.mkdir()
    leader = start(folders[0], LEADS)
    follower = start_follower(folders[1], leader)
    follower.send_signal(signal.SIGUSR1)
    if also_the_leader:
        leader.send_signal(signal.SIGUSR1)
    _, said = leader.communicate(timeout=PATIENCE_S)
    _, silence = follower.communicate(timeout=PATIENCE_S)
    assert (leader.returncode, said) == (138, "stopped by SIGUSR1: 3 of 7 answers are stored\n")
    assert (follower.returncode, silence) == (138, "")
    assert (folders[1] / "works").exists() and not (folders[1] / "mine").exists()


# Does at "meeting points" what several processes do that work together: those who were asked say so in a file.
MEETS = (
    BEGIN
    + """
if len(sys.argv) > 2:
    from dataclasses import replace
    from spectrain.processes import _state_and_start
    pid = int(sys.argv[2])
    signals.follow(replace(signals.ProcessId.of_this(), pid=pid, started=_state_and_start(pid)[1]))
heard = folder.parent / "heard"
with signals.keeping(keep):
    with signals.together(PATIENCE):
        ready()
        while not heard.exists():
            if signals.asked() and (folder.parent / "listens").exists():
                (folder / "heard").write_text(str(signals.asked()))
                (folder / "heard").rename(heard)
            time.sleep(0.01)
        (folder / "brought").touch()
        while len(list(folder.parent.glob("*/brought"))) < 2:  # as in a collective: nobody is through alone
            time.sleep(0.01)
        signals.end_together(int(heard.read_text()))
"""
)


def start_together(tmp_path, patience="60"):
    """(leader, follower)"""
    folders = [tmp_path / "leader", tmp_path / "follower"]
    for folder in folders:
        folder.mkdir()
    script = MEETS.replace("PATIENCE", patience)
    leader = start(folders[0], script)
    follower = subprocess.Popen(
        [sys.executable, "-c", script, str(folders[1]), str(leader.pid)], stderr=subprocess.PIPE, text=True
    )
    wait_for(folders[1] / "ready")
    return leader, follower


@pytest.mark.parametrize("whom", ["leader", "follower", "both"])
def test_those_who_work_together_end_where_they_meet_whoever_was_asked(tmp_path, whom):
    """Not before; each brings what it has; the leader keeps it, says so, and ends first."""
    leader, follower = start_together(tmp_path)
    for name, process in (("leader", leader), ("follower", follower)):
        if whom in (name, "both"):
            process.send_signal(signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        leader.wait(timeout=0.5)
    (tmp_path / "listens").touch()
    _, said = leader.communicate(timeout=PATIENCE_S)
    _, silence = follower.communicate(timeout=PATIENCE_S)
    assert (leader.returncode, said) == (138, "stopped by SIGUSR1: 3 of 7 answers are stored\n")
    assert (follower.returncode, silence) == (138, "")
    assert [(tmp_path / name / "brought").exists() for name in ("leader", "follower")] == [True, True]
    assert [(tmp_path / name / "kept").exists() for name in ("leader", "follower")] == [True, False]


def test_a_leader_whom_nobody_meets_keeps_what_it_has_by_itself(tmp_path):
    """And a follower's wish reaches it in the end."""
    leader, follower = start_together(tmp_path, patience="0.3")
    follower.send_signal(signal.SIGTERM)
    _, said = leader.communicate(timeout=PATIENCE_S)
    follower.communicate(timeout=PATIENCE_S)
    assert (leader.returncode, follower.returncode) == (143, 143)
    assert said.endswith("stopped by SIGTERM: 3 of 7 answers are stored\n")
    assert not (tmp_path / "leader/brought").exists()


def test_a_signal_that_nobody_heard_acts_when_they_part(tmp_path):
    script = (
        KEEPS
        + """with signals.together(60):
        ready()
        while not signals.asked():
            time.sleep(0.01)
    with signals.held():
        (folder / "went on").touch()
"""
    )
    assert end(start(tmp_path, script), signal.SIGTERM) == (143, "stopped by SIGTERM: 3 of 7 answers are stored\n")
    assert not (tmp_path / "went on").exists()


def test_a_process_is_known_from_another_that_got_its_number(tmp_path):
    from dataclasses import replace

    from spectrain.processes import ProcessId

    this = ProcessId.of_this()
    assert this.is_running() and this.is_here
    assert replace(this, started="1").is_running() is False
    assert replace(this, boot="another").is_running() is False  # the machine was started anew
    assert replace(this, host="elsewhere", boot="b").is_running() is None
    assert replace(this, namespace="pid:[1]").is_running() is None  # another container
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert replace(this, pid=child.pid, started="1").is_running() is False
    child.wait()
