"""The program that runs code which a model wrote, in a process of its own: started by ``code_execution.py``, imports
nothing of this package.

Limits of the operating system come first (CPU seconds, memory, size of files, no core dumps), then a network of its
own with nothing in it where the kernel lets an ordinary user have one, then an audit hook that refuses, for good, what
no task of a benchmark needs: other processes, sockets, native code, and files outside the working directory. That
keeps mistakes in; it is no wall against somebody who wants out.

Reads JSON from standard input: program, word, cpu_s, memory_bytes. Prints ``word`` where the program has ended in
order, and nothing otherwise: a program that ends this process early says nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from contextlib import suppress
from typing import Any

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_FILE_BYTES = 1 << 20
_OPEN_FILES = 64
_FORBIDDEN = (
    *(
        "socket.",
        "subprocess.",
        "os.system",
        "os.exec",
        "os.fork",
        "os.posix_spawn",
        "os.spawn",
        "os.startfile",
        "os.kill",
    ),
    *("pty.", "ctypes.", "_winapi.", "signal.pthread_kill", "resource.", "sys.remote_exec"),
)
# The arguments of these events that are paths.
_PATHS = {
    **dict.fromkeys(
        ("os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.truncate", "os.chdir", "os.utime"), 1
    ),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink", "shutil.move", "shutil.copyfile", "shutil.copytree"), 2),
    "shutil.rmtree": 1,
}


def _limit(cpu_s: int, memory_bytes: int) -> None:
    for name, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (most, most))
    with suppress(OSError, AttributeError):  # not Linux: the hook alone
        ctypes.CDLL(None).unshare(_CLONE_NEWUSER | _CLONE_NEWNET)


def _guard(folder: str) -> None:
    inside = os.path.realpath(folder)

    def is_inside(path: Any) -> bool:
        if isinstance(path, int):
            return True  # a descriptor that is open already
        full = os.path.realpath(os.fsdecode(path))
        return full == inside or full.startswith(inside + os.sep)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_FORBIDDEN):
            raise PermissionError(event)
        if event == "open" and arguments[0] is not None:
            path, mode, flags = arguments
            writes = set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and not is_inside(path):
                raise PermissionError(f"open {path}")
        for path in arguments[: _PATHS.get(event, 0)]:
            if not is_inside(path):
                raise PermissionError(f"{event} {path}")

    sys.addaudithook(refuse)


def main() -> None:
    asked = json.load(sys.stdin)
    said = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    _limit(asked["cpu_s"], asked["memory_bytes"])
    code = compile(asked["program"], "answer.py", "exec", dont_inherit=True)
    word = asked.pop("word").encode()
    _guard(os.getcwd())
    exec(code, {"__name__": "answer"})
    os.write(said, word)


if __name__ == "__main__":
    main()
