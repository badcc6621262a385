"""Hidden states of the target, one document at a time: what a trainer needs of them, whatever their origin
(``HiddenStateSource``), and the store that keeps them on disk.

A store is a folder with ``index.json`` and shards ``shard-00000.safetensors``. In a shard the documents lie one behind
the other, so each tensor has one row per token, and ``offsets`` says where a document starts. Reading a document takes
views of the memory map: no byte is copied before a batch is made of it (8-bit hidden states are the exception: they are
dequantised on reading).

Cost: ``(A + 1) * H`` values a token, that is 2 * (A + 1) * H bytes in bfloat16 (3 taps of H = 4096: 32 KiB), half of it
in int8, which keeps one float32 scale per token and tap. The scale belongs to the token because the first token of a
document is an attention sink whose hidden states are thousands of times larger than all others: a scale shared with it
would round its neighbours to zero. Where the last layer is a tap, the last hidden state is that tap, and is stored
once: ``A * H`` values a token. Keys and values of named layers, which a Gemma-4 assistant reads, lie beside them, as
attention reads them.

Documents are numbered in the order of their keys, not of their capture, so that a capture that was killed and resumed
trains exactly like one that was not. Writing is in ``hidden_states_writer.py``, what happens to damaged shards in
``shard_damage.py``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spectrain.copies import read_either, write_twice
from spectrain.data.state_types import STATE_DTYPES, dequantize, scale_shape
from spectrain.data.stored_documents import ShardListing, StoredDocument, table_of
from spectrain.data.target_states import TargetStates, decoded, kv_names
from spectrain.errors import InputError
from spectrain.files import check_digest, with_digest

SCHEMA_VERSION = 2
INDEX_NAME = "index.json"
_CHUNK_BYTES = 1 << 24
_FOLDER_ADVICE = "remove the folder and capture again"
_SHARD_ADVICE = "run `spectrain capture`, which captures its documents again"


class HiddenStateSource(Protocol):
    """What a trainer needs of hidden states: a map-style dataset of a fixed number of documents, known by their lengths
    before any is read. Stored, computed on the way or cached: it makes no difference here.

    A document keeps its number, its length and its content as long as the source lives, so that a resumed training goes
    on where it was. Documents may be read in any order, more than once, and from several processes: a source can be
    pickled, and its copies are independent (open files and connections stay behind and are opened anew). It lives on
    the CPU; the trainer moves what it needs. Any exception from reading a document ends the training, with its key.
    """

    @property
    def keys(self) -> Sequence[str]: ...  # of the responses that the documents are
    @property
    def splits(self) -> Sequence[str]: ...  # train or heldout

    lengths: npt.NDArray[np.int64]  # tokens of each document
    loss_counts: npt.NDArray[np.int64]  # of these, tokens that the target generated

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> TargetStates: ...

    def as_stored(self, index: int) -> TargetStates:
        """As ``source[index]``, but what lies there in 8 bits may come as it lies, with its scales."""
        ...


@dataclass(frozen=True)
class StoreMeta:
    """What the hidden states are those of. A trainer or evaluator compares it with its own run before step 0."""

    target: str
    target_revision: str
    config_digest: str
    tokenizer_digest: str
    template_digest: str
    tap_ids: tuple[int, ...]
    hidden_size: int
    num_layers: int  # of the target: the tap of this number is the last hidden state
    dtype: str  # a key of STATE_DTYPES
    last_hidden_pre_norm: bool = True
    schema_version: int = SCHEMA_VERSION
    # (layer, key-value heads, size of a head) of each layer whose keys and values are stored.
    kv_layers: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tap_ids", tuple(self.tap_ids))
        object.__setattr__(self, "kv_layers", tuple((int(a), int(b), int(c)) for a, b, c in self.kv_layers))
        if self.dtype not in STATE_DTYPES:
            raise ValueError(f"hidden states cannot be stored as {self.dtype}: use one of {', '.join(STATE_DTYPES)}")

    @property
    def last_hidden_tap(self) -> int | None:
        """Which of the taps is the last hidden state, counted from 0; None: none of them."""
        return self.tap_ids.index(self.num_layers) if self.num_layers in self.tap_ids else None

    def check(self, expected: Mapping[str, object], where: str | Path) -> None:
        """Raise ``InputError`` naming the first field of ``expected`` that differs."""
        for name, wanted in expected.items():
            found = getattr(self, name)
            wanted = tuple(wanted) if isinstance(wanted, list) else wanted  # as JSON has tuples
            if found != wanted:
                raise InputError(
                    f"{where} holds hidden states with {name}={found}, but this run needs {name}={wanted}: "
                    f"use another run directory, or remove the folder and capture again"
                )


@dataclass(frozen=True)
class ShardRecord:
    """One finished shard, as the index names it."""

    file: str
    documents: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoreIndex:
    """``index.json``: the only list of what belongs to the store. A shard file that it does not name is a leftover."""

    meta: StoreMeta
    shards: tuple[ShardRecord, ...]

    def to_json(self) -> str:
        shards = [dataclasses.asdict(record) for record in self.shards]
        return json.dumps(with_digest({"meta": dataclasses.asdict(self.meta), "shards": shards}), indent=1)

    @staticmethod
    def load(folder: Path) -> StoreIndex:
        """Raises ``InputError`` if the index is missing, broken, changed or of another version of the schema."""
        return read_either(folder / INDEX_NAME, StoreIndex._read)

    def write(self, folder: Path) -> None:
        """Raises RunError if it cannot be written."""
        write_twice(folder / INDEX_NAME, self.to_json(), "the index of the hidden states")

    @staticmethod
    def _read(path: Path) -> StoreIndex:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            version = fields["meta"]["schema_version"]
            if version != SCHEMA_VERSION:
                raise InputError(
                    f"{path} has schema version {version}, this spectrain reads {SCHEMA_VERSION}: {_FOLDER_ADVICE}"
                )
            check_digest(fields, path, _FOLDER_ADVICE)
            return StoreIndex(StoreMeta(**fields["meta"]), tuple(ShardRecord(**record) for record in fields["shards"]))
        except FileNotFoundError:
            raise InputError(
                f"{path.parent} holds no hidden states ({INDEX_NAME} is missing): run `spectrain capture` first"
            ) from None
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise InputError(f"{path} cannot be read ({error}): {_FOLDER_ADVICE}") from error


def token_layout(meta: StoreMeta) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape that one token has in each per-token tensor of a shard."""
    taps, hidden, dtype = len(meta.tap_ids), meta.hidden_size, STATE_DTYPES[meta.dtype]
    layout = {
        "input_ids": (torch.int32, ()),
        "loss_mask": (torch.uint8, ()),
        "log_normalizer": (torch.float32, ()),
        "taps": (dtype, (taps, hidden)),
        "last_hidden": (dtype, (hidden,)),
    }
    scale = scale_shape(meta.dtype, hidden)
    if scale is not None:
        layout |= {"taps_scale": (torch.float32, (taps, *scale)), "last_hidden_scale": (torch.float32, scale)}
    if meta.last_hidden_tap is not None:
        layout = {name: entry for name, entry in layout.items() if not name.startswith("last_hidden")}
    for layer, heads, head_dim in meta.kv_layers:
        for name in kv_names(layer):
            layout[name] = (dtype, (heads, head_dim))
            if (scale := scale_shape(meta.dtype, head_dim)) is not None:
                layout[f"{name}_scale"] = (torch.float32, (heads, *scale))
    return layout


