"""Runs one command and sees to it that nothing of it outlives whoever started it: ``python -m
spectrain.engines.vllm.guard -- command``.

A vLLM server is several processes, and they do not notice that the one who wanted them is gone. So a guard sits in
between: it holds the reading end of a pipe (its stdin) whose only writing end is its parent's. When the pipe closes,
because the parent says so or because it was killed, the guard ends the command with everything that the command
started. It does the same when the command's first process ends by itself, and in a hurry when it is sent SIGTERM: who
sends it waits for the end.

The command gets a process group of its own, and orphans of it fall to the guard (as "subreaper"), whatever group they
moved to. The guard is a session of its own, so that neither Ctrl-C nor a signal to the parent's group reaches it before
it has cleaned up; should the guard itself be killed, the kernel tells the command to end.

Standard library only: it has to start at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from spectrain.signals import CHILD_SUBREAPER, end_with_parent, set_process

_POLL_S = 0.1
_HURRY_S = 0.8  # to end by itself, after SIGTERM


def guarded(command: list[str], grace_s: float, scratch: Path | None = None) -> list[str]:
    """The command line of a guard over ``command``. ``grace_s``: how long it may take to end; ``scratch``: a folder to
    remove then.
    """
    options = ["--grace", str(grace_s), *(["--scratch", str(scratch)] if scratch else [])]
    # -P: a file of the working directory must not hide a package.
    return [sys.executable, "-P", "-m", "spectrain.engines.vllm.guard", *options, "--", *command]


def main() -> int:
    """Exit code: the command's, or 128 and the signal that ended it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    set_process(CHILD_SUBREAPER, 1)  # elsewhere than on Linux the pipe alone must do
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    for ignored in (signal.SIGINT, signal.SIGUSR1):  # of a group, or of a whole Slurm step: they are for the parent
        signal.signal(ignored, signal.SIG_IGN)
    try:
        return _watch(options.command[1:], options.grace, told)
    finally:
        if options.scratch is not None:
            shutil.rmtree(options.scratch, ignore_errors=True)


def _watch(command: list[str], grace_s: float, told: list[int]) -> int:
    # SIGTERM, not SIGKILL: without the guard, the command itself is the last that can end its own children.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=end_with_parent)
    try:
        while child.poll() is None and not told and not _closed():
            pass
        _signal_group(child.pid, signal.SIGTERM)
        start_s = time.monotonic()
        while child.poll() is None and time.monotonic() - start_s < (min(grace_s, _HURRY_S) if told else grace_s):
            time.sleep(_POLL_S)
    finally:
        _signal_group(child.pid, signal.SIGKILL)
    code = child.wait()
    _end_orphans()
    return 128 - code if code < 0 else code


def _closed() -> bool:
    """Whether stdin has ended; waits a moment for it."""
    readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1024)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _end_orphans() -> None:
    """Kill and reap what the command left behind. Where /proc does not list children, those of its group are dead
    already.
    """
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    end_s = time.monotonic() + 10.0  # a process that waits for a device may not die at all
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            for pid in children.read_text().split():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(pid), signal.SIGKILL)
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if reaped == 0:
            time.sleep(_POLL_S / 10)


if __name__ == "__main__":
    sys.exit(main())
