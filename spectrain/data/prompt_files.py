"""Prompt files: which of them a name means, and the records in one, whatever it is packed as.

A name is a file, a folder of prompt files, or a pattern such as ``data/*.jsonl``. A file holds JSON lines, a JSON array
or Parquet rows, and may be compressed; what it is its first bytes say, not its name. Anything else is named for what it
is.
"""

from __future__ import annotations

import bz2
import difflib
import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from spectrain.errors import InputError
from spectrain.reading import check_file

_MOST_BYTES = 1 << 40
_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")
_PACKED = (".gz", ".bz2", ".xz")

# First bytes -> how such a file is unpacked.
_UNPACK: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ\x00": lzma.decompress,
}
_PARQUET = b"PAR1"
# First bytes of what is not read -> what it is, and what to do.
_FOREIGN = {
    b"PK\x03\x04": "a zip archive: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it, or use gzip",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it",
    b"ARROW1": "an Arrow file: save it as Parquet or JSON lines",
    b"\xff\xff\xff\xff": "an Arrow stream: save it as Parquet or JSON lines",
    b"\xff\xfe": "UTF-16 text: save it as UTF-8",
    b"\xfe\xff": "UTF-16 text: save it as UTF-8",
    b"SQLite format 3": "an SQLite database: export JSON lines",
    b"\x80\x04\x95": "a Python pickle, which is never read: save it as JSON lines",
    b"version https://git-lfs": "a Git LFS pointer, not the data: run git lfs pull",
    b"<!DOCTYPE": "an HTML page, perhaps of a failed download: fetch the file itself",
    b"<html": "an HTML page, perhaps of a failed download: fetch the file itself",
}


class BrokenRecordError(Exception):
    """What is wrong with a record; the reader of the file adds where."""


# --- names ---------------------------------------------------------------------------------------------------------


def find_prompt_file(name: str, roots: Sequence[Path], asked_by: str) -> Path:
    """The file that ``name`` means: as it is, seen from the working directory, then in ``roots``; ".jsonl" may be left
    out.

    ``asked_by`` is the configuration field that holds the name, for the error (InputError) if there is no such file.
    """
    path = _file(name, roots)
    if path is not None:
        return path
    shipped = sorted({path.stem for root in roots if root.is_dir() for path in root.glob("*.jsonl")})
    close = difflib.get_close_matches(Path(name).stem, shipped, n=1)
    places = f"it is neither in {Path.cwd()} nor among the shipped prompts ({', '.join(shipped) or 'none'})"
    hint = f"did you mean {close[0]}?" if close else places
    raise InputError(f"{asked_by}: no prompt file {name}: {hint}")


def find_prompt_files(name: str, roots: Sequence[Path], asked_by: str) -> list[Path]:
    """The files that ``name`` means: one file, else those of a folder, else those that a pattern matches; sorted.

    Raises InputError if there is none.
    """
    found = _file(name, roots)
    if found is not None or not name.strip():
        return [found or find_prompt_file(name, roots, asked_by)]
    for root in (Path(), *roots):
        folder = root / os.path.expanduser(name)
        if os.path.isdir(folder):
            files = sorted(path for path in folder.iterdir() if _is_prompt_file(path))
            if not files:
                known = ", ".join(_SUFFIXES)
                raise InputError(f"{asked_by}: the folder {folder} holds no prompt files ({known}, also compressed)")
            return files
        if glob.has_magic(name):
            matches = sorted(Path(match) for match in _matches(str(folder)) if os.path.isfile(match))
            if matches:
                return matches
    if glob.has_magic(name):
        raise InputError(f"{asked_by}: no file matches {name}, seen from {Path.cwd()}")
    return [find_prompt_file(name, roots, asked_by)]


def _file(name: str, roots: Sequence[Path]) -> Path | None:
    names = [name] if name.endswith(".jsonl") else [name, f"{name}.jsonl"]
    for folder in (Path(), *roots):
        for candidate in names:
            path = folder / os.path.expanduser(candidate)
            if os.path.isfile(path):  # unlike Path.is_file, False for names that no file can have
                return path
    return None


def _matches(pattern: str) -> list[str]:
    try:
        return glob.glob(pattern, recursive=True)
    except (OSError, ValueError):  # a pattern that no file name can match
        return []


