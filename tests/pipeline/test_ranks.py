"""Several processes that train together, started as a user starts them: one drafter, one set of lines, one code."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from workplace import make

pytestmark = pytest.mark.slow

SPECTRAIN = (sys.executable, "-m", "spectrain")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "spectrain")
ACCELERATE = (
    *(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "-m", "spectrain"),
)


def start(launcher: tuple[str, ...], arguments: list[str], **settings: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        [*launcher, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **settings,
    )


def run(launcher: tuple[str, ...], arguments: list[str]) -> tuple[int, str]:
    """(exit code, what went to stderr)"""
    process = start(launcher, arguments)
    _, said = process.communicate(timeout=300)
    return process.returncode, said


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    # Two micro-batches of a step, so that two ranks have as many as one rank that accumulates.
    folder = tmp_path_factory.mktemp("workplace")
    return [*make(folder), "trainer.packed_length=128", "trainer.epochs=3", "trainer.checkpoint_every_steps=1"]


@pytest.fixture(scope="module")
def alone(arguments, tmp_path_factory):
    """One rank that accumulates two micro-batches: the same global batches as those of two ranks."""
    path = tmp_path_factory.mktemp("alone") / "run"
    code, said = run(SPECTRAIN, ["run", *arguments, "trainer.gradient_accumulation=2", f"run.dir={path}"])
    assert code == 0, said
    return path


@pytest.fixture(scope="module")
def two(arguments, tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "run"
    code, said = run(SPECTRAIN, ["run", *arguments, "trainer.devices=2", f"run.dir={path}"])
    assert code == 0, said
    return path, said


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "drafter/model.safetensors")


def steps(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_two_ranks_are_one_that_accumulates(alone, two):
    path, _ = two
    assert len(steps(path)) == len(steps(alone)) >= 6
    for found, expected in zip(steps(path), steps(alone), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["positions"] == expected["positions"]
    for name, expected in weights(alone).items():
        torch.testing.assert_close(weights(path)[name], expected, rtol=1e-2, atol=1e-3)
    records = [json.loads((folder / "eval/heldout-hf-eagle3-n3-t0.json").read_text()) for folder in (alone, path)]
    assert records[0]["acceptance_length"] == records[1]["acceptance_length"]


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_sharded_by_the_command(strategy, arguments, alone, two, tmp_path):
    """The folder is whole and the checkpoint goes on elsewhere; one set of lines, none of the engine's."""
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    path = Path(shutil.copytree(two[0], tmp_path / "run"))
    for output in ("checkpoints", "drafter"):
        shutil.rmtree(path / output)
    (path / "metrics.jsonl").unlink()
    command = ["fit", *arguments, f"run.dir={path}", "trainer.gradient_checkpointing=true"]
    code, said = run(SPECTRAIN, [*command, "trainer.devices=2", f"trainer.strategy={strategy}"])
    assert code == 0, said
    assert said.count("is the best") == 1 and "DeepSpeed" not in said and "Warning" not in said
    for found, expected in zip(steps(path), steps(alone), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-3)
    for name, expected in weights(alone).items():
        torch.testing.assert_close(weights(path)[name], expected, rtol=1e-2, atol=1e-3)


def test_one_rank_prints(two):
    _, said = two
    for once in ("is the best", "initialisation solved", "answers cut off", "report.html"):
        assert said.count(once) == 1, once


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_launchers(launcher, arguments, two, tmp_path):
    """On states that are there, and with an error that every rank meets: one line, whoever started the ranks."""
    code, said = run(launcher, ["fit", *arguments, f"run.dir={two[0]}"])
    assert code == 0, said
    assert said.count("fit: unchanged, skipped") == 1
    code, said = run(launcher, ["fit", *arguments, f"run.dir={tmp_path / 'new'}", "trainer.epochs=none"])
    assert code != 0
    assert len([line for line in said.splitlines() if line.startswith("error: trainer.epochs")]) == 1
    assert not (tmp_path / "new").exists()


def test_an_error_of_the_first_rank_ends_all_with_its_code_and_line(arguments, tmp_path):
    (tmp_path / "run").write_text("a file")
    code, said = run(SPECTRAIN, ["fit", *arguments, "trainer.devices=2", f"run.dir={tmp_path / 'run'}"])
    assert code == 2
    assert [line for line in said.splitlines() if line.startswith("error")] == said.splitlines()
    assert len(said.splitlines()) == 1