def bytes_per_token(meta: StoreMeta) -> int:
    return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in token_layout(meta).values())


class ShardFile:
    """One shard. Its memory map is opened by the first reading, and is not sent along to another process."""

    def __init__(self, path: Path, record: ShardRecord, meta: StoreMeta) -> None:
        self.path = path
        self.record = record
        self._meta = meta
        self._tensors: dict[str, Tensor] | None = None
        self.before_reading: Callable[[ShardFile], None] | None = None
        if not path.is_file():
            raise InputError(f"{path} is missing although the index names it: {_SHARD_ADVICE}")
        if path.stat().st_size != record.bytes:
            raise InputError(
                f"{path} is broken, it has {path.stat().st_size} bytes, the index says {record.bytes}: {_SHARD_ADVICE}"
            )

    @classmethod
    def unlisted(cls, path: Path, meta: StoreMeta) -> ShardFile:
        """A shard that no index names yet. Raises ``InputError`` if it cannot be read."""
        shard = cls(path, ShardRecord(path.name, 0, 0, path.stat().st_size, ""), meta)
        with shard.open() as file:
            offsets = file.get_tensor("offsets").tolist()
        shard.record = dataclasses.replace(shard.record, documents=len(offsets) - 1, tokens=offsets[-1])
        return shard

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tensors": None}

    def metadata(self) -> dict[str, str]:
        with self.open() as file:
            return dict(file.metadata() or {})

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the shard as views of the map. Raises ``InputError`` where the index says otherwise."""
        if self._tensors is None:
            if self.before_reading is not None:
                self.before_reading(self)
            with self.open() as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            for name, (dtype, shape) in token_layout(self._meta).items():
                found = tensors.get(name)
                if found is None or found.dtype != dtype or tuple(found.shape) != (self.record.tokens, *shape):
                    raise InputError(
                        f"{self.path}: tensor {name} does not have the type and shape of the index: {_SHARD_ADVICE}"
                    )
            self._tensors = tensors
        return self._tensors

    def states(self, document: StoredDocument) -> TargetStates:
        """A document: views of the map, or, of 8 bits, its float32 values."""
        return decoded(self.views(document))

    def views(self, document: StoredDocument) -> TargetStates:
        """A document as it is stored: nothing is copied, 8 bits have their scales beside them."""
        rows, last = slice(document.start, document.start + document.length), self._meta.last_hidden_tap
        found = {name: tensor[rows] for name, tensor in self.tensors().items() if name in token_layout(self._meta)}
        scales = {name[: -len("_scale")]: found.pop(name) for name in list(found) if name.endswith("_scale")}
        names = {layer: kv_names(layer) for layer, _, _ in self._meta.kv_layers}
        kv = {layer: (found.pop(keys), found.pop(values)) for layer, (keys, values) in names.items()}
        if last is not None:
            found["last_hidden"] = found["taps"][:, last]
            scales |= {"last_hidden": scales["taps"][:, last]} if scales else {}
        return TargetStates(**found, key=document.key, split=document.split, target_kv=kv, scales=scales)

    def last_hidden(self, rows: slice | Tensor) -> Tensor:
        """Last hidden states of some tokens of the shard, [..., H], wherever they are stored."""
        last = self._meta.last_hidden_tap
        return self._decoded("last_hidden", rows) if last is None else self._decoded("taps", (rows, last))

    def _decoded(self, name: str, index: Any) -> Tensor:
        values = self.tensors()[name][index]
        scale = self.tensors().get(f"{name}_scale")
        return values if scale is None else dequantize(values, scale[index])

    def close(self) -> None:
        """Let the map go, once nobody holds a view of it: the next reading opens another."""
        self._tensors = None

    def listing(self) -> ShardListing:
        """The documents of this shard. Raises ``InputError`` if the shard does not list them."""
        with self.open() as file:
            try:
                listed = ShardListing.read(file)
            except (SafetensorError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
                raise InputError(f"{self.path} does not list its documents ({error}): {_SHARD_ADVICE}") from error
        if len(listed.keys) != self.record.documents or listed.offsets[-1] != self.record.tokens:
            raise InputError(f"{self.path} does not hold the documents that the index names: {_SHARD_ADVICE}")
        return listed

    def documents(self, number: int) -> list[StoredDocument]:
        """The documents of this shard, which is the ``number``-th, one by one. Errors as ``listing``."""
        return self.listing().documents(number)

    def open(self, framework: str = "pt") -> Any:
        """The file, as a context manager. Raises ``InputError`` if it cannot be read."""
        try:
            return safe_open(self.path, framework=framework)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self.path} cannot be read ({error}): {_SHARD_ADVICE}") from error

    def verify(self, on_bytes: Callable[[int], None] | None) -> None:
        """Read every byte; raises ``InputError`` if they are not those that the index names."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                if on_bytes is not None:
                    on_bytes(len(chunk))
        if digest.hexdigest() != self.record.sha256:
            raise InputError(f"{self.path} has changed, its checksum is not that of the index: {_SHARD_ADVICE}")


