"""What a log says about why a process ended, for messages to the user."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

from spectrain.errors import RunError

_TAIL_BYTES = 64 * 1024
_LINES = 6
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# vLLM puts "(EngineCore pid=123) ERROR 11-29 18:00:33 [core.py:1086] " before each line, "INFO" before what is no
# error.
_PREFIX = re.compile(r"^(\([\w .:=-]*pid=\d+\)\s*)?([A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d(\.\d+)? \[[^\]]*\]\s?)?")
_ERROR = re.compile(
    r"^[\w.]*(Error|Exception|Exit|Interrupt)\b(:|$)|^.{0,40}\berror:"
    r"|Killed|terminate called|Segmentation fault|out of memory"
)


def open_log(log: Path) -> BinaryIO:
    """``log``, to be written at its end; the folder is made. Raises RunError if that cannot be.

    Its owner alone may read it: what another program writes there may hold secrets.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.fchmod(descriptor, 0o600)  # one that was there already, too
        return os.fdopen(descriptor, "ab")
    except OSError as error:
        raise RunError(
            f"the log {log} cannot be written ({error.strerror}): see to its folder, or use another run.dir"
        ) from error


def last_errors(log: Path, start: int = 0, lines: int = _LINES) -> str:
    """The last lines of ``log`` that name an error, in order, each once; the very last lines if none does; with the
    log's name.

    start: where to begin, in bytes: what is before was written by an earlier process. Raises nothing: a log that
    cannot be read is said to be so.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        return f"its log {log} cannot be read ({error})"
    written = [_bare(line) for line in text.splitlines()]
    shown: dict[str, None] = {}
    for number, line in enumerate(written):
        if _ERROR.search(line):
            said = "; ".join([line.strip(), *_continuation(line, written[number + 1 : number + 3])])
            shown.pop(said, None)  # the last mention counts
            shown[said] = None
    quoted = list(shown)[-lines:] or [line.strip() for line in written if line.strip()][-lines:]
    if not quoted:
        return f"its log {log} is empty"
    return f"the last lines of {log}:\n" + "\n".join(f"  {line[:400]}" for line in quoted)


def _continuation(error: str, lines: list[str]) -> list[str]:
    """What an error says in further, indented lines (a validation error names the value there)."""
    said = []
    if (
        lines and "validation error" in error and re.fullmatch(r"\w[\w.]*", lines[0])
    ):  # the field that a validation error is about
        said.append(lines[0])
        lines = lines[1:]
    for line in lines:
        if not line.startswith("  ") or line.lstrip().startswith("File "):
            break
        said.append(line.strip())
    return said


def _bare(line: str) -> str:
    """The line without colours and without vLLM's prefix."""
    return _PREFIX.sub("", _COLOURS.sub("", line))
