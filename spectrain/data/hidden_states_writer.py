"""Writing the hidden-state store of ``hidden_states.py``: shard by shard, each one finished before the index names it.

A shard is gathered in memory (``hidden_states_shard.py``), written whole, and only then listed in ``index.json``, which
is itself replaced in one step. Whenever the process is killed, the index names whole shards only; whatever else lies in
the folder is a leftover and is removed by the next writer. Shards that vLLM wrote are adopted as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from spectrain.console import say
from spectrain.data.hidden_states import (
    INDEX_NAME,
    ShardRecord,
    StoreIndex,
    StoreMeta,
    TargetStates,
)
from spectrain.data.hidden_states_shard import ShardBuffer
from spectrain.data.shard_damage import readable_shards, remember_verified, take_out
from spectrain.data.string_column import Strings
from spectrain.errors import NotFiniteError, SpectrainError
from spectrain.files import FileState, remove_partials


class HiddenStatesWriter:
    """Adds documents to a store, new or begun. Use as a context manager, or call ``close``.

    Shards that cannot be read are taken out of a begun store: their documents count as missing, those of others remain.
    Raises ``InputError`` if the folder holds hidden states of something else (naming the field that differs),
    ``RunError`` if it cannot be written.
    """

    def __init__(self, folder: str | Path, meta: StoreMeta, shard_bytes: int = 1 << 30) -> None:
        self.folder = Path(folder)
        self.meta = meta
        self._gathered = ShardBuffer(meta, shard_bytes)
        self._shards: list[ShardRecord] = []
        self._digested: dict[str, FileState] = {}  # shards whose digest was taken here, as they were right after
        self._stored = Strings()  # keys in the shards that were there
        self._added: set[str] = set()  # and in those finished since
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / INDEX_NAME).exists():
            StoreIndex.load(self.folder).meta.check(dataclasses.asdict(meta), self.folder)
            shards, keys, broken = readable_shards(self.folder)
            for problem in broken.values():
                say(f"capture: {problem}")
            if broken:
                take_out(self.folder, broken)
            self._shards = [shard.record for shard in shards]
            self._stored = keys
        self._remove_leftovers()

    @cached_property
    def _known(self) -> set[str]:
        """Keys in finished shards, and those gathered for the next one. A set of a million takes 200 MB: made when the
        first document is added.
        """
        return {*self._stored, *self._added}

    def done_keys(self) -> set[str]:
        """Keys of the documents in finished shards: they survive a kill and need not be captured again."""
        return {*self._stored, *self._added}

    def done_column(self) -> Strings:
        """As ``done_keys``, in one block of memory."""
        return Strings.joined([self._stored, Strings(self._added)]) if self._added else self._stored

    def add(self, states: TargetStates) -> None:
        """Copy one document into the shard being gathered, and write the shard when it is full.

        A document longer than a whole shard gets one of its own. Raises ``RunError`` if a hidden state is not finite: a
        bad document is never stored and never replaced by another.
        """
        if states.key in self._known:
            raise ValueError(f"hidden states of {states.key} are already in {self.folder}")
        if states.log_normalizer is None:
            raise ValueError(
                f"hidden states of {states.key} have no log_normalizer: compute it with TargetHead.log_normalizer "
                f"before storing them"
            )
        for name in ("taps", "last_hidden"):
            if not is_finite(getattr(states, name)):
                raise NotFiniteError(name, where=f" for response {states.key}")
        if not all(is_finite(x) for pair in states.target_kv.values() for x in pair):
            raise NotFiniteError("keys or values", where=f" for response {states.key}")
        last = self.meta.last_hidden_tap
        if last is not None and not torch.equal(states.taps[:, last], states.last_hidden):
            raise ValueError(f"hidden states of {states.key}: tap {self.meta.num_layers} is not the last hidden state")
        if not self._gathered.fits(states.input_ids.shape[0]):
            self.flush()
        self._gathered.add(states)
        self._known.add(states.key)
        if self._gathered.full:
            self.flush()

    def adopt(self, path: Path, keys: Sequence[str], tokens: int, sha256: str) -> None:
        """Take a whole shard file of this digest, of this store's layout and on its file system, into the store: it is
        moved, then listed.

        Its documents must be new, and what is in it has been checked (``engines/vllm/adopt_states.py``).
        """
        known = self._known.intersection(keys)
        if known:
            raise ValueError(f"hidden states of {min(known)} are already in {self.folder}")
        place = self._next_shard()
        path.replace(place)
        self._known.update(keys)
        self._list(place, keys, tokens, sha256)

    def flush(self) -> None:
        """Write what has been gathered as a shard, then list it in the index."""
        keys, tokens = self._gathered.keys, self._gathered.tokens
        if not keys:
            return
        path = self._next_shard()
        sha256 = self._gathered.write(path)
        self._list(path, keys, tokens, sha256)

    def close(self) -> None:
        """Write the last shard. A store without any document has an index too."""
        self.flush()
        if not self._shards:
            self._write_index()
        self._remember_digested()
        self._gathered = ShardBuffer(self.meta, 0)  # its memory is free

    def __enter__(self) -> HiddenStatesWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with nullcontext() if error is None else suppress(SpectrainError):  # the first error is the one to tell
            self.close()  # after an error too: the documents gathered so far are whole

    def _next_shard(self) -> Path:
        numbers = [int(record.file.removeprefix("shard-").partition(".")[0]) for record in self._shards]
        return self.folder / f"shard-{max(numbers, default=-1) + 1:05d}.safetensors"

    def _list(self, path: Path, keys: Sequence[str], tokens: int, sha256: str) -> None:
        """Name a finished shard in the index."""
        self._digested[path.name] = state = FileState.of(path)
        self._shards.append(ShardRecord(path.name, len(keys), tokens, state.size, sha256))
        self._write_index()
        self._added.update(keys)

    def _write_index(self) -> None:
        StoreIndex(self.meta, tuple(self._shards)).write(self.folder)

    def _remember_digested(self) -> None:
        """What was digested when it was written need not be read again, unless it is so new that a change since would
        not show.
        """
        digests = {record.file: record.sha256 for record in self._shards}
        settled = {name: state for name, state in self._digested.items() if state.settled}
        if settled:
            remember_verified(self.folder, {name: [*state, digests[name]] for name, state in settled.items()})

    def _remove_leftovers(self) -> None:
        remove_partials(self.folder)
        listed = {record.file for record in self._shards}
        for path in self.folder.glob("shard-*.safetensors"):
            if path.name not in listed:
                path.unlink()


def is_finite(x: Tensor) -> bool:
    """Without a temporary of the size of ``x``; infinities and NaN both show in the extremes."""
    if x.dtype == torch.float8_e4m3fn:  # which has no infinities, and no minimum in torch
        return not bool(((x.view(torch.uint8) & 0x7F) == 0x7F).any())
    return x.numel() == 0 or all(bool(extreme.isfinite()) for extreme in x.aminmax())
