"""SIGTERM in every stage, then the same command again: what was finished is kept, and the end is that of a run that was
never disturbed.

A child process sends the signal to itself when a progress bar advances for the k-th time, so the moment does not depend
on how fast the machine is. Children are forked from a server that has imported everything.
"""

import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys

import pyarrow.parquet as pq
import pytest
import torch
from workplace import make

from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.data.responses import ResponseStore

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["spectrain.stages.run", "spectrain.cli", "spectrain.config.loading"])


def child(arguments, title, count, error):
    """Run a command line; SIGTERM at the ``count``-th advance of a bar that is called ``title``."""
    torch.set_num_threads(1)
    os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    from spectrain.console import ProgressBar

    advance, seen = ProgressBar.advance, 0

    def counting(bar, amount, note=None):
        nonlocal seen
        advance(bar, amount, note)
        seen += bar._title == title and amount > 0
        if count and seen == count:
            os.kill(os.getpid(), signal.SIGTERM)

    ProgressBar.advance = counting
    from spectrain.cli import main

    sys.argv = ["spectrain", *arguments]
    sys.exit(main())


def run(arguments, folder, title="", count=0):
    """(exit code, last line of standard error)"""
    error = folder.with_name(f"{folder.name}.err")
    process = _SERVER.Process(target=child, args=([*arguments, f"run.dir={folder}"], title, count, str(error)))
    process.start()
    process.join(300)
    return process.exitcode, error.read_text().splitlines()[-1]


def stop(arguments, folder, title, count):
    """What the last line says was kept."""
    code, line = run(arguments, folder, title, count)
    assert code == 143, line
    found = re.fullmatch(r"stopped by SIGTERM: (.*); the same command continues", line)
    assert found, line
    return found[1]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    return make(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="module")
def undisturbed(arguments, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert run(["run", *arguments], path)[0] == 0
    return path


def test_every_stage_of_a_run(arguments, undisturbed, tmp_path):
    """One run, stopped once in each of them."""
    path, command = tmp_path / "stopped", ["run", *arguments]
    kept = stop(command, path, "generate", 5)
    stored = len(ResponseStore(path / "responses").keys())
    assert kept == f"{stored} of 22 responses are stored"
    assert 5 <= stored < 22
    kept = stop(command, path, "capture", 9)
    stored = len(StoredHiddenStates(path / "hidden_states"))
    assert kept == f"hidden states of {stored} of 22 documents are stored"
    assert 9 <= stored < 22
    assert "fit is not finished" in stop(command, path, "init", 1)
    assert stop(command, path, "fit", 3) == "fit keeps 3 of 8 steps"
    assert stop(command, path, "eval eagle3", 2).startswith("eval/heldout")
    code, _ = run(command, path)
    assert code == 0
    assert responses(path) == responses(undisturbed)
    assert_equal_states(path, undisturbed)
    assert digests(path / "drafter") == digests(undisturbed / "drafter")
    assert measured(path) == measured(undisturbed)
    seconds = json.loads((path / "manifest.json").read_text())["stages"]["fit"]["seconds"]
    assert seconds > 0


# Of eight steps: 0, 3, 6 and 8 are evaluated and saved, an evaluation takes two passes.
FIT = ["trainer.seed=5", "trainer.eval_every_steps=3", "trainer.keep_checkpoints=2"]
MOMENTS = {
    "before the first step": [("simulate", 2)],
    "twice in the same evaluation": [("simulate", 3), ("simulate", 2)],
    "twice between two checkpoints": [("fit", 4), ("fit", 1)],
    "in the last evaluation": [("simulate", 7)],
}


@pytest.fixture(scope="module")
def trained(arguments, undisturbed, tmp_path_factory):
    """From the same hidden states, another drafter."""
    path = shutil.copytree(undisturbed, tmp_path_factory.mktemp("runs") / "trained")
    assert run(["fit", *arguments, *FIT], path)[0] == 0
    assert digests(path / "drafter") != digests(undisturbed / "drafter")
    return path


@pytest.mark.parametrize("moment", MOMENTS)
def test_training_goes_on_exactly(arguments, undisturbed, trained, tmp_path, moment):
    command, path = ["fit", *arguments, *FIT], shutil.copytree(undisturbed, tmp_path / "stopped")
    for title, count in MOMENTS[moment]:
        stop(command, path, title, count)
    assert run(command, path)[0] == 0
    for name in ("drafter", "checkpoints"):
        assert digests(path / name) == digests(trained / name)
    assert metrics(path) == metrics(trained)


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def responses(path):
    """By key; each is stored once."""
    rows = sum(pq.ParquetFile(part).metadata.num_rows for part in (path / "responses").glob("*.parquet"))
    found = ResponseStore(path / "responses").load()
    assert rows == len(found)
    return [(response.key, response.input_ids.tolist(), response.loss_mask.tolist()) for response in found]


def assert_equal_states(path, other):
    """To the bit: documents are captured in the company that they would have had."""
    ours, theirs = (StoredHiddenStates(folder / "hidden_states") for folder in (path, other))
    assert ours.keys == theirs.keys
    for index in range(len(ours)):
        assert ours[index].taps.equal(theirs[index].taps)
        assert ours[index].log_normalizer.nan_to_num().equal(theirs[index].log_normalizer.nan_to_num())


def metrics(path):
    """Without what a clock says."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not re.search(r"_s$|share", key)} for line in lines]


def measured(path):
    records = [json.loads(file.read_text()) for file in sorted((path / "eval").glob("*.json"))]
    return [(record["method"], record["acceptance_length"], record["rounds"]) for record in records]
