"""Shards that vLLM wrote, on their way into the store.

While it runs, its workers put whole shard files into a folder of their own, ``hidden_states/.incoming/<session>/``;
nothing there belongs to the store. A shard is adopted when its documents are those of stored responses, id for id: what
the workers could not know, the log-normalizer of the target's whole vocabulary, is computed from the hidden states as
they are stored and written into the file, which is then moved into the store and named in the index. A kill at any
moment leaves the file on one side or the other. Leftovers of a killed capture are adopted by the next one like any
others; what fits no response, or is in the store already, is removed.

Files of the folder: ``<writer>-<number>.safetensors`` (whole shards), ``flush`` (a number; writers write what they have
whenever it rises) and ``<writer>.error`` (why a writer gave up; empty on a full disk).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from spectrain.data.hidden_states import ShardFile, StoreMeta, TargetStates, token_layout
from spectrain.data.hidden_states_shard import write_shard
from spectrain.data.hidden_states_writer import HiddenStatesWriter, is_finite
from spectrain.data.loss_mask import predicts_generated
from spectrain.data.responses import Response
from spectrain.data.stored_documents import StoredDocument
from spectrain.errors import InputError, NotFiniteError, RunError
from spectrain.files import file_digest, sync, write_atomically, writing
from spectrain.processes import available_cores
from spectrain.target.head import TargetHead

FOLDER = ".incoming"
FLUSH, ERROR_SUFFIX, META = "flush", ".error", "meta"
PARAMS = "spectrain"  # the name under which a request describes its document to the connector
_CHUNK_TOKENS = 4096
_MOST_ADOPTERS = 4
_LOOK_S = 0.5


def flush_number(folder: Path) -> int:
    """How often the writers of ``folder`` have been asked to write what they have."""
    try:
        return int((folder / FLUSH).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0


def has_leftovers(states_folder: Path) -> bool:
    """Whether a vLLM left shards that were not adopted."""
    return any((states_folder / FOLDER).glob("*/*.safetensors"))


def remove_leftovers(states_folder: Path) -> None:
    """Remove the folders of all sessions; their vLLMs must have ended."""
    shutil.rmtree(states_folder / FOLDER, ignore_errors=True)


def raise_if_given_up(folder: Path) -> None:
    """Raise ``RunError`` if a writer of ``folder`` has given up."""
    for path in sorted(folder.glob(f"*{ERROR_SUFFIX}")):
        reason = (
            path.read_text(encoding="utf-8") or "not even the reason could be written, see whether the disk is full"
        )
        raise RunError(f"hidden states from vLLM could not be written to {folder}: {reason}")


class Session:
    """The folder that one vLLM writes into. It stays when vLLM ends: what is in it is adopted, then or later."""

    def __init__(self, states_folder: Path, meta: StoreMeta) -> None:
        self.folder = states_folder / FOLDER / uuid.uuid4().hex[:12]
        self.folder.mkdir(parents=True)
        self.meta = meta
        self._keys: dict[Path, list[str]] = {}

    def flush(self) -> None:
        """Ask every writer to write what it has."""
        write_atomically(self.folder / FLUSH, str(flush_number(self.folder) + 1))

    def check(self) -> None:
        """Raise ``RunError`` if a writer gave up."""
        raise_if_given_up(self.folder)

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    def arrived(self) -> set[str]:
        """Keys of all documents that have arrived so far, in shards that were since taken away too."""
        for path in self.shards():
            if path not in self._keys:
                self._keys[path] = json.loads(ShardFile.unlisted(path, self.meta).metadata()["keys"])
        return set(chain.from_iterable(self._keys.values()))

    def take(self, path: Path) -> Iterator[TargetStates]:
        """The documents of a shard, without log-normalizer; the file is removed when all have been read."""
        self.arrived()
        shard = ShardFile.unlisted(path, self.meta)
        for document in shard.documents(0):
            yield dataclasses.replace(shard.states(document), log_normalizer=None)
        path.unlink()

    def remove(self) -> None:
        """Remove the folder with all that is in it, and that of all sessions if it is empty then."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()


