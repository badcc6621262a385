"""JSON files on which everything else depends, kept twice: where one is damaged, the other is taken, as a line says.

The copy lies beside the file and is written after it, so a kill between the two leaves a copy that is one step older:
whoever takes it finds something missing, and makes that again. A file that is not there at all is not replaced:
somebody wanted it gone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from spectrain.console import say
from spectrain.errors import InputError
from spectrain.files import write_atomically

T = TypeVar("T")
_said: set[Path] = set()


def copy_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.copy{path.suffix}")


def write_twice(path: Path, text: str, what: str) -> None:
    """``write_atomically`` of a file and of its copy. Arguments and errors as there."""
    for place in (path, copy_of(path)):
        write_atomically(place, text, what)


def read_either(path: Path, read: Callable[[Path], T]) -> T:
    """What ``read`` makes of a file, or of its copy where it raises InputError for the file; where it does for both,
    the error of the file.
    """
    try:
        return read(path)
    except InputError as error:
        if not path.exists():
            raise
        try:
            found = read(copy_of(path))
        except (InputError, OSError):
            raise error from None
    if path not in _said:
        _said.add(path)
        say(f"note: {path} is damaged: its copy, {copy_of(path).name}, is used instead")
    return found
