"""Hidden states that were computed once and are kept on disk for the next epoch, within a budget.

One file a document, a shard like those of a store (``hidden_states_shard.py``), below a folder whose name is a digest
of what the hidden states are those of: another target, other taps or another type find nothing. When the files take
more than the budget, the oldest are removed; their documents are asked for again.

Several ranks share the folder: each reads what any has written, writes and removes its own, and has its share of the
budget. Files that an earlier training left are shared out by their names. A file carries a checksum of its tensors,
compared when this process reads it for the first time; a file that cannot be read, has changed, or holds other tokens
than the document's is removed, and the document asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import torch

from spectrain.data.computed_states import as_read
from spectrain.data.hidden_states import ShardFile, StoreMeta, TargetStates
from spectrain.data.hidden_states_shard import ShardBuffer
from spectrain.data.responses import Response
from spectrain.errors import InputError
from spectrain.files import remove

_SUMMED = "sum"  # in a file's metadata: the digest of what it holds


class KeptOnDisk:
    """``Keep`` in ``folder``. ``rank``: (number, count) of those that share it."""

    def __init__(self, folder: Path, meta: StoreMeta, budget_bytes: int, rank: tuple[int, int] = (0, 1)) -> None:
        identity = json.dumps(dataclasses.asdict(meta), sort_keys=True)
        self._folder = folder / hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._meta = meta
        self._budget = budget_bytes // rank[1]
        self._rank = rank[0]
        self._checked: set[str] = set()
        self._own: OrderedDict[Path, int] = OrderedDict()  # oldest first: bytes
        self._bytes = 0
        self._folder.mkdir(parents=True, exist_ok=True)
        if rank[0] == 0:
            for other in folder.iterdir():
                if other != self._folder:
                    remove(other)
        self._take_over(rank)

    def get(self, response: Response) -> TargetStates | None:
        path = self._path(response.key)
        if not path.is_file():
            return None
        try:
            return self._read(path, response)
        except (InputError, OSError):  # damaged; or removed by another rank meanwhile
            self._forget(path)
            return None

    def has(self, response: Response) -> bool:
        return self._path(response.key).is_file()

    def put(self, states: TargetStates) -> None:
        """Raises RunError if it cannot be written."""
        path = self._path(states.key)
        if path.is_file():
            return
        buffer = ShardBuffer(self._meta, 0)
        buffer.add(states)
        path.parent.mkdir(exist_ok=True)
        # Under a name of this rank's: another may be writing the same document.
        written = path.with_name(f"{path.name}.{self._rank}")
        buffer.write(written, {_SUMMED: _sum(as_read(states, self._meta))})
        written.replace(path)
        self._checked.add(states.key)
        self._note(path)
        self._make_room()

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        return self._folder / name[:2] / f"{name}.safetensors"  # a folder of a million files is slow

    def _read(self, path: Path, response: Response) -> TargetStates:
        """Raises InputError if the file does not hold the hidden states of ``response``."""
        shard = ShardFile.unlisted(path, self._meta)
        (document,) = shard.documents(0)[:1] or (None,)
        if document is None or document.key != response.key:
            raise InputError(f"{path} holds other documents")
        states = dataclasses.replace(shard.states(document), split=response.split)
        ids, mask = torch.from_numpy(response.input_ids), torch.from_numpy(response.loss_mask)
        if not torch.equal(states.input_ids, ids) or not torch.equal(states.loss_mask, mask):
            raise InputError(f"{path} holds other tokens")
        if response.key not in self._checked:
            if shard.metadata().get(_SUMMED) != _sum(states):
                raise InputError(f"{path} has changed")
            self._checked.add(response.key)
        return states

    def _take_over(self, rank: tuple[int, int]) -> None:
        """Files of an earlier training that are this rank's to remove."""
        found = [path for path in self._folder.glob("*/*.safetensors") if _is_ours(path, rank)]
        for path in sorted(found, key=lambda one: (one.stat().st_mtime_ns, one.name)):
            self._note(path)
        self._make_room()
        if rank[0] == 0:
            for path in self._folder.glob("*/*"):
                if path.suffix != ".safetensors":  # of processes that were killed
                    path.unlink(missing_ok=True)

    def _note(self, path: Path) -> None:
        self._own[path] = path.stat().st_size
        self._bytes += self._own[path]

    def _make_room(self) -> None:
        while self._bytes > self._budget and self._own:
            self._forget(next(iter(self._own)))

    def _forget(self, path: Path) -> None:
        self._bytes -= self._own.pop(path, 0)
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _is_ours(path: Path, rank: tuple[int, int]) -> bool:
    return zlib.crc32(path.name.encode()) % rank[1] == rank[0]


def _sum(states: TargetStates) -> str:
    """Of the values that a reader sees."""
    digest = hashlib.sha256()
    tensors = [states.input_ids, states.loss_mask, states.taps, states.last_hidden, states.log_normalizer]
    tensors += [x for layer in sorted(states.target_kv) for x in states.target_kv[layer]]
    for tensor in tensors:
        if tensor is not None:
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
