"""What goes into files: atomic writes, so that a reader, or a process that starts after a kill, sees the old content or
the new one, never a mixture; removals that a kill cannot cut in half; digests, so that content that changed is found
when it is read; plain values.

A write that fails (a full disk, a quota, a folder that is gone) raises ``RunError``, which names the disk, what was
being written and how much room it needs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from spectrain.errors import InputError, RunError
from spectrain.masking import MaskedText

_FULL = {errno.ENOSPC: "is full", errno.EDQUOT: "gives this user no more room (its quota is used up)"}
_SETTLED_NS = 2_000_000_000
DIGEST = "digest"  # the field of a JSON file that holds the digest of all others


# --- writing -------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path, what: str = "", size_bytes: int | None = None, private: bool = False) -> Iterator[Path]:
    """A file to be written, by its name, in place of ``path``: it takes that place in one step when the block ends.

    After a crash ``path`` is the old file or the new one, whole and on disk; a kill in between leaves
    ``.NAME.partial`` beside it.

    Args:
        what: is written, for the user; empty: the name says it. size_bytes: that it takes, where that is known.
        private: its owner alone may read it.

    Raises RunError if it cannot be written.
    """
    check_guarded(path)
    partial = path.with_name(f".{path.name}.partial")
    with writing(path, what, size_bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        partial.touch(0o600 if private else 0o666)
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


def write_atomically(path: Path, text: str, what: str = "", private: bool = False) -> None:
    """Replace ``path`` in one step; after a crash it holds the old text or the new one. ``what``, ``private``: as in
    ``replacing``, errors, too.
    """
    with replacing(path, what, len(text.encode()), private) as partial:
        partial.write_text(text, encoding="utf-8")


def append_line(path: Path, line: str) -> None:
    """Add a line to a text file. A last line that a kill or a full disk cut short is ended first, so that it spoils no
    other; its reader passes over it.
    """
    with writing(path, size_bytes=len(line) + 1), path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())


def remove_partials(folder: Path) -> None:
    """Remove the files of ``folder`` that killed processes were writing."""
    for name in (".*.partial", ".tmp*"):  # safetensors, too, writes under another name first
        for partial in folder.glob(name):
            partial.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, what: str = "", size_bytes: int | None = None) -> Iterator[None]:
    """Around the writing of ``path``: says in one ``RunError`` why the system did not let it be written. Arguments as
    in ``replacing``.
    """
    try:
        yield
    except Exception as error:
        number = _system_error(error)
        if number is None:
            raise
        raise RunError(_why_not_written(path, what or path.name, number, size_bytes)) from error


def _system_error(error: BaseException) -> int | None:
    """The operating system's number of an error, also where a library tells it in words alone (safetensors)."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    told = re.search(r"os error (\d+)", str(error))
    return int(told[1]) if told else None


def _why_not_written(path: Path, what: str, number: int, size_bytes: int | None) -> str:
    folder = path.parent.absolute()
    if number not in _FULL:
        return f"{what} could not be written to {folder} ({os.strerror(number)}): the same command goes on from here"
    needed = "" if size_bytes is None else f"{bytes_text(size_bytes)} needed, "
    return (
        f"{what} could not be written to {folder}: the disk mounted on {mount_point(folder)} {_FULL[number]} "
        f"({needed}{bytes_text(free_bytes(folder))} free): make room, then the same command goes on from here"
    )


def full_disk(error: BaseException) -> str | None:
    """What to tell the user of an error that no one expected there, if a full disk is behind it."""
    number, path = _system_error(error), getattr(error, "filename", None)
    if number not in _FULL:
        return None
    if path is None:  # the library does not say
        return f"a disk {_FULL[number]} ({error}): make room, then the same command goes on from here"
    return _why_not_written(Path(os.fsdecode(path)), Path(os.fsdecode(path)).name, number, None)


def existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there."""
    path = path.absolute()
    while not os.path.exists(path):  # unlike Path.exists, False for names that no file can have
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Room on the disk that ``path`` is, or will be, on."""
    return shutil.disk_usage(existing(path)).free


def mount_point(path: Path) -> Path:
    """The folder that the disk of ``path`` is mounted on."""
    path = existing(path).resolve()
    while not os.path.ismount(path):
        path = path.parent
    return path


