"""A training that two launchers start, as on two machines: one set of lines, what one loses the other says, and nothing
is lost.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import pytest

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", **environment},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def by_srun(arguments: list[str]) -> list[subprocess.Popen[str]]:
    """One task on each of two nodes; a shell is what starts tasks there."""
    port = str(free_port())
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "spectrain", *arguments]
    return [start(command, MASTER_PORT=port, SLURM_PROCID=str(rank), **step) for rank in (0, 1)]


def by_torchrun(arguments: list[str]) -> list[subprocess.Popen[str]]:
    nodes = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--nproc_per_node=1"]
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, "-m", "spectrain", *arguments]
    return [start(command) for _ in range(2)]


def ends(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    said = [process.communicate(timeout=240)[1] for process in processes]
    return [process.returncode for process in processes], said


def test_one_machine_is_lost_and_the_same_command_goes_on(arguments, run_dir):
    for output in ("checkpoints", "drafter"):
        shutil.rmtree(run_dir / output)
    (run_dir / "metrics.jsonl").unlink()
    more = ["trainer.packed_length=128", "trainer.epochs=6", "trainer.checkpoint_every_steps=1"]
    command = ["fit", *arguments, *more, f"run.dir={run_dir}"]
    nodes = by_srun(command)
    until = time.monotonic() + 240
    while not list(run_dir.glob("checkpoints/step-*")):
        assert nodes[0].poll() is None and nodes[1].poll() is None and time.monotonic() < until
        time.sleep(0.01)
    os.killpg(nodes[1].pid, signal.SIGKILL)
    codes, said = ends(nodes)
    assert codes == [1, -signal.SIGKILL]
    errors = [line for line in said[0].splitlines() if line.startswith("error")]
    assert len(errors) == 1 and errors[0].startswith("error: rank 0 of 2 has lost another one"), said[0]
    assert said[1] == ""

    codes, said = ends(by_torchrun(command))
    assert codes == [0, 0], said
    assert "".join(said).count("resuming after step") == 1
    trained = Counter()
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        if "loss" in line:
            trained[line["epoch"]] += line["positions"]
    assert set(trained) == set(range(1, 7))
    assert len(set(trained.values())) == 1  # each epoch: all documents, once
