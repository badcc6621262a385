"""Sweeps by launchers that run jobs in other processes, as those for Slurm do: what they pickle can be unpickled there,
and what a job raises there comes back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny import tiny_target
from workplace import make

from spectrain import cli

pytest.importorskip("cloudpickle")

# A launcher as they come in packages: the state of the parent goes to a fresh process, the result comes back.
LAUNCHER = """
import os, pickle, subprocess, sys, tempfile

import cloudpickle
from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.plugins.launcher import Launcher

CHILD = __file__.replace("hydra_plugins/child_launcher/__init__.py", "child.py")
NODE = {"_target_": "hydra_plugins.child_launcher.ChildLauncher"}
ConfigStore.instance().store(group="hydra/launcher", name="child", node=NODE, provider="child")


class ChildLauncher(Launcher):
    def setup(self, *, hydra_context, task_function, config):
        self.parts = (hydra_context, task_function, config)

    def launch(self, job_overrides, initial_job_idx):
        return [self.run(list(job), initial_job_idx + index) for index, job in enumerate(job_overrides)]

    def run(self, overrides, number):
        with tempfile.TemporaryDirectory() as folder:
            files = [os.path.join(folder, name) for name in ("job", "result")]
            with open(files[0], "wb") as file:
                cloudpickle.dump((Singleton.get_state(), *self.parts, overrides, number), file)
            subprocess.run([sys.executable, CHILD, *files], check=True)
            with open(files[1], "rb") as file:
                return pickle.load(file)
"""
CHILD = """
import pickle, sys

import cloudpickle
from hydra.core.singleton import Singleton
from hydra.core.utils import run_job, setup_globals
from omegaconf import open_dict

with open(sys.argv[1], "rb") as file:
    state, context, task, config, overrides, number = pickle.load(file)
Singleton.set_state(state)
setup_globals()
job = context.config_loader.load_sweep_config(config, overrides)
with open_dict(job):
    job.hydra.job.id, job.hydra.job.num = str(number), number
print("in another process", file=sys.stderr)
result = run_job(
    hydra_context=context, task_function=task, config=job,
    job_dir_key="hydra.sweep.dir", job_subdir_key="hydra.sweep.subdir", configure_logging=False,
)
with open(sys.argv[2], "wb") as file:
    cloudpickle.dump(result, file)
"""


@pytest.fixture
def sweep(tmp_path):
    """``fit -m`` in an empty working directory with prompts, in a process where the launcher is installed."""
    plugin = tmp_path / "site/hydra_plugins/child_launcher"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(LAUNCHER, encoding="utf-8")
    (tmp_path / "site/child.py").write_text(CHILD, encoding="utf-8")
    working_dir = tmp_path / "work"
    working_dir.mkdir()
    lines = [json.dumps({"turns": [f"Say {number}."]}) + "\n" for number in range(8)]
    (working_dir / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        given = ["data=jsonl", "data.train=prompts.jsonl", "sampling.max_new_tokens=16", "target.max_length=256"]
        command = [sys.executable, "-m", "spectrain", "fit", "-m", "hydra/launcher=child", *given, *arguments]
        return subprocess.run(command, cwd=working_dir, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def tiny_run(tmp_path):
    """Arguments of a sweep over one value, by submitit on this machine, and the folder of its job."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    path = tmp_path / "sweep"
    given = ["fit", "-m", "hydra/launcher=submitit_local", *make(tmp_path), "trainer.seed=choice(3)", f"run.dir={path}"]
    return [sys.executable, "-m", "spectrain", *given, "trainer.checkpoint_every_steps=1"], path / "trainer.seed=3"


@pytest.mark.slow
def test_a_job_of_submitit_is_warned_and_goes_on(tiny_run):
    command, path = tiny_run
    long = [*command, "trainer.epochs=2000"]
    with subprocess.Popen(long, stderr=subprocess.PIPE, text=True) as sweep:
        deadline = time.monotonic() + 240
        while not list(path.glob("checkpoints/step-*")):
            assert sweep.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        (job,) = {int(log.name.split("_")[0]) for log in path.parent.glob(".submitit/*/*_log.err")}
        (process,) = psutil.Process(job).children()  # its number is that of the process which starts it
        process.send_signal(signal.SIGUSR1)
        _, said = sweep.communicate(timeout=120)
    (log,) = path.parent.glob(f".submitit/{job}/*_log.err")
    assert "stopped by SIGUSR1: fit keeps" in log.read_text()
    assert sweep.returncode == 1
    assert [line for line in said.splitlines() if line.startswith("error: a job of the sweep")]
    kept = max(path.glob("checkpoints/step-*")).name
    done = subprocess.run([*command, "trainer.epochs=2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (path / "drafter/model.safetensors").is_file()
    assert kept > "step-00000000"


def test_where_slurm_is_not_a_line_says_so_before_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    given = [*make(tmp_path), "trainer.seed=1,2", f"run.dir={tmp_path / 'sweep'}"]
    assert cli.main(["fit", "-m", "hydra/launcher=slurm_mi300x", *given]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "hydra/launcher=slurm_mi300x" in said
    assert not (tmp_path / "sweep").exists()


def test_the_shipped_launcher_of_slurm_composes(monkeypatch, tmp_path):
    """What submitit is given: eight ranks on a node, and how they find each other."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    found = {}

    class Executor:
        def __init__(self, **options):
            pass

        def update_parameters(self, **params):
            found.update({name.removeprefix("slurm_"): value for name, value in params.items()})
            raise RuntimeError("not here")

    monkeypatch.setattr("shutil.which", lambda name: "/bin/true")
    monkeypatch.setattr("submitit.AutoExecutor", Executor)
    given = [*make(tmp_path), "run.task=0,1", "run.tasks=2", f"run.dir={tmp_path / 'run'}"]
    assert cli.main(["capture", "-m", "hydra/launcher=slurm_mi300x", "hydra.launcher.partition=gpu", *given]) == 1
    wanted = {"tasks_per_node": 8, "gpus_per_node": 8, "nodes": 1, "partition": "gpu", "signal_delay_s": 120}
    assert {name: found[name] for name in wanted} == wanted
    assert any("MASTER_ADDR" in line for line in found["setup"])
    assert os.environ["SUBMITIT_PREEMPT_SIGNAL"] == "USR1"


def test_jobs_in_other_processes(sweep, tmp_path):
    target = tiny_target("llama", tmp_path / "tiny", num_hidden_layers=7)
    done = sweep(f"target.path={target}", "trainer.learning_rate=choice(2e-4)", "run.dir=sweep", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "in another process\nrun.dir=sweep/trainer.learning_rate=0.0002\n" in done.stderr
    assert "taps [2, 3, 4]" in done.stdout
    assert not (Path(tmp_path) / "work/sweep").exists()


def test_an_error_in_another_process_is_the_line_and_exit_code_of_the_command(sweep):
    done = sweep("target.path=nowhere/at/all", "data.max_train=choice(4)")
    said = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert done.returncode == 2
    assert len(said) == 1
    assert said[0].startswith("error: target.path=nowhere/at/all is not a folder")
    assert "Traceback" not in done.stderr
