"""Read throughput of the hidden-state store against a raw read of the same bytes, side by side.

    python tests/bench/bench_store.py [--mib 512] [--folder /tmp] [--repeats 3]

Every reader takes the documents in the same shuffled order and ends with their bytes in a buffer of its own, as a
trainer's packing does. ``raw`` seeks and reads each document from one flat file. "Cold" is after the operating system
was told to drop the files from its cache (Linux only; a virtual disk may have a cache of its own), "warm" with all of
them in memory. int8 counts the bytes it delivers, as float32. One thread each.

Then the trainer's loader, from the warm float32 store: batches of 2048 tokens, made by the reader itself (0 workers) or
by worker processes that hand them over in shared memory; without their start, which is shown apart.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from spectrain.data.hidden_states import StoredHiddenStates, StoreMeta, TargetStates, bytes_per_token
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.loader import BatchLoader, BatchRequest
from spectrain.data.packing import pack_rows

HIDDEN, LAYERS, TAPS, LENGTHS = 576, 30, (2, 15, 27), range(100, 700)
BATCH_TOKENS = 2048


def make_meta(dtype: str) -> StoreMeta:
    return StoreMeta("bench", "0", "0", "0", "0", TAPS, HIDDEN, LAYERS, dtype)


def write_stores(folder: Path, total_bytes: int) -> tuple[list[int], dict[str, float]]:
    """One store for each dtype and a flat file with the bytes of the bfloat16 one. Returns lengths and write speeds."""
    lengths, left, rng = [], total_bytes // bytes_per_token(make_meta("bfloat16")), random.Random(0)
    while left > 0:
        lengths.append(min(rng.choice(LENGTHS), left))
        left -= lengths[-1]
    noise = torch.randn(max(lengths), len(TAPS) + 1, HIDDEN)
    speeds = {}
    for dtype in ("bfloat16", "float32", "int8"):
        start = time.perf_counter()
        with HiddenStatesWriter(folder / dtype, make_meta(dtype), shard_bytes=128 << 20) as writer:
            for number, length in enumerate(lengths):
                x = noise[:length].to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
                ids = torch.zeros(length, dtype=torch.int32)
                writer.add(
                    TargetStates(
                        ids, ids.to(torch.uint8), x[:, 1:], x[:, 0], noise[:length, 0, 0], f"{number:06d}", "train"
                    )
                )
        speeds[dtype] = StoredHiddenStates(folder / dtype).total_bytes / (time.perf_counter() - start)
    with (folder / "raw.bin").open("wb") as file:
        for length in lengths:
            file.write(noise[:length].to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return lengths, speeds


def read_raw(path: Path, lengths: list[int], order: list[int], buffer: torch.Tensor) -> int:
    row, starts, view = (len(TAPS) + 1) * HIDDEN * 2, [0], memoryview(buffer.view(torch.uint8).numpy()).cast("B")
    for length in lengths:
        starts.append(starts[-1] + length * row)
    with path.open("rb", buffering=0) as file:
        for index in order:
            size, done = lengths[index] * row, 0
            file.seek(starts[index])
            while done < size:
                done += file.readinto(view[done:size])
    return starts[-1]


def read_store(folder: Path, order: list[int], buffer: torch.Tensor) -> int:
    store, read = StoredHiddenStates(folder), 0
    for index in order:
        states = store[index]
        length, split = len(states.input_ids), states.taps.numel()
        flat = buffer.view(states.taps.dtype)
        flat[:split].view(states.taps.shape).copy_(states.taps)
        flat[split : split + length * HIDDEN].view(length, HIDDEN).copy_(states.last_hidden)
        read += (states.taps.numel() + states.last_hidden.numel()) * states.taps.element_size()
    return read


def drop_from_cache(folder: Path) -> bool:
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    return True


def load_batches(store: StoredHiddenStates, workers: int) -> tuple[float, float, float]:
    """Milliseconds to the first batch, milliseconds a batch after that, and the bytes of a second."""
    rows = pack_rows(store.lengths.tolist(), BATCH_TOKENS, 0, 0)
    requests = [BatchRequest(tuple(row), BATCH_TOKENS) for row in rows]
    read, start = 0, time.perf_counter()
    with BatchLoader(store, requests, torch.device("cpu"), workers) as loader:
        next(loader)
        first = time.perf_counter()
        for batch in loader:
            read += batch.taps_TAH.nbytes + batch.last_hidden_TH.nbytes
        end = time.perf_counter()
    return (first - start) * 1e3, (end - first) * 1e3 / (len(requests) - 1), read / (end - first)


def speed(read: Callable[[], int]) -> float:
    start = time.perf_counter()
    return read() / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the bfloat16 store")
    parser.add_argument("--folder", default=None, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        lengths, write_speeds = write_stores(folder, arguments.mib << 20)
        order = random.Random(1).sample(range(len(lengths)), len(lengths))
        buffer = torch.empty(max(lengths) * (len(TAPS) + 1) * HIDDEN * 4, dtype=torch.uint8)
        readers: dict[str, Callable[[], int]] = {"raw": lambda: read_raw(folder / "raw.bin", lengths, order, buffer)}
        for dtype in write_speeds:
            readers[dtype] = lambda dtype=dtype: read_store(folder / dtype, order, buffer)
        print(
            f"{len(lengths)} documents, {sum(lengths):,} tokens, {arguments.mib} MiB in bfloat16; MB/s, best of "
            f"{arguments.repeats}"
        )
        print(f"{'reader':<10}{'write':>10}{'cold':>10}{'warm':>10}{'cold/raw':>10}{'warm/raw':>10}")
        cold, warm = dict.fromkeys(readers, 0.0), dict.fromkeys(readers, 0.0)
        for _ in range(arguments.repeats):  # interleaved, so that other load on the machine meets all readers
            for reader, read in readers.items():
                if drop_from_cache(folder):
                    cold[reader] = max(cold[reader], speed(read))
                read()
                warm[reader] = max(warm[reader], speed(read))
        for reader in readers:
            write = f"{write_speeds[reader] / 1e6:,.0f}" if reader in write_speeds else ""
            ratios = (cold[reader] / cold["raw"] if cold["raw"] else 0.0, warm[reader] / warm["raw"])
            print(
                f"{reader:<10}{write:>10}{cold[reader] / 1e6:>10,.0f}{warm[reader] / 1e6:>10,.0f}{ratios[0]:>10.2f}{ratios[1]:>10.2f}"  # noqa: E501
            )
        print(f"\n{'loader':<10}{'first, ms':>10}{'batch, ms':>10}{'MB/s':>10}")
        for workers in (0, 1, 2):
            first, each, rate = load_batches(StoredHiddenStates(folder / "float32"), workers)
            print(f"{workers} workers {first:>10,.0f}{each:>10,.1f}{rate / 1e6:>10,.0f}")


if __name__ == "__main__":
    main()