class Adopter:
    """Moves shards into the store of ``writer``. ``responses``: by key, the documents that are wanted there.

    Several threads may adopt at once: what takes long (the log-normalizer, flushing to disk, the digest) is done side
    by side, the writer has one at a time.
    """

    def __init__(self, writer: HiddenStatesWriter, head: TargetHead, responses: Mapping[str, Response]) -> None:
        self._writer = writer
        self._head = head
        self._responses = responses
        self._lock = threading.Lock()
        self._claimed: set[str] = set()  # keys of documents that are being adopted, or have been

    def adopt_leftovers(self) -> int:
        """Adopt what earlier sessions left and remove their folders. Returns the number of tokens that came into the
        store.
        """
        paths = sorted((self._writer.folder / FOLDER).glob("*/*.safetensors"))
        with ThreadPoolExecutor(adopters(), thread_name_prefix="adopt") as pool:
            tokens = sum(pool.map(self.adopt, paths))
        remove_leftovers(self._writer.folder)
        return tokens

    def adopt(self, path: Path) -> int:
        """Take one shard file away: into the store if all its documents are wanted, else those that are, else nowhere.

        Returns the number of tokens that came into the store. Raises ``RunError`` if a wanted hidden state is not
        finite.
        """
        meta = self._writer.meta
        try:
            shard = ShardFile.unlisted(path, meta)
            if json.loads(shard.metadata()[META]) != json.loads(json.dumps(dataclasses.asdict(meta))):
                raise InputError(f"{path} holds hidden states of something else")
            documents = shard.documents(0)
            wanted = self._wanted(documents, shard.tensors())
        except (InputError, KeyError, ValueError):
            wanted = []  # of another configuration, or broken: captured again
        if not wanted:
            path.unlink()
            return 0
        _check_finite(shard, wanted)
        if len(wanted) < len(documents):
            _keep_only(wanted, shard, meta)
            shard = ShardFile.unlisted(path, meta)
            wanted = shard.documents(0)
        _fill_log_normalizer(path, self._log_normalizer(shard, wanted))
        tokens, keys = sum(document.length for document in wanted), [document.key for document in wanted]
        sha256 = file_digest(path)
        with self._lock:
            self._writer.adopt(path, keys, tokens, sha256)
        return tokens

    def _wanted(self, documents: Sequence[StoredDocument], tensors: Mapping[str, Tensor]) -> list[StoredDocument]:
        """Those that are the documents of responses, id for id, and neither in the store yet nor on their way."""
        fitting = []
        for document in documents:
            response = self._responses.get(document.key)
            if response is None or document.split != response.split:
                continue
            rows = slice(document.start, document.start + document.length)
            same_ids = torch.equal(tensors["input_ids"][rows], torch.from_numpy(response.input_ids))
            if same_ids and torch.equal(tensors["loss_mask"][rows], torch.from_numpy(response.loss_mask)):
                fitting.append(document)
        wanted = []
        with self._lock:
            self._claimed |= self._writer.done_keys()
            for document in fitting:
                if document.key not in self._claimed:
                    self._claimed.add(document.key)
                    wanted.append(document)
        return wanted

    def _log_normalizer(self, shard: ShardFile, documents: Sequence[StoredDocument]) -> Tensor:
        """Of the hidden states as stored, where the next token was generated by the target; NaN elsewhere. [T], T all
        tokens of the shard.
        """
        tensors = shard.tensors()
        needed_T = torch.zeros(len(tensors["input_ids"]), dtype=torch.bool)
        for document in documents:
            rows = slice(document.start, document.start + document.length)
            needed_T[rows] = predicts_generated(tensors["loss_mask"][rows])
        normalizer_T = torch.full(needed_T.shape, torch.nan)
        weight = self._head.lm_head_weight
        for positions_C in needed_T.nonzero()[:, 0].split(_CHUNK_TOKENS):
            hidden_CH = shard.last_hidden(positions_C)
            normalizer_T[positions_C] = self._head.log_normalizer(hidden_CH.to(weight.device, weight.dtype)).cpu()
        return normalizer_T


def adopters() -> int:
    """Shards that are adopted side by side."""
    return min(_MOST_ADOPTERS, len(available_cores()))


class AdoptionThread:
    """Adopts the shards of a session in threads of its own, while vLLM works on; as a context manager, all that is
    there at the end is adopted. Without an adopter the session is only watched.
    """

    def __init__(self, session: Session, adopter: Adopter | None) -> None:
        self._session = session
        self._adopter = adopter
        self._pool = ThreadPoolExecutor(adopters(), thread_name_prefix="adopt")
        self._adopted: dict[Path, Future[int]] = {}
        self._looked_s = time.monotonic()

    def look(self) -> None:
        """See to new shards, twice a second at most. Raises ``RunError`` if a shard could not be written or adopted."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._adopt_new()
            self._looked_s = time.monotonic()

    def _adopt_new(self) -> None:
        self._session.check()
        self._session.arrived()  # notes the keys before the files are gone
        for path in self._session.shards():
            if self._adopter is not None and path not in self._adopted:
                self._adopted[path] = self._pool.submit(self._adopter.adopt, path)
        for future in self._adopted.values():
            if future.done():
                future.result()

    def __enter__(self) -> AdoptionThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._pool:
            if error is None:
                self._adopt_new()
        for future in self._adopted.values() if error is None else ():
            future.result()


def _check_finite(shard: ShardFile, documents: Sequence[StoredDocument]) -> None:
    for name, tensor in shard.tensors().items():
        if not tensor.is_floating_point() or name == "log_normalizer" or is_finite(tensor):
            continue
        bad = [d.key for d in documents if not is_finite(tensor[d.start : d.start + d.length])]
        if bad:
            raise NotFiniteError(name.removesuffix("_scale"), where=f" for response {bad[0]}")


def _keep_only(documents: Sequence[StoredDocument], shard: ShardFile, meta: StoreMeta) -> None:
    """Replace a shard file by one that holds only these of its documents, byte for byte."""
    rows_T = torch.cat([torch.arange(document.start, document.start + document.length) for document in documents])
    tensors = {name: shard.tensors()[name][rows_T] for name in token_layout(meta)}
    tensors["offsets"] = torch.tensor([0, *(document.length for document in documents)]).cumsum(0)
    tensors["loss_counts"] = torch.tensor([document.loss_count for document in documents])
    lists = {"keys": [document.key for document in documents], "splits": [document.split for document in documents]}
    metadata = shard.metadata() | {name: json.dumps(entries) for name, entries in lists.items()}
    write_shard(shard.path, tensors, metadata)


def _fill_log_normalizer(path: Path, values_T: Tensor) -> None:
    """Write the values where the file keeps room for them, and flush it to disk.

    A safetensors file is a length (8 bytes, little-endian), a JSON header that says where each tensor's bytes are, and
    the bytes.
    """
    with writing(path, "hidden states"), path.open("r+b") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(header_bytes))["log_normalizer"]["data_offsets"]
        content = values_T.numpy().astype("<f4").tobytes()
        if end - begin != len(content):
            raise RunError(f"{path} keeps {end - begin} bytes for log_normalizer instead of {len(content)}")
        file.seek(8 + header_bytes + begin)
        file.write(content)
    sync(path)
