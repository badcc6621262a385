"""SIGKILL at a chosen moment: before the k-th of the operations that make work durable (flushes, renames, removals).

So every state that a kill can leave on disk is met, however fast the machine is. Children are forked from a server that
has imported everything, because imports take longer than the work.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

DURABLE = ("fsync", "replace", "rename", "unlink", "rmdir")


def die_before(number: int) -> None:
    """This process dies before its ``number``-th durable operation from now on; 0: never."""
    count = 0

    def counting(operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return wrapped

    for name in DURABLE:
        setattr(os, name, counting(getattr(os, name)))