class StoredHiddenStates:
    """A finished (or growing) store: hidden states that were captured before, as a ``HiddenStateSource``.

    Documents are in the order of their keys. Opening checks the index against the shards' sizes and headers;
    ``verify_checksums`` reads every byte. Both raise ``InputError`` naming the file. Views stay valid even after the
    store is gone.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = StoreIndex.load(self.folder)
        self.meta = index.meta
        self.total_bytes = sum(record.bytes for record in index.shards)
        self.shards = [ShardFile(self.folder / record.file, record, index.meta) for record in index.shards]
        self.documents = table_of(self.shards)
        self.keys, self.splits = self.documents.keys, self.documents.splits
        self.lengths, self.loss_counts = self.documents.lengths, self.documents.loss_counts

    def check(self, expected: Mapping[str, object]) -> None:
        """Compare fields of ``StoreMeta`` with what a run needs; ``InputError`` names the first that differs."""
        self.meta.check(expected, self.folder)

    def verify_checksums(self, on_bytes: Callable[[int], None] | None = None) -> None:
        """Read all shards and compare their SHA-256. ``on_bytes`` hears of bytes as they are read."""
        for shard in self.shards:
            shard.verify(on_bytes)

    def shards_of(self, documents: Sequence[int] | npt.NDArray[np.int64]) -> list[ShardFile]:
        """The shards that these documents lie in, by number."""
        return [
            self.shards[number]
            for number in np.unique(self.documents.shards[np.asarray(documents, dtype=np.int64)]).tolist()
        ]

    def indices(self, split: str) -> list[int]:
        """Numbers of the documents of one split."""
        return [number for number, name in enumerate(self.splits) if name == split]

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Ids and loss mask of a document, without its hidden states."""
        shard, start, length = self._place(index)
        tensors, rows = self.shards[shard].tensors(), slice(start, start + length)
        return tensors["input_ids"][rows], tensors["loss_mask"][rows]

    def last_hidden(self, index: int, positions: Tensor) -> Tensor:
        """Last hidden states of some positions of a document, [P, H]."""
        shard, start, _ = self._place(index)
        return self.shards[shard].last_hidden(positions + start)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> TargetStates:
        return decoded(self.as_stored(index))

    def as_stored(self, index: int) -> TargetStates:
        """As ``source[index]``, but what is stored in 8 bits with its scales: a trainer's device makes values of it."""
        shard, start, length = self._place(index)
        count = int(self.loss_counts[index])
        document = StoredDocument(self.keys[index], self.splits[index], shard, start, length, count)
        return self.shards[shard].views(document)

    def _place(self, index: int) -> tuple[int, int, int]:
        """(shard, first token there, tokens) of a document."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return int(self.documents.shards[index]), int(self.documents.starts[index]), int(self.lengths[index])
