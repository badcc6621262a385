"""From hidden states to packed batches, ahead of the trainer: torch's ``DataLoader`` over a source of documents.

What a batch consists of is decided by the trainer (``BatchRequest``), so workers carry a source of hidden states and
nothing else; any number of them gives the same batches in the same order, bit for bit. Requests are taken one by one
from an iterator: a training that goes on in the middle of an epoch begins there and reads nothing of what came before.

Workers are spawned, not forked: they import torch and this package's data modules, and hold neither the target nor
anything that lives on a device. Each takes about two seconds to start, once a training. Its batches lie in shared
memory (/dev/shm) that is used again (``batch_slots.py``): each byte is copied once, from the map of a shard to where
the trainer reads it. With 0 workers batches are made when they are asked for, in the trainer's own process.

Cost on a CPU: to make a batch of 64 MiB takes a worker 8 ms, to receive it takes the trainer one. On a CPU a step takes
seconds, so there is nothing to gain, and workers are for accelerators.
"""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from spectrain.data.batch_slots import BatchSlots, InSlot
from spectrain.data.hidden_states import HiddenStateSource, StoreMeta, bytes_per_token
from spectrain.data.packing import Draw, PackedBatch, pack_batch
from spectrain.data.state_types import STATE_DTYPES
from spectrain.errors import RunError

# Batches that a trainer has at a time, beside those that were made ahead: the one it works with and the next.
_HELD = 2
_COLUMN_BYTES, _ROOM_BYTES = 64, 4096  # a token's ids and numbers, and what aligning takes
_DEAD_WORKER = re.compile(r"DataLoader worker \(pid")  # how torch's messages about it begin


@dataclass(frozen=True)
class BatchRequest:
    """Documents of one micro-batch, by their numbers in the source; each is cut at ``max_tokens``."""

    documents: tuple[int, ...]
    max_tokens: int
    draw: Draw | None = None
    slot: int | None = None  # of the loader's own, for a batch that a worker makes


@dataclass(frozen=True)
class _Failure:
    """Why there is no batch, in words: exceptions do not always survive the way to another process."""

    message: str


class _Batches(Dataset[PackedBatch | InSlot | _Failure]):
    """Packed batches by request: what a worker holds."""

    def __init__(self, source: HiddenStateSource, slots: BatchSlots | None) -> None:
        self._source = source
        self._slots = slots

    def __getitem__(self, request: BatchRequest) -> PackedBatch | InSlot | _Failure:
        documents = []
        for number in request.documents:
            try:
                documents.append(self._source.as_stored(number))  # 8 bits travel as they are
            except Exception as error:  # whatever a source raises: the trainer must hear of it, with the document
                key, what = self._source.keys[number], str(error) or type(error).__name__
                return _Failure(what if key in what else f"the hidden states of document {key} cannot be read: {what}")
        try:
            writer = None if self._slots is None or request.slot is None else self._slots.writer(request.slot)
            join = torch.cat if writer is None else writer.join
            batch = pack_batch(documents, request.max_tokens, request.draw, join)
            return batch if writer is None else writer.laid(batch)
        except Exception as error:
            keys = ", ".join(document.key for document in documents)
            return _Failure(f"no batch can be made of the hidden states of {keys}: {error}")


def _as_it_is(batch: Any) -> Any:
    return batch


