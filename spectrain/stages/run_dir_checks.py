"""What ``doctor run.dir=…`` asks a run directory: is everything what was written, and is each thing made of the others?

Reads all of it (hidden states a second or so a GB) and changes nothing but the memory of which shards were found whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spectrain.errors import SpectrainError
from spectrain.files import DIGEST, check_digest
from spectrain.stages.findings import Finding
from spectrain.stages.run_dir import RunDir


def check_run_dir(path: str) -> Iterator[Finding]:
    """Findings about digests, shards and lineage of a run directory."""
    run_dir = RunDir(path)
    try:
        run_dir.check({})
        manifest = run_dir.manifest()
    except SpectrainError as error:
        yield Finding("manifest", "failure", str(error))
        return
    if not manifest["stages"]:
        yield Finding("manifest", "warning", f"{run_dir.path} is no run directory yet", "run a command there first")
        return
    stages = ", ".join(f"{name} {entry['status']}" for name, entry in manifest["stages"].items())
    if _is_whole(run_dir.path / "manifest.json"):
        yield Finding("manifest", "ok", f"its digest is right; {stages}")
    else:
        remedy = "nothing: the next command that works there writes it again"
        yield Finding("manifest", "warning", "damaged, its copy is used", remedy)
    for name, check in (
        ("responses", _responses),
        ("hidden states", _hidden_states),
        ("checkpoints", _checkpoints),
        ("drafter", _drafter),
        ("records", _records),
    ):
        yield from _said(name, lambda check=check: check(run_dir, manifest))  # type: ignore[misc]


def _is_whole(file: Path) -> bool:
    """Whether a JSON file is what was written, rather than its copy."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        check_digest(content, file, "")
    except (OSError, ValueError, SpectrainError):
        return False
    return DIGEST in content


def _said(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; what it raises names the file and what to do."""
    try:
        yield from check()
    except SpectrainError as error:
        yield Finding(name, "failure", str(error))


def _responses(run_dir: RunDir, manifest: dict[str, Any]) -> Iterator[Finding]:
    from spectrain.data.responses import ResponseStore

    if not run_dir.responses.is_dir():
        return
    count, recorded = len(ResponseStore(run_dir.responses).keys()), run_dir.outputs("generate").get("documents")
    if recorded is not None and count < recorded:
        text = f"{count:,} of the {recorded:,} that generate wrote"
        yield Finding("responses", "failure", text, "run generate again, which answers the others anew")
    else:
        yield Finding("responses", "ok", f"{count:,}, digests of all parts are right")


def _hidden_states(run_dir: RunDir, manifest: dict[str, Any]) -> Iterator[Finding]:
    from spectrain.data.hidden_states import INDEX_NAME, StoreIndex
    from spectrain.data.responses import ResponseStore
    from spectrain.data.shard_damage import damaged_shards, readable_shards

    folder = run_dir.hidden_states
    if not (folder / INDEX_NAME).is_file():
        return
    shards, keys, broken = readable_shards(folder)
    broken |= damaged_shards(folder, shards)
    remedy = "run capture again, which makes these shards alone anew"
    for name, problem in sorted(broken.items()):
        yield Finding("hidden states", "failure", f"{name}: {problem}", remedy)
    if not broken:
        yield Finding("hidden states", "ok", f"{len(keys):,} documents in {len(shards):,} shards, checksums are right")
    meta, target = StoreIndex.load(folder).meta, manifest["target"] or {}
    if target and (meta.target, meta.target_revision) != (target["id"], target["revision"]):
        text = f"they are of {meta.target} at {meta.target_revision[:12]}, the run of {target['id']}"
        yield Finding("lineage", "failure", text, "remove hidden_states and run capture again")
    if run_dir.responses.is_dir():
        orphans = set(keys) - ResponseStore(run_dir.responses).keys()
        if orphans:
            text = f"{len(orphans):,} documents with hidden states have no response"
            yield Finding("lineage", "warning", text, "they are not trained on; run capture again to be rid of them")


def _checkpoints(run_dir: RunDir, manifest: dict[str, Any]) -> Iterator[Finding]:
    from spectrain.training.checkpointing import damage

    paths = sorted(run_dir.checkpoints.glob("step-*")) if run_dir.checkpoints.is_dir() else []
    problems = [problem for path in paths if (problem := damage(path)) is not None]
    for problem in problems:
        yield Finding("checkpoints", "warning", problem, "nothing: fit goes on from the one before")
    if paths and not problems:
        yield Finding("checkpoints", "ok", f"{len(paths)}, all whole")


def _drafter(run_dir: RunDir, manifest: dict[str, Any]) -> Iterator[Finding]:
    from spectrain.drafters.drafter_digests import check_weights, config_changed
    from spectrain.drafters.drafter_folder import load_drafter, weights_digest
    from spectrain.drafters.serving_config import read_serving_config

    folder, fitted = run_dir.drafter, run_dir.outputs("fit")
    if not folder.is_dir():
        return
    check_weights(folder)
    load_drafter(folder)
    if config_changed(folder):
        text, remedy = "config.json is not what was written", "if the change is not yours, it is damaged: train again"
        yield Finding("drafter", "warning", text, remedy)
    elif fitted.get("weights") and not weights_digest(folder).startswith(fitted["weights"]):
        text = "these are not the weights that fit recorded"
        yield Finding("lineage", "failure", text, "run fit again, or bring back a copy of the drafter")
    else:
        yield Finding("drafter", "ok", f"its digests are right, sha256 {weights_digest(folder)[:12]}")
    serving, target = read_serving_config(str(folder)), manifest["target"] or {}
    if target and serving.target_revision not in (None, target["revision"]):
        text = f"the drafter was trained for revision {str(serving.target_revision)[:12]}, the run is of another"
        yield Finding("lineage", "failure", text, "train it again in a run.dir of its own")
    stages = manifest["stages"]
    captured = (stages.get("capture") or {}).get("inputs", {}).get("growing", {}).get("responses")
    learnt = (stages.get("fit") or {}).get("inputs", {}).get("fixed", {}).get("responses")
    if captured and learnt and captured != learnt:
        text = f"the drafter learnt from {learnt} responses, {captured} are captured now"
        yield Finding("lineage", "warning", text, "run fit again to learn from all")
    elif fitted:
        yield Finding("lineage", "ok", "target, responses, hidden states and drafter belong together")


def _records(run_dir: RunDir, manifest: dict[str, Any]) -> Iterator[Finding]:
    from spectrain.drafters.serving_config import drafter_digest
    from spectrain.evaluation.records import STAGE_PREFIX, read_records

    records = read_records(run_dir.eval) if run_dir.eval.is_dir() else []
    if not records:
        return
    yield Finding("records", "ok", f"{len(records)}, digests are right")
    if not run_dir.drafter.is_dir():
        return
    digest = drafter_digest(run_dir.drafter)
    entries = {name: entry for name, entry in manifest["stages"].items() if name.startswith(STAGE_PREFIX)}
    others = [name for name, entry in entries.items() if entry["inputs"]["fixed"].get("drafter") not in (None, digest)]
    if others:
        text = f"{', '.join(others)} measured another drafter than the one that is here now"
        yield Finding("lineage", "warning", text, "run eval again")
