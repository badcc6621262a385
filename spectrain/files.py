"""What goes into files: atomic writes, so that a reader, or a process that starts after a kill, sees the old content or
the new one, never a mixture; plain values; digests.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to be written, by its name, in place of ``path``: it takes that place in one step when the block ends.

    After a crash ``path`` is the old file or the new one, whole and on disk; a kill in between leaves
    ``.NAME.partial`` beside it.
    """
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
