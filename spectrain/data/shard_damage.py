"""Shards of a hidden-state store that were damaged: finding them, and taking them out, so that a capture makes their
documents again and no others.

Opening a store compares sizes and headers; what lies between them only the checksums tell. Comparing those reads every
byte, a second or so a GB and core, so a shard that was found whole, by reading it or because it was digested when it
was written, is remembered in ``verified.json`` beside the index by its size and the times of its last change, and read
again only when one of these differs. Where there is too much to be read at a start, say after terabytes were copied to
another disk, each shard is compared when training first reads it (``verify_at_first_read``).
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from spectrain.data.hidden_states import INDEX_NAME, ShardFile, StoreIndex
from spectrain.data.stored_documents import table_of
from spectrain.data.string_column import Strings
from spectrain.errors import InputError, RunError
from spectrain.files import FileState, write_atomically
from spectrain.processes import available_cores

VERIFIED_NAME = "verified.json"
_DAMAGED = "damaged"  # there, in the place of a checksum


def readable_shards(folder: Path) -> tuple[list[ShardFile], Strings, dict[str, str]]:
    """The shards of a store whose sizes and headers are right, the keys of their documents, and the others: name ->
    what is wrong. Reads no content. Raises InputError if the index is damaged.
    """
    index = StoreIndex.load(folder)
    shards, keys, broken = list[ShardFile](), list[Strings](), dict[str, str]()
    for record in index.shards:
        try:
            shard = ShardFile(folder / record.file, record, index.meta)
            keys.append(shard.listing().keys)
            shards.append(shard)
        except InputError as error:
            broken[record.file] = str(error)
    return shards, Strings.joined(keys), broken


def stored_keys(folder: Path) -> set[str]:
    """Keys of the documents that a store has, in shards that can be read; none where there is no store. Raises
    InputError if its index is damaged.
    """
    return set(readable_shards(folder)[1]) if (folder / INDEX_NAME).is_file() else set()


def stored_key_column(folder: Path) -> Strings:
    """As ``stored_keys``, in one block of memory."""
    if not (folder / INDEX_NAME).is_file():
        return Strings()
    index = StoreIndex.load(folder)
    try:
        return table_of([ShardFile(folder / record.file, record, index.meta) for record in index.shards]).keys
    except InputError:  # of a shard that cannot be read
        return readable_shards(folder)[1]


def unverified(folder: Path, shards: Sequence[ShardFile]) -> list[ShardFile]:
    """Those of ``shards`` that have changed since they were verified, or never were."""
    known = _verified(folder)
    return [shard for shard in shards if known.get(shard.path.name) != [*FileState.of(shard.path), shard.record.sha256]]


def found_damaged(folder: Path, shards: Sequence[ShardFile]) -> list[ShardFile]:
    """Those of ``shards`` that were damaged when they were read last, and have not changed since."""
    known = _verified(folder)
    return [shard for shard in shards if known.get(shard.path.name) == [*FileState.of(shard.path), _DAMAGED]]


def verify_at_first_read(folder: Path, shards: Sequence[ShardFile]) -> None:
    """Have those of ``shards`` that are not known to be whole compared with their checksum by whoever first reads a
    document of one, in this process or another. Reading raises RunError for one that is damaged.
    """
    for shard in unverified(folder, shards):
        shard.before_reading = _verify_now


def _verify_now(shard: ShardFile) -> None:
    folder = shard.path.parent
    if not unverified(folder, [shard]):  # another process has done it
        return
    state = FileState.of(shard.path)
    try:
        shard.verify(None)
    except InputError as error:
        remember_verified(folder, {shard.path.name: [*state, _DAMAGED]})  # for the next command, which mends it
        raise RunError(
            f"{shard.path} has changed since it was written, its checksum is not that of the index: the same command "
            f"captures its documents again"
        ) from error
    if state.settled:
        remember_verified(folder, {shard.path.name: [*state, shard.record.sha256]})


def damaged_shards(
    folder: Path, shards: Iterable[ShardFile], on_bytes: Callable[[int], None] | None = None
) -> dict[str, str]:
    """Name -> what is wrong, of those of ``shards`` whose content is not that of the index. Reads them all, as many at
    a time as there are cores, and remembers the others as verified. ``on_bytes`` gets the number of bytes read since
    its last call.
    """
    shards, lock = list(shards), threading.Lock()

    def advance(count: int) -> None:
        if on_bytes is not None:
            with lock:
                on_bytes(count)

    # Before they are read: what is written meanwhile must not count as read.
    states = [FileState.of(shard.path) for shard in shards]
    settled = [state.settled for state in states]
    readers = ThreadPoolExecutor(max(1, min(len(available_cores()), len(shards))))
    try:
        problems = list(readers.map(lambda shard: _problem(shard, advance), shards))
    finally:
        readers.shutdown(wait=True, cancel_futures=True)
    found = zip(shards, states, settled, problems, strict=True)
    whole = {shard.path.name: [*state, shard.record.sha256] for shard, state, old, wrong in found if old and not wrong}
    remember_verified(folder, whole)
    return {shard.path.name: wrong for shard, wrong in zip(shards, problems, strict=True) if wrong}


def _problem(shard: ShardFile, on_bytes: Callable[[int], None]) -> str:
    try:
        shard.verify(on_bytes)
    except InputError as error:
        return str(error)
    return ""


def remember_verified(folder: Path, whole: Mapping[str, Sequence[object]]) -> None:
    """Note down shards that were found whole: name -> size, times of change and sha256."""
    with suppress(RunError):  # a folder that this user may not write: read again next time
        write_atomically(folder / VERIFIED_NAME, json.dumps({**_verified(folder), **whole}, indent=1) + "\n")


def take_out(folder: Path, names: Iterable[str]) -> None:
    """Remove shards from a store; the index is written first, so that it never names one that is gone. The next
    capture makes their documents again.
    """
    index, names = StoreIndex.load(folder), set(names)
    kept = tuple(record for record in index.shards if record.file not in names)
    dataclasses.replace(index, shards=kept).write(folder)
    for name in names:
        (folder / name).unlink(missing_ok=True)


def _verified(folder: Path) -> dict[str, list[object]]:
    """Of each verified shard: size, times of change, sha256. A file that cannot be read says nothing."""
    try:
        known = json.loads((folder / VERIFIED_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