def _is_prompt_file(path: Path) -> bool:
    stem, suffix = os.path.splitext(path.name)
    if suffix in _PACKED:
        suffix = os.path.splitext(stem)[1]
    return suffix in _SUFFIXES and not path.name.startswith(".") and path.is_file()


def plain_stem(path: Path) -> str:
    """The file's name without what says how it is packed: "a" of a.jsonl and of a.jsonl.gz."""
    name = path.name
    for suffix in (*_PACKED, *_SUFFIXES):
        name = name.removesuffix(suffix) or name
    return name if name != path.name else path.stem


# --- records -------------------------------------------------------------------------------------------------------


def records(path: Path) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Each record of a file: where it is, for messages; its number, counted from 1; and what gives its JSON value or
    raises BrokenRecordError.

    Blank lines, a byte order mark and CRLF line ends are fine. Raises InputError for a file that cannot be read or is
    of another kind.
    """
    data = _content(path)
    if data.startswith(_PARQUET):
        yield from _rows(path, data)
        return
    array = _array(path, data)
    for number, value in enumerate(array or (), start=1):
        yield f"{path}, entry {number}", number, lambda value=value: value  # type: ignore[misc]
    for number, line in _lines(path, data) if array is None else ():
        yield f"{path}:{number}", number, lambda line=line: parse_json(line)  # type: ignore[misc]


def _content(path: Path) -> bytes:
    """The bytes of a file, unpacked, without a byte order mark."""
    check_file(path, _MOST_BYTES)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read as a prompt file: {error.strerror}") from error
    for magic, unpack in _UNPACK.items():
        if data.startswith(magic):
            try:
                data = unpack(data)
            except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
                raise InputError(
                    f"{path} cannot be unpacked ({str(error) or 'it is cut'}): it is damaged, make it again"
                ) from error
    for magic, what in _FOREIGN.items():
        if data.startswith(magic):
            raise InputError(f"{path} is {what}")
    return data.removeprefix(b"\xef\xbb\xbf")


def _lines(path: Path, data: bytes) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers, counted from 1."""
    # Split at line feeds only: JSON strings may hold other line separators, such as U+2028, as they are.
    for number, raw in enumerate(data.split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8").strip(" \t\r")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start + 1}): save the file as UTF-8"
            ) from error
        if line:
            yield number, line


def _array(path: Path, data: bytes) -> list[Any] | None:
    """The entries of a file that is one JSON array; None for a file of lines."""
    if not data.lstrip().startswith(b"["):
        return None
    first, *more = [line for _, line in _lines(path, data)]
    if more and _is_json(first):
        return None
    try:
        value: list[Any] = parse_json(data.decode("utf-8"))
    except BrokenRecordError as error:
        line = getattr(error.__cause__, "lineno", 1)
        raise InputError(f"{path}:{line}: {error}; the file begins like a JSON array") from error
    return value


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except BrokenRecordError:
        return False
    return True


def _rows(path: Path, data: bytes) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(io.BytesIO(data)).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", number, lambda row=row: _as_json(row)  # type: ignore[misc]
    except (pa.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or ["damaged"])[0]
        raise InputError(f"{path} cannot be read as Parquet ({reason}): make it again") from error


def _as_json(row: dict[str, Any]) -> Any:
    """A row as the JSON object that it stands for: fields that are null are left out, as a table must have them all."""

    def refuse(value: object) -> None:
        raise BrokenRecordError(f"a value of type {type(value).__name__}, which JSON does not have")

    try:
        return json.loads(json.dumps(_without_nulls(row), allow_nan=False, default=refuse))
    except (ValueError, RecursionError) as error:
        raise BrokenRecordError(f"not usable as JSON: {error}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def parse_json(text: str) -> Any:
    """A JSON value. Raises BrokenRecordError for anything else, a field that comes twice and NaN among them."""

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            names = [name for name, _ in pairs]
            raise BrokenRecordError(f"field {next(name for name in names if names.count(name) > 1)!r} comes twice")
        return record

    def no_constants(name: str) -> None:
        raise BrokenRecordError(f"not JSON: {name} is not a JSON value")

    try:
        return json.loads(text, object_pairs_hook=no_repeats, parse_constant=no_constants)
    except json.JSONDecodeError as error:
        raise BrokenRecordError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets nested thousands deep
        raise BrokenRecordError(f"not usable JSON: {error}") from error
