"""A shard being gathered, and the file it becomes.

Documents are copied one behind the other into preallocated buffers, in the type they are stored in. Memory: one shard,
touched as it fills. A shard file that is there is whole.

The store's writer uses this, and so does the connector inside vLLM's workers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from spectrain.data.hidden_states import StoreMeta, TargetStates, bytes_per_token, kv_names, token_layout
from spectrain.data.state_types import quantize, scale_shape
from spectrain.files import file_digest, replacing


class ShardBuffer:
    """Gathers documents until they fill ``shard_bytes``. A document longer than that makes a shard of its own."""

    def __init__(self, meta: StoreMeta, shard_bytes: int) -> None:
        self.meta = meta
        self._capacity = max(1, shard_bytes // bytes_per_token(meta))
        self._buffers: dict[str, Tensor] = {}
        self._documents: list[tuple[str, str, int, int]] = []  # key, split, end, loss count

    @property
    def keys(self) -> list[str]:
        """Of the documents gathered."""
        return [key for key, _, _, _ in self._documents]

    @property
    def tokens(self) -> int:
        return self._documents[-1][2] if self._documents else 0

    @property
    def full(self) -> bool:
        return self.tokens >= self._capacity

    def fits(self, length: int) -> bool:
        """Whether a document of ``length`` tokens may still be added; to an empty shard any document may."""
        return not self._documents or self.tokens + length <= self._capacity

    def add(self, states: TargetStates) -> None:
        """Copy one document. Without a log-normalizer its rows are filled with NaN; a last hidden state that is a tap
        is not copied again.
        """
        length = states.input_ids.shape[0]
        self._reserve(length)
        rows = slice(self.tokens, self.tokens + length)
        for name, value in _encoded(states, self.meta).items():
            self._buffers[name][rows].copy_(value)
        self._documents.append((states.key, states.split, rows.stop, int(states.loss_mask.sum())))

    def write(self, path: Path, metadata: Mapping[str, str] | None = None) -> str:
        """Write what was gathered to ``path`` and begin anew. Returns the file's SHA-256."""
        keys, splits, ends, loss_counts = zip(*self._documents, strict=True)
        tensors = {name: buffer[: self.tokens] for name, buffer in self._buffers.items()}
        tensors["offsets"] = torch.tensor((0, *ends), dtype=torch.int64)
        tensors["loss_counts"] = torch.tensor(loss_counts, dtype=torch.int64)
        lists = {"keys": json.dumps(keys), "splits": json.dumps(splits)}
        sha256 = write_shard(path, tensors, {**lists, **(metadata or {})})
        self._documents = []
        return sha256

    def _reserve(self, length: int) -> None:
        rows = max(self._capacity, length)
        if not self._buffers or (not self._documents and next(iter(self._buffers.values())).shape[0] < rows):
            self._buffers = {
                name: torch.empty((rows, *shape), dtype=dtype)
                for name, (dtype, shape) in token_layout(self.meta).items()
            }


def write_shard(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Write a shard; ``path`` appears when it is whole and on disk. Returns the file's SHA-256. Raises RunError if it
    cannot be written.
    """
    with replacing(path, "hidden states", sum(tensor.nbytes for tensor in tensors.values())) as partial:
        save_file(tensors, partial, dict(metadata))
        return file_digest(partial)


def _encoded(states: TargetStates, meta: StoreMeta) -> dict[str, Tensor]:
    hidden: tuple[str, ...] = ("taps", "last_hidden") if meta.last_hidden_tap is None else ("taps",)
    values = {name: getattr(states, name) for name in ("input_ids", "loss_mask", *hidden)}
    for layer, _, _ in meta.kv_layers:
        values |= dict(zip(kv_names(layer), states.target_kv[layer], strict=True))
        hidden += kv_names(layer)
    nan = torch.full(states.input_ids.shape, torch.nan)
    values["log_normalizer"] = nan if states.log_normalizer is None else states.log_normalizer
    if scale_shape(meta.dtype, meta.hidden_size) is not None:
        for name in hidden:
            values[name], values[f"{name}_scale"] = quantize(values[name], meta.dtype)
    return values
