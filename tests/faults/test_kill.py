"""SIGKILL at any moment, then the same command again: the end is that of a run that was never disturbed.

A child process kills itself before the k-th of the operations that make work durable (``kills.py``); k is drawn anew
for each attempt. Children are forked from a server that has imported everything, because imports take longer than the
work.
"""

import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from kills import die_before

from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.data.responses import ResponseStore
from spectrain.stages.run_dir import RunDir

ATTEMPTS = 12
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["spectrain.stages.run", "spectrain.cli", "spectrain.config.loading"])


def child(arguments, kill_at):
    """Run a command line; die before the ``kill_at``-th durable operation (0: never). Exit code: that of the
    command.
    """
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    die_before(kill_at)
    import spectrain.stages.generate

    spectrain.stages.generate._PART_RESPONSES = 3  # many small parts
    from spectrain.cli import main

    sys.exit(main(arguments))


def run(arguments, kill_at=0):
    process = _SERVER.Process(target=child, args=(arguments, kill_at))
    process.start()
    process.join(300)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode


def run_with_kills(arguments, seed, most):
    """Repeat a command that is killed at random operations, then let it end. Returns the number of kills."""
    draw = random.Random(seed)
    kills = 0
    for _ in range(ATTEMPTS):
        if run(arguments, draw.randint(1, most)) == 0:
            break
        kills += 1
    assert run(arguments) == 0
    return kills


@pytest.fixture(scope="module")
def undisturbed(arguments, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert run(["fit", *arguments, f"run.dir={path}"]) == 0
    return path


def test_generate_and_capture_lose_and_repeat_nothing(arguments, undisturbed, tmp_path):
    path = tmp_path / "killed"
    assert run_with_kills(["capture", *arguments, f"run.dir={path}"], seed=1, most=40) >= 3

    expected = {response.key: response for response in ResponseStore(undisturbed / "responses").load()}
    found = ResponseStore(path / "responses").load()
    assert sum(pq.ParquetFile(part).metadata.num_rows for part in (path / "responses").glob("*.parquet")) == len(found)
    assert {response.key for response in found} == expected.keys()
    for response in found:
        assert response.input_ids.tolist() == expected[response.key].input_ids.tolist()
        assert response.loss_mask.tolist() == expected[response.key].loss_mask.tolist()
        assert response.finish_reason == expected[response.key].finish_reason

    whole, states = StoredHiddenStates(undisturbed / "hidden_states"), StoredHiddenStates(path / "hidden_states")
    states.verify_checksums()
    assert states.keys == whole.keys  # sorted by key: none is missing, none is there twice
    for index in range(len(whole)):
        # Documents are captured in other company after a kill, which moves the last bits.
        np.testing.assert_allclose(states[index].taps.numpy(), whole[index].taps.numpy(), rtol=1e-4, atol=1e-5)
        assert states[index].input_ids.equal(whole[index].input_ids)
    assert leftovers(path) == []


def test_fit_ends_with_the_same_drafter_bit_for_bit(arguments, undisturbed, tmp_path):
    path = tmp_path / "killed"
    shutil.copytree(undisturbed, path)
    # From the same states, so that the last bits are the same too: everything that fit wrote is made again.
    arguments = [*arguments, "trainer.seed=5"]
    other = Path(shutil.copytree(undisturbed, tmp_path / "other"))
    assert run(["fit", *arguments, f"run.dir={other}"]) == 0
    assert run_with_kills(["fit", *arguments, f"run.dir={path}"], seed=2, most=25) >= 3
    assert digest(path / "drafter/model.safetensors") == digest(other / "drafter/model.safetensors")
    assert digest(path / "drafter/model.safetensors") != digest(undisturbed / "drafter/model.safetensors")
    assert sorted(file.name for file in (path / "checkpoints").iterdir()) == sorted(
        file.name for file in (other / "checkpoints").iterdir()
    )
    assert leftovers(path) == []


@pytest.mark.parametrize("kill_at", [18, 28])
def test_a_kill_while_other_taps_replace_the_states_leaves_what_every_setting_goes_on_from(
    arguments, undisturbed, tmp_path, kill_at
):
    """Killed while outputs are being removed (all moments of it: tests/unit/test_restart_kills.py)."""
    path = Path(shutil.copytree(undisturbed, tmp_path / "killed"))
    other = ["drafter.taps=[1,2,3]"]
    assert run(["capture", *arguments, *other, f"run.dir={path}"], kill_at) == -signal.SIGKILL
    assert RunDir(path).manifest()["stages"]["capture"]["status"] == "removing"
    for taps, more in (((1, 2, 3), other), ((2, 3, 4), [])):
        again = Path(shutil.copytree(path, tmp_path / f"with-{taps[0]}"))
        assert run(["capture", *arguments, *more, f"run.dir={again}"]) == 0
        states = StoredHiddenStates(again / "hidden_states")
        assert (states.meta.tap_ids, len(states)) == (taps, 22)
        assert not (again / "drafter").exists()  # it was that of the old states
        assert leftovers(again) == []


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def leftovers(folder):
    """Temporary files that nobody removed."""
    return [path.name for path in folder.rglob("*") if path.name.startswith(".") and path.name != ".lock"]