def test_an_error_that_all_ranks_meet_in_training_is_said_once(arguments, two, tmp_path):
    path = Path(shutil.copytree(two[0], tmp_path / "run"))
    for shard in (path / "hidden_states").glob("shard-*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(shard)
        broken = {name: t.fill_(math.nan) if t.is_floating_point() else t for name, t in tensors.items()}
        save_file(broken, shard, metadata)
    given = ["trainer.devices=2", "hidden_states.verify_checksums=false", "drafter.init=target"]
    code, said = run(SPECTRAIN, ["fit", *arguments, *given, f"run.dir={path}"])
    assert code == 1
    assert len([line for line in said.splitlines() if line.startswith("error")]) == 1


@pytest.mark.parametrize("whom", ["launcher", "rank 1"])
def test_killed_on_two_ranks_and_resumed_on_one_and_on_two(whom, arguments, alone, two, tmp_path):
    """Every document is seen once an epoch, whatever the number of ranks it goes on with."""
    path = Path(shutil.copytree(two[0], tmp_path / "run"))
    for output in ("checkpoints", "drafter"):
        shutil.rmtree(path / output)
    (path / "metrics.jsonl").unlink()
    command = ["fit", *arguments, "trainer.epochs=4", f"run.dir={path}"]
    said = kill_when(start(SPECTRAIN, [*command, "trainer.devices=2"]), path, "step-00000002", whom)
    assert ("error: rank 1 was ended by SIGKILL" in said) == (whom == "rank 1")
    said = kill_when(start(SPECTRAIN, command), path, "step-00000005", "launcher", signal.SIGTERM)
    assert said.count("stopped by SIGTERM: fit keeps") == 1
    code, said = run(SPECTRAIN, [*command, "trainer.devices=2"])
    assert code == 0, said
    trained = Counter()
    for line in steps(path):
        trained[line["epoch"]] += line["positions"]
    assert set(trained) == {1, 2, 3, 4}
    assert len(set(trained.values())) == 1  # of every epoch: the positions of all documents


def test_signals_to_the_launcher_and_to_each_rank(arguments, two, tmp_path):
    """Whoever gets it, all end with its code and one line, and the same command goes on to the same drafter."""
    path = Path(shutil.copytree(two[0], tmp_path / "run"))
    for output in ("checkpoints", "drafter"):
        shutil.rmtree(path / output)
    command = ["fit", *arguments, "trainer.devices=2", f"run.dir={path}"]
    moments = [("rank 1", signal.SIGUSR1, 138, 2), ("rank 0", signal.SIGTERM, 143, 4)]
    for whom, number, code, step in moments:
        process = start(SPECTRAIN, command)
        said = kill_when(process, path, f"step-{step:08d}", whom, number)
        assert process.returncode == code, said
        assert said.count(f"stopped by {number.name}: fit keeps") == 1
        assert "error" not in said
    code, said = run(SPECTRAIN, command)
    assert code == 0
    assert "resuming after step" in said
    assert (path / "drafter/model.safetensors").read_bytes() == (two[0] / "drafter/model.safetensors").read_bytes()


def test_signals_where_each_rank_holds_a_share(arguments, two, tmp_path):
    """Between checkpoints, too, all bring what they hold; the end is that of a run that nobody disturbed."""
    paths = [Path(shutil.copytree(two[0], tmp_path / name)) for name in ("undisturbed", "stopped")]
    for path in paths:
        for output in ("checkpoints", "drafter"):
            shutil.rmtree(path / output)
        (path / "metrics.jsonl").unlink()
    more = ["trainer.devices=2", "trainer.strategy=fsdp2", "trainer.epochs=8", "trainer.checkpoint_every_steps=1000"]
    undisturbed, stopped = (["fit", *arguments, *more, f"run.dir={path}"] for path in paths)
    code, said = run(SPECTRAIN, undisturbed)
    assert code == 0, said
    path, total, kept = paths[1], len(steps(paths[0])), 0
    for whom, number, code in (("launcher", signal.SIGTERM, 143), ("rank 1", signal.SIGUSR1, 138)):
        process = start(SPECTRAIN, stopped)
        said = signal_when(process, path, lambda seen=kept + 2: len(steps_so_far(path)) >= seen, whom, number)
        assert process.returncode == code, said
        assert "error" not in said and "death signal" not in said
        found = re.findall(f"stopped by {number.name}: fit keeps (\\d+) of {total}", said)
        assert len(found) == 1, said
        before, kept = kept, int(found[0])
        assert before + 2 <= kept < total
        assert newest(path) == f"step-{kept:08d}"
    code, said = run(SPECTRAIN, stopped)
    assert code == 0, said
    assert f"resuming after step {kept} of {total}" in said
    for name in ("drafter/model.safetensors", f"checkpoints/step-{total:08d}/optimizer.safetensors"):
        assert (paths[1] / name).read_bytes() == (paths[0] / name).read_bytes()
    assert [line["loss"] for line in steps(paths[1])] == [line["loss"] for line in steps(paths[0])]


def steps_so_far(path: Path) -> list[dict[str, Any]]:
    return steps(path) if (path / "metrics.jsonl").is_file() else []


def newest(path: Path) -> str:
    return max((f.name for f in path.glob("checkpoints/step-*")), default="")


def kill_when(
    process: subprocess.Popen[str],
    path: Path,
    checkpoint: str,
    whom: str,
    number: signal.Signals = signal.SIGKILL,
) -> str:
    """A signal once this run has made a checkpoint of that name, or a newer one. Returns what went to stderr."""
    before = newest(path)  # a signal makes one, too: the run before may have come further
    return signal_when(process, path, lambda: newest(path) >= checkpoint and newest(path) != before, whom, number)


def signal_when(
    process: subprocess.Popen[str], path: Path, ready: Callable[[], bool], whom: str, number: signal.Signals
) -> str:
    until = time.monotonic() + 240
    while not ready():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)
    victim = process.pid
    if whom.startswith("rank"):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        victim = int(children[int(whom.split()[1]) - 2])
    os.kill(victim, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    deadline = time.monotonic() + 30  # ranks end with the one who started them, and with each other
    while any(str(path) in command for command in running_commands()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return said


def running_commands() -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return found
