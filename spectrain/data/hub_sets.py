"""Data sets of the Hub and of local folders, read row by row through ``datasets``; the whole set is never in memory."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from spectrain.errors import InputError
from spectrain.files import digest_strings, file_digest

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ASK_S = 10.0
# Suffix of a single file -> the builder of ``datasets`` that reads it.
_BUILDERS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv"}
_BUILDERS |= {".arrow": "arrow"}
_SAVED = ("state.json", "dataset_dict.json")  # of a folder that save_to_disk has written


class UnreachableError(InputError):
    """The Hub, or a set on it, cannot be reached."""


@dataclass(frozen=True)
class HubSet:
    """One split of one set. ``revision``: a commit, or a digest of a local set's files."""

    path: str
    subset: str | None
    split: str
    revision: str

    @property
    def is_local(self) -> bool:
        return os.path.exists(os.path.expanduser(self.path))

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Its rows, in order. Raises UnreachableError, and InputError for what cannot be read."""
        with _understood(self.path):
            yield from open_set(self.path, self.subset, self.split, self.revision)


def open_set(
    path: str,
    subset: str | None,
    split: str,
    revision: str | None,
    file: str | None = None,
    streaming: bool = True,
) -> Any:
    """The rows of a set on the Hub, of a local folder or file of one, or of one ``file`` of it, whatever the set's own
    configurations are.

    ``streaming``: rows come one by one and nothing is stored; else the set is kept in the cache of ``datasets``, for a
    time without a network. Raises whatever ``datasets`` does.
    """
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    place = Path(path).expanduser()
    local = os.path.exists(place)
    if file is not None:
        where = str(place / file) if local else f"hf://datasets/{path}{f'@{revision}' if revision else ''}/{file}"
        return _table(where, "train", streaming)
    if not local:
        return datasets.load_dataset(path, subset, split=split, revision=revision, streaming=streaming)
    if place.is_file():
        return _table(str(place), split, streaming)
    if any((place / name).is_file() for name in _SAVED):
        saved = datasets.load_from_disk(str(place))  # mapped, not read
        return saved[split] if isinstance(saved, Mapping) else saved
    return datasets.load_dataset(str(place), subset, split=split, streaming=streaming)


def _table(file: str, split: str, streaming: bool) -> Any:
    import datasets

    builder = _BUILDERS.get(PurePath(file).suffix)
    if builder is None:
        raise ValueError(f"{PurePath(file).name} is no file of a data set: use {', '.join(_BUILDERS)}, or a folder")
    return datasets.load_dataset(builder, data_files={split: file}, split=split, streaming=streaming)


def find_set(path: str, subset: str | None, split: str, revision: str | None) -> HubSet:
    """The set at a revision that will not move. Raises UnreachableError, or InputError where there is no such set."""
    place = Path(path).expanduser()
    if os.path.exists(place):
        if revision is not None:
            raise InputError(f"data.revision={revision}: {path} is a local folder, which has none: leave it out")
        files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())
        return HubSet(path, subset, split, digest_strings([file_digest(file) for file in files]))
    if revision is not None and _COMMIT.fullmatch(revision):
        return HubSet(path, subset, split, revision)
    with _understood(path):
        from huggingface_hub import HfApi

        return HubSet(path, subset, split, str(HfApi().dataset_info(path, revision=revision, timeout=_ASK_S).sha))


@contextmanager
def _understood(path: str) -> Iterator[None]:
    """Whatever ``datasets`` and the Hub's client raise, as one line that names the set."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # of networks, files, and scripts that it will not run: many types
        reason = (" ".join(str(error).split()) or type(error).__name__)[:200]
        if os.path.exists(Path(path).expanduser()):
            raise InputError(f"data.path={path} cannot be read as a data set ({reason}): correct it") from error
        raise UnreachableError(
            f"data.path={path} is no folder here and cannot be read from the Hub ({reason}): connect to the Hub, or "
            f"name a folder with the set"
        ) from error
