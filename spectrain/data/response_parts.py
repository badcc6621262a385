"""The Parquet files that responses are kept in, and what is read of them column by column.

A part's name holds the digest of its bytes, which is compared before anything in it is believed: a changed bit could
be another token, or another mask. Cost: one reading of each part in a process, about a second a GB. What is counted is
counted in columns: no token becomes an object.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spectrain.data.string_column import Strings
from spectrain.errors import InputError
from spectrain.files import FileState, file_digest

SCHEMA_VERSION = "1"
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("split", pa.string()),
        ("finish_reason", pa.string()),
        ("domain", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        # the conversation; tools as JSON text because their shape is free
        ("id", pa.string()),
        ("turns", pa.list_(pa.string())),
        ("system", pa.string()),
        ("tools", pa.string()),
        ("conversation_domain", pa.string()),
        ("conversation_language", pa.string()),  # earlier versions wrote none
        ("answers", pa.list_(pa.string())),
        # the sampling
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("max_new_tokens", pa.int32()),
        ("seed", pa.int64()),
    ],
    metadata={"spectrain_schema_version": SCHEMA_VERSION},
)
PART_NAME = re.compile(r"part-(\d{5,})(?:-([0-9a-f]{16}))?\.parquet")  # earlier versions wrote no digest


class DamagedPartError(InputError):
    """A part is not what was written."""


def keys_of(path: Path) -> Strings:
    """Keys of the responses of a part, once a process: of one that has not changed since they are known."""
    state = FileState.of(path)
    return _known_keys(path, state) if state.settled else _read_keys(path)


@lru_cache(maxsize=1 << 16)
def _known_keys(path: Path, _: FileState) -> Strings:
    return _read_keys(path)


def _read_keys(path: Path) -> Strings:
    return Strings(read_part(path, ["key"])["key"])


_REMOVE_IT = "remove it and run generate again, which answers its prompts anew"


def read_part(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Columns of a part; None: all. Raises DamagedPartError, and InputError for one of another version."""
    _verify(path)
    try:
        # Not read_table: it takes a folder name such as "lr=0.1" for a partition and adds a column.
        with pq.ParquetFile(path) as file:
            version = (file.schema_arrow.metadata or {}).get(b"spectrain_schema_version", b"none").decode()
            if version != SCHEMA_VERSION:
                raise InputError(
                    f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}: use another run "
                    f"directory"
                )
            return file.read(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise DamagedPartError(
            f"{path} cannot be read as responses ({str(error).splitlines()[0]}): {_REMOVE_IT}"
        ) from error


def _verify(path: Path) -> None:
    match = PART_NAME.fullmatch(path.name)
    if match is None or match[2] is None:
        return
    try:
        found = file_digest(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): {_REMOVE_IT}") from error
    if not found.startswith(match[2]):
        raise DamagedPartError(
            f"{path} has changed since it was written, its digest is not that of its name: {_REMOVE_IT}"
        )


class PartCounts(NamedTuple):
    """Of the D responses of a part, in the order of ``keys_of``."""

    tokens_D: npt.NDArray[np.int32]
    generated_D: npt.NDArray[np.int32]  # of these, tokens that the target generated
    cut_off_D: npt.NDArray[np.bool_]


def counts_of(path: Path) -> PartCounts:
    """Once a process, as ``keys_of``. Errors as ``read_part``."""
    state = FileState.of(path)
    return _known_counts(path, state) if state.settled else _read_counts(path)


@lru_cache(maxsize=1 << 16)
def _known_counts(path: Path, _: FileState) -> PartCounts:
    return _read_counts(path)


def _read_counts(path: Path) -> PartCounts:
    table = read_part(path, ["finish_reason", "loss_mask"])
    mask = table["loss_mask"].combine_chunks()
    tokens_D = np.asarray(pc.list_value_length(mask)).astype(np.int32)
    before_D = np.concatenate([[0], np.cumsum(tokens_D)])
    so_far_T = np.concatenate([[0], np.cumsum(np.asarray(pc.list_flatten(mask)), dtype=np.int64)])
    generated_D = np.diff(so_far_T[before_D]).astype(np.int32)
    cut_off = pc.fill_null(pc.equal(table["finish_reason"], "length"), False)
    return PartCounts(tokens_D, generated_D, np.asarray(cut_off).astype(bool))


def count_responses(parts: Sequence[Path], keys: Strings) -> dict[str, int]:
    """``generated_tokens``, ``tokens`` and ``cut_off`` answers of the responses of these keys, each in the first of
    ``parts`` that has it. Errors as ``read_part``.
    """
    stored = Strings.joined(keys_of(path) for path in parts)
    rows, counted = stored.places_of(keys), [counts_of(path) for path in parts]
    own_R = np.zeros(len(stored), dtype=bool)
    own_R[rows[rows >= 0]] = True
    columns = zip(*counted, strict=True) if counted else ([np.zeros(0, dtype=np.int32)],) * 3
    tokens, generated, cut_off = (int(np.concatenate(column)[own_R].sum()) for column in columns)
    return {"generated_tokens": generated, "tokens": tokens, "cut_off": cut_off}