class BatchLoader:
    """An iterator of the batches of ``requests``, on the CPU (in pinned memory where ``device`` is a CUDA device).

    Use as a context manager: workers end with it. ``waited_s``: seconds that the caller has waited for batches so far.
    Raises ``RunError`` for a document that cannot be read; and for a worker that was killed, whatever the trainer is
    doing at that moment.
    """

    def __init__(
        self,
        source: HiddenStateSource,
        requests: Iterable[BatchRequest],
        device: torch.device,
        workers: int = 0,
        prefetch: int = 2,
    ) -> None:
        """``prefetch``: batches that every worker makes ahead, and that a source without workers is told ahead."""
        asked, self._slots = iter(requests), None
        if workers:
            asked, self._slots = _with_slots(asked, source, workers * prefetch + _HELD)
        loader = DataLoader(
            _Batches(source, self._slots),
            batch_size=None,
            sampler=asked if workers else _announced(asked, source, prefetch),  # each goes to the dataset
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            multiprocessing_context="spawn" if workers else None,
            collate_fn=_as_it_is,
            worker_init_fn=_ignore_warnings if workers else None,
            pin_memory=device.type == "cuda",
            # Without one of its own, torch would draw the workers' seed from the random stream of the process.
            generator=torch.Generator(),
        )
        # One pass over all steps, so the same workers serve a training from its beginning to its end.
        self._batches: Iterator[PackedBatch | InSlot | _Failure] = iter(loader)
        self.waited_s = 0.0

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> PackedBatch:
        started = time.perf_counter()
        try:
            batch = next(self._batches)
            if isinstance(batch, InSlot):
                batch = batch.batch()
        except (OSError, EOFError, RuntimeError) as error:  # documents raise none of these, see _Batches
            raise _worker_died(error) from error
        self.waited_s += time.perf_counter() - started
        if isinstance(batch, _Failure):
            raise RunError(batch.message)
        return batch

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        batches, self._batches = self._batches, iter(())
        with suppress(RuntimeError):  # of a worker that dies while it is being ended
            _end_workers(batches)
        # A worker that dies makes torch raise in the main thread, from a signal handler, whatever runs there.
        if isinstance(error, RuntimeError) and _DEAD_WORKER.match(str(error)):
            raise _worker_died(error) from error


def _end_workers(batches: Any) -> None:
    """Without this workers end when the iterator is collected, which the frames of an exception put off."""
    workers = getattr(batches, "_workers", ())
    if getattr(batches, "_shutdown", True) or not any(worker.exitcode for worker in workers):
        getattr(batches, "_shutdown_workers", lambda: None)()
        return
    # Whoever was killed may hold the lock of the event by which torch tells the others to end: it would wait for ever.
    with suppress(ValueError):  # it has been told already
        signal_handling._remove_worker_pids(id(batches))
    batches._worker_pids_set, batches._shutdown = False, True
    for worker in workers:
        worker.kill()
        worker.join()


def _with_slots(
    requests: Iterator[BatchRequest], source: HiddenStateSource, count: int
) -> tuple[Iterator[BatchRequest], BatchSlots | None]:
    """The requests, with a slot each where one is free when it is asked, and the slots; none for a source that does not
    say how large its documents are, or where there is no room for them.
    """
    first, meta = next(requests, None), getattr(source, "meta", None)
    if first is None or meta is None:
        return iter(() if first is None else itertools.chain([first], requests)), None
    most = max(first.max_tokens, _tokens(first, source))
    try:
        slots = BatchSlots(count, most * _batch_bytes_per_token(meta) + _ROOM_BYTES)
    except (RuntimeError, OSError):  # /dev/shm is too small: workers may still be lucky
        return itertools.chain([first], requests), None

    def with_slots() -> Iterator[BatchRequest]:
        for request in itertools.chain([first], requests):
            yield replace(request, slot=slots.take() if _tokens(request, source) <= most else None)

    return with_slots(), slots


def _batch_bytes_per_token(meta: StoreMeta) -> int:
    """At most: a last hidden state that is a tap is stored once, and is in a batch twice."""
    again = 0 if meta.last_hidden_tap is None else meta.hidden_size * (STATE_DTYPES[meta.dtype].itemsize + 1)
    return bytes_per_token(meta) + again + _COLUMN_BYTES


def _tokens(request: BatchRequest, source: HiddenStateSource) -> int:
    return sum(min(int(source.lengths[number]), request.max_tokens) for number in request.documents)


def announce(source: HiddenStateSource, documents: Iterable[int]) -> None:
    """Tell a source that has to ask for them which documents will be wanted next, in this order."""
    expect = getattr(source, "expect", None)  # stored ones are there
    if expect is not None:
        expect(list(documents))


def _announced(requests: Iterable[BatchRequest], source: HiddenStateSource, ahead: int) -> Iterator[BatchRequest]:
    """``requests``, each announced while ``ahead`` others wait before it."""
    waiting: deque[BatchRequest] = deque()
    for request in requests:
        announce(source, request.documents)
        waiting.append(request)
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


def _ignore_warnings(number: int) -> None:
    """Slurm warns all processes of a step: what is to be done about it, the one that trains does."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _worker_died(error: Exception) -> RunError:
    reason = (str(error) or type(error).__name__).splitlines()[0].strip()
    return RunError(
        f"a worker that makes batches of hidden states has died ({reason}), most likely because memory ran out (the "
        f"machine's, or that of /dev/shm): lower trainer.loader_workers; 0 makes batches without workers"
    )
