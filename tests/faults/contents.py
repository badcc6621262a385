"""What a run directory holds, but for how it came about: compared after faults with that of a run that met none."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from forked import digests

from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.data.responses import ResponseStore

# What a clock, or the number of attempts, says; and where the drafter of a record lies.
_CLOCK = re.compile(r"_s$|_per_round$|share|seconds|speedup|memory|digest|created|time|^drafter$")


def contents(path: Path) -> dict[str, Any]:
    """Every document and state by its key, to the bit; the drafter's files; metrics and records without times."""
    found: dict[str, Any] = {}
    if (path / "responses").is_dir():
        rows = sum(pq.ParquetFile(part).metadata.num_rows for part in (path / "responses").glob("part-*.parquet"))
        store = ResponseStore(path / "responses").load()
        assert rows == len(store), "a response is stored twice"
        found["responses"] = {
            r.key: (r.split, r.finish_reason, r.input_ids.tolist(), r.loss_mask.tolist()) for r in store
        }
    if (path / "hidden_states").is_dir():
        states = StoredHiddenStates(path / "hidden_states")
        states.verify_checksums()
        found["hidden states"] = {key: _digest(states[number]) for number, key in enumerate(states.keys)}
    for folder in ("drafter", "checkpoints"):
        if (path / folder).is_dir():
            found[folder] = digests(path / folder)
    if (path / "metrics.jsonl").is_file():
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        found["metrics"] = [_without_times(line) for line in lines]
    if (path / "eval").is_dir():
        records = {file.name: json.loads(file.read_text()) for file in (path / "eval").glob("*.json")}
        found["records"] = {name: _without_times(record) for name, record in records.items()}
    return found


def assert_equal(path: Path, undisturbed: Path) -> None:
    """To the digest, and without anything left over."""
    ours, theirs = contents(path), contents(undisturbed)
    assert ours.keys() == theirs.keys()
    for part in theirs:
        assert ours[part] == theirs[part], part
    assert leftovers(path) == []


def leftovers(folder: Path) -> list[str]:
    """Temporary files that nobody removed."""
    return [path.name for path in folder.rglob("*") if path.name.startswith(".") and path.name != ".lock"]


def _digest(states: Any) -> str:
    digest = hashlib.sha256(states.split.encode())
    for tensor in (states.input_ids, states.loss_mask, states.taps, states.last_hidden, states.log_normalizer):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_times(entry) for name, entry in value.items() if not _CLOCK.search(name)}
    return [_without_times(entry) for entry in value] if isinstance(value, list) else value