def bytes_text(size: float) -> str:
    """A number of bytes for the user, in a unit that fits: 512 bytes, 1.3 kB, 24 MB, 1.5 TB."""
    if abs(size) < 1000:
        return f"{size:.0f} bytes"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        size /= 1000
        if abs(size) < 999.5 or unit == "PB":
            break
    return f"{size:,.1f} {unit}" if abs(size) < 9.95 else f"{size:,.0f} {unit}"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, none if it is not there. Lines that a kill or a full disk cut short are passed
    over.
    """
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [entry for entry in found if isinstance(entry, dict)]


# --- folders -------------------------------------------------------------------------------------------------------


def replace_folder(folder: Path, fill: Callable[[Path], None], what: str = "", size_bytes: int | None = None) -> None:
    """Make ``folder`` hold what ``fill(path)`` writes into an empty folder. Other arguments and errors as in
    ``replacing``.

    There is no portable way to exchange two folders in one step, so the old one is moved aside first: after a kill
    between the two renames ``recover_folder`` puts it back.
    """
    check_guarded(folder)
    fresh, old = _aside(folder, "new"), _aside(folder, "old")
    with writing(folder, what, size_bytes):
        folder.parent.mkdir(parents=True, exist_ok=True)
        recover_folder(folder)
        try:
            fresh.mkdir()
            fill(fresh)
            mode = (
                fresh.stat().st_mode & 0o666
            )  # a writer that makes files private (safetensors) must not decide who may read a drafter
            for path in fresh.rglob("*"):
                if path.is_symlink():
                    continue  # somebody else's file
                if path.is_file():  # a folder that loses its x bits cannot be entered
                    path.chmod(mode)
                sync(path)
            sync(fresh)
        except Exception:
            shutil.rmtree(fresh, ignore_errors=True)  # the disk may be full
            raise
        if folder.exists():
            os.replace(folder, old)
        os.replace(fresh, folder)
        sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Undo what a kill during ``replace_folder`` left: put the old folder back if the new one did not arrive, and
    remove leftovers; those of ``remove``, too.
    """
    fresh, old = _aside(folder, "new"), _aside(folder, "old")
    if old.exists() and not folder.exists():
        os.replace(old, folder)
    for leftover in (old, fresh, _aside(folder, "removed")):
        shutil.rmtree(leftover, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there. A folder is renamed first: nobody ever sees half of one. What a kill
    leaves, ``.NAME.removed``, the next ``remove`` or ``recover_folder`` of that name takes away.
    """
    aside = _aside(path, "removed")
    shutil.rmtree(aside, ignore_errors=True)
    if path.is_dir() and not path.is_symlink():
        os.replace(path, aside)
        with suppress(OSError):
            sync(path.parent)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _aside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


_GUARDED: dict[Path, tuple[int, Callable[[], bool]]] = {}  # folder -> its inode, and whether it is still ours


@contextmanager
def guarded(folder: Path, still_ours: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Inside, nothing is written into a folder that takes the place of this one: who removes or renames a folder that
    is being worked in does not get half of it back under its old name. RunError says so; also once ``still_ours`` says
    no, as somebody else works there.
    """
    folder = folder.absolute()
    _GUARDED[folder] = folder.stat().st_ino, still_ours
    try:
        yield
    except OSError as error:
        check_guarded(folder / "any")
        raise error
    finally:
        del _GUARDED[folder]


def check_guarded(path: Path) -> None:
    """RunError if ``path`` would lie in a folder that was removed, renamed or taken over since it is guarded."""
    for folder, (inode, still_ours) in _GUARDED.items():
        if folder not in path.absolute().parents:
            continue
        if not (folder.exists() and folder.stat().st_ino == inode):
            raise RunError(
                f"{folder} was removed or renamed while it was worked in: put it back, and the same command continues"
            )
        if not still_ours():
            raise RunError(
                f"{folder} was taken over by another process, which found this one silent: let that one end, and the "
                f"same command continues"
            )


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- digests -------------------------------------------------------------------------------------------------------


class FileState(NamedTuple):
    """By which a file that was changed is known without reading it. ``changed_ns`` no program can set back."""

    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether the last change was so long ago that another one would show: clocks of file systems are coarse."""
        return time.time_ns() - max(self.modified_ns, self.changed_ns) > _SETTLED_NS


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes. Costs one reading, about a second a GB; in one process a file that has not changed
    since is not read again.
    """
    state = FileState.of(path)
    return _known_digest(path.absolute(), state) if state.settled else _read_digest(path)


@lru_cache(maxsize=1 << 16)
def _known_digest(path: Path, _: FileState) -> str:
    return _read_digest(path)


def _read_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_strings(values: object) -> str:
    """Short sha256 of any JSON value, for inputs too long to be kept whole."""
    return hashlib.sha256(json.dumps(values, ensure_ascii=False).encode()).hexdigest()[:16]


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with the digest of all its fields in one more, ``digest``, for ``check_digest`` when it is read."""
    return {**content, DIGEST: digest_strings(json.loads(json.dumps(without_digest(content), sort_keys=True)))}


def without_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != DIGEST}


def check_digest(content: Mapping[str, Any], path: Path, advice: str) -> None:
    """Raise InputError where the object read from ``path`` is not what ``with_digest`` made: a damaged disk, or an
    editor. One without a digest was written by an earlier version and passes.
    """
    if DIGEST in content and with_digest(content)[DIGEST] != content[DIGEST]:
        raise InputError(
            f"{path} has changed since it was written, its digest differs: {advice} (if the change is yours, remove "
            f"its field {DIGEST})"
        )


# --- values --------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """``value`` in what JSON and YAML have, at any depth: mappings as dicts, sequences as lists, NaN and infinity as
    null, masked text as what it shows.
    """
    return _plain(value, lambda text: text.shown)


def comparable(value: Any) -> Any:
    """As ``plain``, for what is stored to tell later whether it changed: masked text as what is compared of it."""
    return _plain(value, lambda text: text.compared)


def _plain(value: Any, unmasked: Callable[[MaskedText], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry, unmasked) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, unmasked) for entry in value]
    if isinstance(value, MaskedText):
        return unmasked(value)
    return finite_or_none(value) if isinstance(value, float) else value


def finite_or_none(value: float) -> float | None:
    """A figure for a file: ``None`` where there is none (NaN: nothing was counted)."""
    return value if math.isfinite(value) else None
