"""What a check of ``doctor`` found: a line with a name, a level and, where something is to be done, what.

Stands alone because the checks of the machine, of attention and of a run directory all make such lines.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Finding:
    """``text``: what was found; ``remedy``: what to do, empty where nothing is."""

    name: str
    level: Level
    text: str
    remedy: str = ""


Check = Callable[[], Iterator[Finding]]


def found_by(name: str, check: Check) -> list[Finding]:
    """The findings of a check; one that breaks down is a failure of its own, and no reason not to make the others."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except Exception as error:  # whatever a library that is half installed raises
        reason = " ".join(str(error).split())[:200]
        findings.append(Finding(name, "failure", f"the check itself fails: {type(error).__name__}: {reason}"))
    return findings


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The call's result; raises what it raises, or TimeoutError. A name server that never answers ends no client."""
    answers: queue.Queue[tuple[bool, Any]] = queue.Queue()

    def ask() -> None:
        try:
            answers.put((True, call()))
        except BaseException as error:
            answers.put((False, error))

    threading.Thread(target=ask, daemon=True).start()
    try:
        good, answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if not good:
        raise answer
    return answer
