"""A stage starts anew because an input changed, and is killed at each moment of that: neither the new inputs nor the
old ones find a directory in which nothing can be done any more.
"""

from __future__ import annotations

import os
import shutil
import signal
from itertools import count
from pathlib import Path

import pytest
from kills import die_before
from state_stores import make_meta, make_states, shard_of_tokens

from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.shard_damage import stored_keys
from spectrain.stages.run_dir import Inputs, RunDir

OLD, NEW = (0, 3), (1, 3)
DOCUMENTS = [make_states(number, 10) for number in range(4)]
KEYS = {states.key for states in DOCUMENTS}


def capture(path: Path, taps: tuple[int, ...]) -> None:
    """As the stage does it, with hidden states from nowhere."""
    run_dir = RunDir(path)

    def lacking() -> str:
        return "" if stored_keys(run_dir.hidden_states) == KEYS else "outputs are missing"

    with run_dir.locked():
        decision = run_dir.decide("capture", Inputs({"drafter.taps": taps}, {"responses": "4"}), lacking)
        if decision.skip:
            return
        meta = make_meta(tap_ids=taps)
        with (
            run_dir.running(decision),
            HiddenStatesWriter(run_dir.hidden_states, meta, shard_of_tokens(meta, 20)) as writer,
        ):
            for states in DOCUMENTS:
                if states.key not in writer.done_keys():
                    writer.add(states)


def capture_and_die(path: Path, taps: tuple[int, ...], kill_at: int) -> bool:
    """In a fork of this process, which has everything imported. Whether it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            die_before(kill_at)
            capture(path, taps)
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def finished(path: Path) -> RunDir:
    """A directory whose stages have all run."""
    capture(path, OLD)
    run_dir = RunDir(path)
    with run_dir.locked(), run_dir.running(run_dir.decide("fit", Inputs({}, {}), lambda: "")):
        for folder in (run_dir.drafter, run_dir.checkpoints / "step-00000001"):
            folder.mkdir(parents=True)
            (folder / "model.safetensors").touch()
        run_dir.metrics.touch()
    return run_dir


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_restart_leaves_what_every_setting_can_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # a kill, other than a power cut, loses no buffers
    whole = finished(tmp_path / "whole").path
    for kill_at in count(1):
        killed = shutil.copytree(whole, tmp_path / f"killed-{kill_at}")
        was_killed = capture_and_die(killed, NEW, kill_at)
        for taps in (OLD, NEW):
            path = shutil.copytree(killed, tmp_path / f"killed-{kill_at}-{taps[0]}")
            untouched = taps == OLD and RunDir(path).manifest()["stages"].get("capture", {})["inputs"]["fixed"] == {
                "drafter.taps": list(OLD)
            }
            capture(path, taps)
            store = StoredHiddenStates(path / "hidden_states")
            store.verify_checksums()
            assert (store.meta.tap_ids, set(store.keys)) == (taps, KEYS)
            # What was made of the old states is there with them, or not at all.
            assert (path / "drafter").exists() == (path / "metrics.jsonl").exists() == untouched
            assert [file.name for file in path.rglob(".*") if file.name != ".lock"] == []
        if not was_killed:
            break
    assert kill_at > 20
