"""What goes into files: atomic writes, so that a reader, or a process that starts after a kill, sees the old content or
the new one, never a mixture; plain values; digests. And what comes out of files that others wrote: bounded reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spectrain.errors import InputError, RunError, SpectrainError

MOST_BYTES = 1 << 27  # of a file that is read whole: the largest tokenizers have a quarter of that


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to be written, by its name, in place of ``path``: it takes that place in one step when the block ends.

    After a crash ``path`` is the old file or the new one, whole and on disk; a kill in between leaves
    ``.NAME.partial`` beside it.
    """
    check_guarded(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    partial.touch()
    mode = partial.stat().st_mode
    try:
        yield partial
        partial.chmod(mode)  # safetensors makes files that only their owner may read, whatever the umask
        sync(partial)
    except Exception:
        partial.unlink(missing_ok=True)  # the disk may be full
        raise
    os.replace(partial, path)
    with suppress(OSError):  # not every file system lets a folder be synchronised
        sync(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` in one step; after a crash it holds the old text or the new one."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def remove_partials(folder: Path) -> None:
    """Remove the files of ``folder`` that killed processes were writing."""
    for name in (".*.partial", ".tmp*"):  # safetensors, too, writes under another name first
        for partial in folder.glob(name):
            partial.unlink(missing_ok=True)


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make ``folder`` hold what ``fill(path)`` writes into an empty folder.

    There is no portable way to exchange two folders in one step, so the old one is moved aside first: after a kill
    between the two renames ``recover_folder`` puts it back.
    """
    check_guarded(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = _aside(folder, "new"), _aside(folder, "old")
    recover_folder(folder)
    fresh.mkdir()
    fill(fresh)
    mode = (
        fresh.stat().st_mode & 0o666
    )  # a writer that makes files private (safetensors) must not decide who may read a drafter
    for path in fresh.iterdir():
        path.chmod(mode)
        sync(path)
    sync(fresh)
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Undo what a kill during ``replace_folder`` left: put the old folder back if the new one did not arrive, and
    remove leftovers.
    """
    fresh, old = _aside(folder, "new"), _aside(folder, "old")
    if old.exists() and not folder.exists():
        os.replace(old, folder)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(fresh, ignore_errors=True)


def _aside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


_GUARDED: dict[Path, int] = {}  # folder -> its inode


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Inside, nothing is written into a folder that takes the place of this one: who removes or renames a folder that
    is being worked in does not get half of it back under its old name. RunError says so.
    """
    folder = folder.absolute()
    _GUARDED[folder] = folder.stat().st_ino
    try:
        yield
    except OSError as error:
        check_guarded(folder / "any")
        raise error
    finally:
        del _GUARDED[folder]


def check_guarded(path: Path) -> None:
    """RunError if ``path`` would lie in a folder that was removed or renamed since it is guarded."""
    for folder, inode in _GUARDED.items():
        if folder in path.absolute().parents and not (folder.exists() and folder.stat().st_ino == inode):
            raise RunError(
                f"{folder} was removed or renamed while it was worked in: put it back, and the same command continues"
            )


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain(value: Any) -> Any:
    """``value`` in what JSON and YAML have, at any depth: mappings as dicts, sequences as lists, NaN and infinity as
    null.
    """
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return finite_or_none(value) if isinstance(value, float) else value


def finite_or_none(value: float) -> float | None:
    """A figure for a file: ``None`` where there is none (NaN: nothing was counted)."""
    return value if math.isfinite(value) else None


def digest_strings(values: object) -> str:
    """Short sha256 of any JSON value, for inputs too long to be kept whole."""
    return hashlib.sha256(json.dumps(values, ensure_ascii=False).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- what others wrote ---------------------------------------------------------------------------------------------


def check_file(path: Path, most_bytes: int = MOST_BYTES) -> None:
    """InputError unless ``path`` is a plain file of at most so many bytes: reading a pipe or a device may never end."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{path} is no plain file")
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
        raise InputError(f"{path} is not JSON ({error.msg} at line {error.lineno}, column {error.colno})") from error
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
