"""The cost of starting: seconds and memory before the first prompt is answered, the first document captured, the first
training step, by the number of documents.

    python tests/bench/bench_startup.py [--documents 10000] [--stages generate capture fit] [--folder /tmp] [--profile]

For 10^3, 10^4 … documents up to the number given, a run directory of a tiny target is filled with what a run would have
written: a prompt file, responses of 48 tokens in parts of 256, as `generate` writes them, and hidden states in shards
of 512 documents. `generate` finds prompts alone, `capture` responses, too, `fit` all of it. Token columns are written;
hidden states are zeros in sparse files, so they have a size and a checksum and take no disk. Then each command runs in
a process of its own and ends where the target or the trainer would begin. Seconds are from the process's start, imports
and checks included, and of the processor; memory is the greatest resident set (all of it, mapped files too) and, at the
end, what is the process's own. "a document" is the difference to the smallest run.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import hashlib
import json
import os
import pstats
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from spectrain.stages.run_dir import RunDir

TOKENS, PROMPT = 48, 24  # of a document, and of these, its prompt
PART, SHARD = 256, 512  # responses of a part, documents of a shard
HELDOUT = 64
STAGES = ("generate", "capture", "fit")
_SETTLES_S = 2.1  # what changed just now is not remembered
_WORDS = ("cat", "dog", "sun", "tree", "river", "stone", "blue", "red", "fast", "slow")


class _BegunError(BaseException):
    """The work itself has begun: what was to be measured is over."""


@dataclass(frozen=True)
class Start:
    """Of one command. ``own_bytes``: without mapped files."""

    stage: str
    documents: int
    seconds: float
    cpu_seconds: float  # of all its threads: what a machine that is busy with other things does not change
    peak_bytes: int
    own_bytes: int


# --- the run directory ----------------------------------------------------------------------------------------------


def arguments(folder: Path) -> list[str]:
    """Of every command over the run directory in ``folder``."""
    return [
        *("data=jsonl", f"data.train={folder / 'train.jsonl'}", f"data.heldout={folder / 'heldout.jsonl'}"),
        *(f"target.path={folder / 'target'}", "target.name=tiny", "target.max_length=256", "sampling.temperature=0"),
        *("sampling.max_new_tokens=32", "drafter.draft_vocab_size=100", "drafter.taps=[1,2]", "drafter.init=target"),
        *("trainer.packed_length=2048", "trainer.eval_documents=8", f"run.dir={folder / 'run'}"),
    ]


def write_workplace(folder: Path, documents: int) -> None:
    """A target, and prompts for so many documents."""
    from spectrain.target.tiny_targets import tiny_target

    tiny_target("llama", folder / "target", num_hidden_layers=2)
    for name, numbers in (("train", range(HELDOUT, documents)), ("heldout", range(HELDOUT))):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number in numbers:
                file.write(json.dumps({"turns": [f"Tell me about {_WORDS[number % 10]} number {number}."]}) + "\n")


def _context(folder: Path) -> Any:
    """Of the run, but for its prompts, which would be read and screened."""
    from spectrain.config.commands import COMMANDS
    from spectrain.config.loading import compose
    from spectrain.stages.checks import prepare

    few = [f"data.train={folder / 'heldout.jsonl'}", "data.heldout=[]", f"run.dir={folder / 'few'}"]
    context = prepare(compose([*arguments(folder), *few]), COMMANDS["fit"])
    context.config = compose(arguments(folder))
    context.run_dir = context.data_dir = RunDir(folder / "run")
    return context


def write_responses(folder: Path) -> None:
    """The responses of all prompts, as ``generate`` would have stored them, and what it remembers of the prompts."""
    from spectrain.data.prompts import PromptSplit, load_prompts
    from spectrain.stages.known_prompts import remember

    context = _context(folder)
    train, heldout = (load_prompts(folder / f"{name}.jsonl") for name in ("train", "heldout"))
    context.keep_prompts(PromptSplit(train, heldout))
    with context.run_dir.locked():
        context.open_run_dir()
        _write_parts(context.run_dir.responses, list(context.asked.keys), [*train, *heldout], context.sampling)
        time.sleep(_SETTLES_S)
        remember(context)


def write_states(folder: Path) -> None:
    """The hidden states of all responses."""
    from spectrain.data.responses import ResponseStore

    context = _context(folder)
    keys = list(ResponseStore(context.run_dir.responses).key_column())
    _write_shards(context.run_dir.hidden_states, keys, context.store_meta())


def _ids(count: int, seed: int) -> object:
    import numpy as np

    return np.random.default_rng(seed).integers(10, 300, (count, TOKENS), dtype=np.int32)


def _write_parts(folder: Path, keys: Sequence[str], prompts: Sequence, sampling: object) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from spectrain.data.response_parts import SCHEMA

    folder.mkdir(parents=True, exist_ok=True)
    for part, first in enumerate(range(0, len(keys), PART)):
        own, conversations = keys[first : first + PART], prompts[first : first + PART]
        count = len(own)
        offsets = pa.array(np.arange(count + 1, dtype=np.int32) * TOKENS)
        mask = np.tile((np.arange(TOKENS) >= PROMPT).astype(np.uint8), count)
        constants = {"finish_reason": "length", "split": "train", **vars(sampling)}
        columns = {
            "key": own,
            "input_ids": pa.ListArray.from_arrays(offsets, pa.array(_ids(count, first).ravel())),
            "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(mask)),
            "id": [c.id for c in conversations],
            "turns": [c.turns for c in conversations],
            **{name: [value] * count for name, value in constants.items()},
        }
        table = pa.table([pa.array(columns.get(f.name, [None] * count), f.type) for f in SCHEMA], schema=SCHEMA)
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer, compression="zstd")
        content = buffer.getvalue()
        name = f"part-{part:05d}-{hashlib.sha256(content).hexdigest()[:16]}.parquet"
        (folder / name).write_bytes(content)


def _write_shards(folder: Path, keys: Sequence[str], meta: object) -> None:
    from spectrain.data.hidden_states import ShardRecord, StoreIndex
    from spectrain.data.shard_damage import remember_verified
    from spectrain.files import FileState

    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for shard, first in enumerate(range(0, len(keys), SHARD)):
        own = keys[first : first + SHARD]
        path = folder / f"shard-{shard:05d}.safetensors"
        ids = [_ids(len(own[i : i + PART]), first + i) for i in range(0, len(own), PART)]
        _write_shard(path, own, ids, meta)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        records.append(ShardRecord(path.name, len(own), len(own) * TOKENS, path.stat().st_size, digest))
    StoreIndex(meta, tuple(records)).write(folder)
    time.sleep(_SETTLES_S)
    remember_verified(folder, {r.file: [*FileState.of(folder / r.file), r.sha256] for r in records})  # as capture does


def _write_shard(path: Path, keys: Sequence[str], ids: Sequence, meta: object) -> None:
    """A safetensors file by hand: what is not token columns stays a hole."""
    import numpy as np

    from spectrain.data.hidden_states import token_layout

    count = len(keys)
    written = {
        "offsets": np.arange(count + 1, dtype=np.int64) * TOKENS,
        "loss_counts": np.full(count, TOKENS - PROMPT, dtype=np.int64),
        "input_ids": np.concatenate(ids).ravel(),
        "loss_mask": np.tile((np.arange(TOKENS) >= PROMPT).astype(np.uint8), count),
        "log_normalizer": np.full(count * TOKENS, 5.7, dtype=np.float32),
    }
    names = {"int64": "I64", "int32": "I32", "uint8": "U8", "float32": "F32", "bfloat16": "BF16", "int8": "I8"}
    sizes = {name: (names[str(a.dtype)], a.shape, a.nbytes) for name, a in written.items()}
    for name, (dtype, shape) in token_layout(meta).items():
        whole = (count * TOKENS, *shape)
        size = dtype.itemsize * int(np.prod(whole))
        sizes.setdefault(name, (names[str(dtype).removeprefix("torch.")], whole, size))
    header: dict[str, object] = {
        "__metadata__": {"keys": json.dumps(keys), "splits": json.dumps(["train"] * count)},
    }
    end = 0
    for name in sorted(sizes, key=lambda name: (name not in ("offsets", "loss_counts"), name == "loss_mask", name)):
        dtype, shape, size = sizes[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, array in written.items():
            file.seek(8 + len(text) + header[name]["data_offsets"][0])  # type: ignore[index]
            file.write(array.tobytes())
        file.truncate(8 + len(text) + end)


# --- measuring ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stopped_where_work_begins(stage: str) -> Iterator[None]:
    place = {
        "generate": "spectrain.engines.hf.ResponseGenerator._prefill",
        "capture": "spectrain.engines.hf.capture_batch",
        "fit": "spectrain.training.trainer.Trainer._step",
    }[stage]
    with mock.patch(place, side_effect=_BegunError):
        yield


def start(stage: str, folder: Path) -> None:
    """Run a command in this process up to its first piece of work; raises RuntimeError where it ends before."""
    from spectrain import cli

    try:
        with _stopped_where_work_begins(stage):
            code = cli.main([stage, *arguments(folder)])
    except _BegunError:
        return
    raise RuntimeError(f"{stage} ended with {code} before it began to work")


def _memory() -> tuple[int, int]:
    """Of this process: the greatest resident set, and what is not mapped from files now, in bytes."""
    found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, mapped, now = (int(found[name].split()[0]) * 1024 for name in ("VmHWM", "RssFile", "VmRSS"))
    return peak, max(now - mapped, 0)


def _measure_here(stage: str, folder: Path, documents: int, since: float, profile: bool) -> None:
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    start(stage, folder)
    if profile:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(60)
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    print(json.dumps([stage, documents, time.time() - since, time.process_time(), *_memory()]), flush=True)
    os._exit(0)  # nothing of the command is to be ended properly


def measure(stage: str, folder: Path, documents: int, profile: bool = False) -> Start:
    """The start of a command, in a process of its own."""
    call = [sys.executable, __file__, "--measure", stage, "--workplace", str(folder), "--documents", str(documents)]
    call += ["--since", str(time.time()), *(["--profile"] if profile else [])]
    done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True)
    return Start(*json.loads(done.stdout.splitlines()[-1]))


def measure_all(documents: int, stages: Sequence[str], root: Path | None, profile: bool = False) -> list[Start]:
    """Each stage's start at so many documents, one after the other in one run directory."""
    found = []
    with tempfile.TemporaryDirectory(dir=root) as name:
        folder = Path(name)
        write_workplace(folder, documents)
        for stage in sorted(stages, key=STAGES.index):
            if stage != "generate" and not list((folder / "run" / "responses").glob("part-*")):
                write_responses(folder)
            if stage == "fit":
                write_states(folder)
            found.append(measure(stage, folder, documents, profile))
    return found


