"""The share of a step that training waits for stored hidden states, beside a device that is only simulated.

    python tests/bench/bench_waiting.py [--mib 1024] [--folder /tmp] [--rates 0.5 1 2 4]

A store of hidden states of width 4096 with three taps (32 KiB a token in bfloat16) lies in memory, so a disk is not in
question: what is measured is what the loader does, from the memory map to a packed batch of 2,048 tokens. A step is a
sleep: the time in which a device that takes so many GB of bfloat16 hidden states a second would compute it (EAGLE-3 on
an 8B target at 40 % of an H100's peak takes about 2.6; `spectrain plan` says what a training takes). What is stored in
8 bits is as many tokens a second, in half the bytes. Waiting is counted as in ``data_wait_share`` of metrics.jsonl, the
first batch left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from spectrain.data.hidden_states import StoredHiddenStates, StoreMeta, TargetStates, bytes_per_token
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.loader import BatchLoader, BatchRequest
from spectrain.data.packing import pack_rows

HIDDEN, LAYERS, TAPS, LENGTHS, BATCH_TOKENS = 4096, 32, (2, 16, 29), (200, 500, 900, 1400), 2048


def make_meta(dtype: str) -> StoreMeta:
    return StoreMeta("bench", "0", "0", "0", "0", TAPS, HIDDEN, LAYERS, dtype)


def write_store(folder: Path, dtype: str, total_bytes: int) -> StoredHiddenStates:
    """As many tokens as ``total_bytes`` hold in bfloat16."""
    left, number = total_bytes // bytes_per_token(make_meta("bfloat16")), 0
    noise = torch.randn(max(LENGTHS), len(TAPS) + 1, HIDDEN).to(torch.bfloat16)
    with HiddenStatesWriter(folder, make_meta(dtype), shard_bytes=256 << 20) as writer:
        while left > 0:
            length = min(LENGTHS[number % len(LENGTHS)], left)
            ids = torch.zeros(length, dtype=torch.int32)
            x = noise[:length]
            parts = (x[:, 1:], x[:, 0], torch.zeros(length), f"{number:06d}", "train")
            writer.add(TargetStates(ids, ids.to(torch.uint8), *parts))
            left, number = left - length, number + 1
    return StoredHiddenStates(folder)


def waiting_share(store: StoredHiddenStates, workers: int, rate: float) -> tuple[float, float]:
    """(share of all steps, GB of bfloat16 hidden states a second that were trained on)."""
    requests = [BatchRequest(tuple(row), BATCH_TOKENS) for row in pack_rows(store.lengths, BATCH_TOKENS, 0, 0)]
    each, trained = bytes_per_token(make_meta("bfloat16")), 0
    with BatchLoader(store, requests, torch.device("cpu"), workers) as loader:
        time.sleep(next(loader).num_tokens * each / rate)
        waited_before, started = loader.waited_s, time.perf_counter()
        for batch in loader:
            time.sleep(batch.num_tokens * each / rate)
            trained += batch.num_tokens
        took = time.perf_counter() - started
    return (loader.waited_s - waited_before) / took, trained * each / took / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the store in bfloat16")
    parser.add_argument("--folder", default=None, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0], help="GB/s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| stored as | workers | the device takes, GB/s | waiting | trained on, GB/s |\n|---|---|---|---|---|")
    for dtype in ("bfloat16", "int8"):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            store = write_store(Path(folder), dtype, arguments.mib << 20)
            waiting_share(store, 0, 1e12)  # into memory
            for workers in (0, 1, 2):
                for rate in arguments.rates:
                    share, trained = waiting_share(store, workers, rate * 1e9)
                    print(f"| {dtype} | {workers} | {rate:g} | {share:.1%} | {trained:.2f} |", flush=True)


if __name__ == "__main__":
    main()
