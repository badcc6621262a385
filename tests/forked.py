"""Commands in children that are forked from a server which has imported everything: imports take longer than the work.

A child may be killed before a chosen durable operation (``kills.py``), or be made to meet something by ``before``.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
from kills import die_before

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["spectrain.stages.run", "spectrain.cli", "spectrain.config.loading", "spectrain.drafters.build"]
)


def _child(arguments: Sequence[str], error: str, kill_at: int, before: Callable[[], None] | None) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if before is not None:
        before()
    import spectrain.stages.generate

    spectrain.stages.generate._PART_RESPONSES = 3  # many small parts
    die_before(kill_at)
    from spectrain.cli import main

    sys.argv = ["spectrain", *arguments]
    sys.exit(main())


def start(
    arguments: Sequence[str],
    error: str | Path = os.devnull,
    kill_at: int = 0,
    before: Callable[[], None] | None = None,
) -> ForkServerProcess:
    """A command at work. ``error``: where its standard error goes; ``before``: called in the child, can be pickled."""
    process = SERVER.Process(target=_child, args=(list(arguments), str(error), kill_at, before))
    process.start()
    return process


def ended(process: ForkServerProcess) -> int:
    """The exit code; minus the number of the signal that ended it."""
    process.join(300)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode is not None
    return process.exitcode


def run(arguments: Sequence[str], error: str | Path = os.devnull, kill_at: int = 0, **how: Callable[[], None]) -> int:
    return ended(start(arguments, error, kill_at, **how))


def killed(arguments: Sequence[str], kill_at: int) -> bool:
    """Whether the command was killed before its ``kill_at``-th durable operation; else it has ended well."""
    code = run(arguments, kill_at=kill_at)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def digests(folder: Path, *patterns: str) -> dict[str, str]:
    """Of the files of a folder, by their names in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for pattern in patterns or ("**/*",)
        for path in folder.glob(pattern)
        if path.is_file()
    }
