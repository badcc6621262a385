"""Writing the hidden-state store of ``states.py``: shard by shard, each one finished before the index names it.

A shard is gathered in preallocated buffers, written to a folder of partial files, moved to its place, and only then listed in
``index.json``, which is itself replaced in one move. Whenever the process is killed, the index names whole shards only; whatever else
lies in the folder is a leftover and is removed by the next writer. Memory: one shard, touched as it fills.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import save_file
from torch import Tensor

from spectrain.data.states import (
    INDEX_NAME,
    ShardRecord,
    StateStore,
    StoreIndex,
    StoreMeta,
    TargetStates,
    bytes_per_token,
    quantize,
    token_layout,
)
from spectrain.errors import RunError

_PARTIAL = ".partial"


class StateStoreWriter:
    """Adds documents to a store, new or begun. Use as a context manager, or call ``close``.

    Raises ``InputError`` if the folder holds states of something else (naming the field that differs).
    """

    def __init__(self, folder: str | Path, meta: StoreMeta, shard_bytes: int = 1 << 30) -> None:
        self.folder, self.meta = Path(folder), meta
        self._capacity = max(1, shard_bytes // bytes_per_token(meta))
        self._buffers: dict[str, Tensor] = {}
        self._documents: list[tuple[str, str, int, int]] = []  # key, split, end, loss count
        self._shards: list[ShardRecord] = []
        self._done: set[str] = set()  # keys in finished shards
        self._known: set[str] = set()  # and those gathered for the next one
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / INDEX_NAME).exists():
            index = StoreIndex.load(self.folder)
            index.meta.check(dataclasses.asdict(meta), self.folder)
            self._shards, self._done = list(index.shards), set(StateStore(self.folder).keys)
            self._known = set(self._done)
        self._remove_leftovers()

    def done_keys(self) -> set[str]:
        """Keys of the documents in finished shards: they survive a kill and need not be captured again."""
        return set(self._done)

    def add(self, states: TargetStates) -> None:
        """Copy one document into the shard being gathered, and write the shard when it is full.

        A document longer than a whole shard gets one of its own. Raises ``RunError`` if a state is not finite: a bad document is
        never stored and never replaced by another.
        """
        if states.key in self._known:
            raise ValueError(f"states of {states.key} are already in {self.folder}")
        if states.log_normalizer is None:
            raise ValueError(
                f"states of {states.key} have no log_normalizer: compute it with TargetHead.log_normalizer before storing them"
            )
        for name in ("taps", "last_hidden"):
            if not _is_finite(getattr(states, name)):
                raise RunError(f"the target computed {name} that are not finite for response {states.key}: try target.dtype=float32")
        length = states.input_ids.shape[0]
        if self._used and self._used + length > self._capacity:
            self.flush()
        self._reserve(length)
        rows = slice(self._used, self._used + length)
        for name, value in self._encode(states).items():
            self._buffers[name][rows].copy_(value)
        self._known.add(states.key)
        self._documents.append((states.key, states.split, rows.stop, int(states.loss_mask.sum())))
        if self._used >= self._capacity:
            self.flush()

    def flush(self) -> None:
        """Write what has been gathered as a shard, then list it in the index."""
        if not self._documents:
            return
        keys, splits, ends, loss_counts = zip(*self._documents, strict=True)
        tensors = {name: buffer[: self._used] for name, buffer in self._buffers.items()}
        tensors["offsets"] = torch.tensor((0, *ends), dtype=torch.int64)
        tensors["loss_counts"] = torch.tensor(loss_counts, dtype=torch.int64)
        path = self.folder / f"shard-{len(self._shards):05d}.safetensors"
        sha256 = self._write_shard(path, tensors, {"keys": json.dumps(keys), "splits": json.dumps(splits)})
        self._shards.append(ShardRecord(path.name, len(keys), self._used, path.stat().st_size, sha256))
        self._write_index()
        self._done.update(keys)
        self._documents = []

    def close(self) -> None:
        """Write the last shard. A store without any document has an index too."""
        self.flush()
        if not self._shards:
            self._write_index()
        self._buffers = {}
        shutil.rmtree(self.folder / _PARTIAL, ignore_errors=True)

    def __enter__(self) -> StateStoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()  # after an error too: the documents gathered so far are whole

    @property
    def _used(self) -> int:
        """Tokens gathered for the next shard."""
        return self._documents[-1][2] if self._documents else 0

    def _reserve(self, length: int) -> None:
        rows = max(self._capacity, length)
        if not self._buffers or next(iter(self._buffers.values())).shape[0] < rows:
            self._buffers = {name: torch.empty((rows, *shape), dtype=dtype) for name, (dtype, shape) in token_layout(self.meta).items()}

    def _encode(self, states: TargetStates) -> dict[str, Tensor]:
        values = {name: getattr(states, name) for name in ("input_ids", "loss_mask", "log_normalizer", "taps", "last_hidden")}
        if self.meta.dtype == "int8":
            for name in ("taps", "last_hidden"):
                values[name], values[f"{name}_scale"] = quantize(values[name])
        return values

    def _write_shard(self, path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
        partial = self._partial_file(path.name)
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata)
        partial.chmod(mode)  # save_file makes files that only their owner may read, whatever the umask
        with partial.open("r+b") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        partial.replace(path)
        return sha256

    def _write_index(self) -> None:
        partial = self._partial_file(INDEX_NAME)
        with partial.open("w", encoding="utf-8") as file:
            file.write(StoreIndex(self.meta, tuple(self._shards)).to_json())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.folder / INDEX_NAME)

    def _partial_file(self, name: str) -> Path:
        path = self.folder / _PARTIAL / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        return path

    def _remove_leftovers(self) -> None:
        shutil.rmtree(self.folder / _PARTIAL, ignore_errors=True)
        listed = {record.file for record in self._shards}
        for path in self.folder.glob("shard-*.safetensors"):
            if path.name not in listed:
                path.unlink()


def _is_finite(x: Tensor) -> bool:
    """Without a temporary of the size of ``x``; infinities and NaN both show in the extremes."""
    return x.numel() == 0 or bool(torch.stack(x.aminmax()).isfinite().all())
