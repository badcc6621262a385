"""The share of a step that training waits for stored hidden states, beside a device that is only simulated.

    python tests/bench/bench_waiting.py [--mib 384] [--folder /tmp] [--batches 48]

A store of hidden states of width 4096 with three taps (32 KiB a token in bfloat16) lies in memory, so a disk is not in
question: what is measured is what the loader does, from the memory map to a packed batch of 2,048 tokens in the
trainer's process. A step is a sleep: the batch is copied at 4 GB/s (a slow host; PCIe 4 does six times as much), then
EAGLE-3 on a target of Qwen3-8B's size is trained on it at the operations that ``plan`` counts and 40 % of the device's
peak. "none" computes nothing, so all that a step does is to copy. What is stored in 8 bits is copied in half the bytes.
Waiting is counted as in ``data_wait_share`` of metrics.jsonl, from the first batch on that was not made before. Beside
it stands what a batch takes of a processor, in the trainer's process and in its workers: on a machine whose cores are
busy with other things that figure tells more, as workers wait for nobody else but for a core.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen3Config

from spectrain.config.loading import compose
from spectrain.config.plan_schema import DEVICES, PlanConfig
from spectrain.data.hidden_states import StoredHiddenStates, StoreMeta, TargetStates, bytes_per_token
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.loader import BatchLoader, BatchRequest
from spectrain.data.packing import PackedBatch, pack_rows
from spectrain.drafters.registry import find_method
from spectrain.drafters.training_cost import CorpusSize
from spectrain.stages.plan import fit_flops
from spectrain.target.spec import TargetSpec

HIDDEN, LAYERS, TAPS, LENGTHS, BATCH_TOKENS = 4096, 36, (2, 18, 33), (200, 500, 900, 1400), 2048
QWEN3_8B = Qwen3Config(
    hidden_size=HIDDEN,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
    num_hidden_layers=LAYERS,
)
ANSWERED = 0.7  # share of the tokens that the target generated
COPIED_PER_S = 4e9  # bytes
PREFETCH = 2  # as in trainer.prefetch_batches


def make_meta(dtype: str) -> StoreMeta:
    return StoreMeta("bench", "0", "0", "0", "0", TAPS, HIDDEN, LAYERS, dtype)


def write_store(folder: Path, dtype: str, total_bytes: int) -> StoredHiddenStates:
    """As many tokens as ``total_bytes`` hold in bfloat16."""
    left, number = total_bytes // bytes_per_token(make_meta("bfloat16")), 0
    noise = torch.randn(max(LENGTHS), len(TAPS) + 1, HIDDEN).to(torch.bfloat16)
    with HiddenStatesWriter(folder, make_meta(dtype), shard_bytes=128 << 20) as writer:
        while left > 0:
            length = min(LENGTHS[number % len(LENGTHS)], left)
            ids = torch.zeros(length, dtype=torch.int32)
            x = noise[:length]
            parts = (x[:, 1:], x[:, 0], torch.zeros(length), f"{number:06d}", "train")
            writer.add(TargetStates(ids, ids.to(torch.uint8), *parts))
            left, number = left - length, number + 1
    return StoredHiddenStates(folder)


def seconds_per_token(device: str) -> float:
    """Of a named device's arithmetic, as ``plan`` counts it for one epoch."""
    if device == "none":
        return 0.0
    arguments = [f"drafter.taps=[{','.join(map(str, TAPS))}]", "drafter.draft_vocab_size=32000"]
    config = compose(["recipe=quickstart", "drafter=eagle3", *arguments])
    method, spec = find_method(config.drafter.method), TargetSpec.from_config(QWEN3_8B)
    with torch.device("meta"):
        body = method.body(method.shape(config.drafter, spec))
    matrices = {name: p.numel() for name, p in body.named_parameters() if p.ndim > 1}
    corpus = CorpusSize(1_000_000, int(1_000_000 * ANSWERED))
    cost = method.training_cost(config.drafter, config.trainer, matrices, corpus)
    numbers: Any = SimpleNamespace(training_cost=cost, tokens=corpus.tokens, generated_tokens=corpus.generated_tokens)
    context: Any = SimpleNamespace(config=config, spec=spec)
    peak = DEVICES[device].peak_flops("bfloat16") * PlanConfig().utilisation
    return fit_flops(context, numbers) / peak / corpus.tokens


def batch_bytes(batch: PackedBatch) -> int:
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in (*tensors, *batch.scales.values()))


def requests(store: StoredHiddenStates, batches: int) -> Iterator[BatchRequest]:
    """So many full ones: epoch after epoch."""
    left = batches
    for epoch in count():
        for row in pack_rows(store.lengths, BATCH_TOKENS, 0, epoch):
            if sum(store.lengths[row]) == BATCH_TOKENS or len(row) > 1:
                yield BatchRequest(tuple(row), BATCH_TOKENS)
                left -= 1
                if not left:
                    return


def processor_s() -> tuple[float, float]:
    """Seconds of this process, and of those that it has started and that still run."""
    workers = 0.0
    for child in active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        workers += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return time.process_time(), workers


def waiting(
    store: StoredHiddenStates, workers: int, compute: float, batches: int
) -> tuple[float, float, float, float, float]:
    """(share of all steps, GB of batches trained on a second; milliseconds of a step itself, and what a batch takes of
    the trainer's processor and of its workers').
    """
    ahead = 1 + workers * PREFETCH  # made before the first step, so they do not count
    moved = 0.0

    def step() -> float:
        nonlocal moved
        batch = next(loader)
        seconds = batch_bytes(batch) / COPIED_PER_S + batch.num_tokens * compute
        time.sleep(seconds)
        moved += batch_bytes(batch)
        return seconds

    with BatchLoader(store, requests(store, batches + ahead), torch.device("cpu"), workers, PREFETCH) as loader:
        for _ in range(ahead):
            step()
        waited, moved, started, before = loader.waited_s, 0.0, time.perf_counter(), processor_s()
        working = sum(step() for _ in range(batches))
        took = time.perf_counter() - started
        own, theirs = ((after - since) / batches * 1e3 for after, since in zip(processor_s(), before, strict=True))
        return (loader.waited_s - waited) / took, moved / took / 1e9, working / batches * 1e3, own, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=384, help="size of the store in bfloat16")
    parser.add_argument("--folder", default=None, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--batches", type=int, default=48, help="of each measurement")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| stored as | device | a step, ms | workers | waiting | trained on, GB/s | a batch: own ms | workers' ms |")
    print("|---|" + "---|" * 7)
    for dtype in ("bfloat16", "int8"):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            store = write_store(Path(folder), dtype, arguments.mib << 20)
            waiting(store, 0, 0.0, 8)  # into memory
            for device in ("h100", "mi300x", "none"):
                for workers in (0, 2):
                    share, speed, *ms = waiting(store, workers, seconds_per_token(device), arguments.batches)
                    step_ms, own_ms, worker_ms = (f"{each:.1f}" for each in ms)
                    line = (dtype, device, step_ms, workers, f"{share:.1%}", f"{speed:.2f}", own_ms, worker_ms)
                    print("| " + " | ".join(map(str, line)) + " |", flush=True)


if __name__ == "__main__":
    main()
