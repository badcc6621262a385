"""Files that others wrote: read whole, but bounded; whatever is wrong with one is said in a line that names it."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spectrain.errors import InputError, SpectrainError

MOST_BYTES = 1 << 27  # of a file that is read whole: the largest tokenizers have a quarter of that


def check_file(path: Path, most_bytes: int = MOST_BYTES) -> None:
    """InputError unless ``path`` is a plain file of at most so many bytes: reading a pipe or a device may never end."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{path} cannot be read: it is no plain file")
    if found.st_size > most_bytes:
        raise InputError(f"{path} has {found.st_size / 1e6:,.0f} MB, where at most {most_bytes / 1e6:,.0f} make sense")


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file that others wrote. InputError as of ``check_file``, and for what is not UTF-8."""
    check_file(path, most_bytes)
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error.reason} at byte {error.start + 1})") from error


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in a file that others wrote. InputError as of ``read_text``, and for anything else."""
    try:
        value = json.loads(read_text(path, most_bytes))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} is not valid JSON ({error.msg} at line {error.lineno}, column {error.colno})"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets nested thousands deep
        raise InputError(f"{path} is not usable JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {_JSON_KINDS.get(type(value), 'a value')} instead of a JSON object")
    return value


_JSON_KINDS: dict[type, str] = {list: "a list", str: "a text", int: "a number", float: "a number", type(None): "null"}


@contextmanager
def understood(what: str, advice: str = "") -> Iterator[None]:
    """Around a library that reads what others wrote: whatever it raises becomes an InputError that names ``what``."""
    try:
        yield
    except (SpectrainError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust code is no Exception
        reason = " ".join(str(error).split())[:300]
        hint = f": {advice}" if advice else ""
        raise InputError(f"{what} cannot be used ({type(error).__name__}: {reason}){hint}") from error
