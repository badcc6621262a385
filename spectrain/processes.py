"""Which process somebody is, so that another one, now or later, here or on another machine, can tell whether it still
runs; and which cores it may use.

A number alone does not tell: it is used again, and on another machine, or in another container, it is somebody else's.
So the time at which the process started, the machine's boot and the namespace of its numbers belong to it. Standard
library only.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """One process. Fields that this system does not tell are empty."""

    host: str
    boot: str  # of the machine: another one after each start of it
    namespace: str  # in which ``pid`` counts: a container has its own
    pid: int
    started: str  # clock ticks after the boot

    @classmethod
    def of_this(cls) -> ProcessId:
        namespace = ""
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        pid = os.getpid()
        return cls(socket.gethostname(), _boot(), namespace, pid, _state_and_start(pid)[1])

    @property
    def is_here(self) -> bool:
        """Whether this process sees its number: the same machine, since the same boot, in the same container."""
        this = ProcessId.of_this()
        return (self.host, self.boot, self.namespace) == (this.host, this.boot, this.namespace)

    def is_running(self) -> bool | None:
        """None: it cannot be told from here."""
        this = ProcessId.of_this()
        if self.host == this.host and self.boot != this.boot:
            return False  # the machine was started anew since
        if not self.is_here:
            return None
        state, started = _state_and_start(self.pid)
        if started:
            return started == self.started and state not in ("Z", "X")
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # somebody else's
            pass
        return not self.started  # where /proc tells starts, it would have told this one's

    def __str__(self) -> str:
        return f"process {self.pid}" if self.host == socket.gethostname() else f"process {self.pid} on {self.host}"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, str]:
    """Of /proc/PID/stat; empty where there is none. The name of the program, in brackets, may hold anything."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def available_cores() -> list[int]:
    """The cores this process may run on: containers and schedulers give fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