def table(starts: Sequence[Start]) -> str:
    """In Markdown. What a document costs is the difference to the smallest number of documents."""
    lines = [
        "| | documents | seconds | of the processor | peak, MB | own, MB | processor µs a document "
        "| peak bytes a document |",
        "|---|" + "---|" * 7,
    ]
    for one in sorted(starts, key=lambda one: (STAGES.index(one.stage), one.documents)):
        least = min((s for s in starts if s.stage == one.stage), key=lambda s: s.documents)
        more = one.documents - least.documents
        each = (
            ("", "")
            if not more
            else (
                f"{(one.cpu_seconds - least.cpu_seconds) / more * 1e6:,.0f}",
                f"{(one.peak_bytes - least.peak_bytes) / more:,.0f}",
            )
        )
        lines.append(
            f"| {one.stage} | {one.documents:,} | {one.seconds:.1f} | {one.cpu_seconds:.1f} "
            f"| {one.peak_bytes / 1e6:,.0f} | {one.own_bytes / 1e6:,.0f} | {each[0]} | {each[1]} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000, help="the greatest number of documents")
    parser.add_argument("--only", action="store_true", help="that number alone, not the powers of ten below it")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: the temporary folder)")
    parser.add_argument("--profile", action="store_true", help="where the time goes, to standard error")
    for hidden in ("--measure", "--workplace", "--since"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        _measure_here(given.measure, Path(given.workplace), given.documents, float(given.since), given.profile)
    sizes = [given.documents]
    while not given.only and sizes[0] > 1000:
        sizes.insert(0, sizes[0] // 10)
    starts = [one for size in sizes for one in measure_all(size, given.stages, given.folder, given.profile)]
    print(table(starts))


if __name__ == "__main__":
    main()
