"""What launchers say to a process that is to be one of several: said wrongly, one line, and nobody waits."""

from __future__ import annotations

import os

import pytest

from spectrain.errors import ConfigError, RunError
from spectrain.training.distributed import joined

TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",  # beyond the step's two tasks, within the job's four
    "SLURM_LOCALID": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("said", "names"),
    [
        (TORCHRUN | {"RANK": None}, "RANK is not set"),
        (TORCHRUN | {"RANK": "x"}, "RANK is x"),
        (TORCHRUN | {"RANK": "2"}, "RANK is 2, where 0 to 1"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is -1"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2"),
        (TORCHRUN | {"MASTER_PORT": "abc"}, "MASTER_PORT is abc"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT is 99999"),
        (TORCHRUN | {"MASTER_ADDR": "a..b"}, "MASTER_ADDR=a..b"),
        (SRUN | {"SLURM_PROCID": None}, "SLURM_PROCID is not set"),
        (SRUN | {"SLURM_LOCALID": None}, "SLURM_LOCALID is not set"),
        (SRUN | {"MASTER_PORT": None}, "MASTER_PORT is not set"),
        (SRUN, "one of 2 ranks .*RANK is 3"),
    ],
)
def test_what_makes_no_sense_is_said_before_anybody_is_waited_for(said, names, monkeypatch):
    monkeypatch.setattr("accelerate.PartialState", None)  # which would wait
    say(said, monkeypatch)
    with pytest.raises(ConfigError, match=names), joined():
        pass


@pytest.mark.parametrize(
    ("raised", "error", "names"),
    [
        (ValueError("MASTER_ADDR env was not set"), ConfigError, "MASTER_ADDR env was not set"),
        (RuntimeError("connection reset\nframe #0: c10"), RunError, r"127.0.0.1:29500 \(connection reset\)"),
    ],
)
def test_ranks_that_do_not_meet_say_so_in_a_line(raised, error, names, monkeypatch):
    def meet(**settings):
        raise raised

    monkeypatch.setattr("accelerate.PartialState", meet)
    say(TORCHRUN, monkeypatch)
    with pytest.raises(error, match=names) as caught, joined():
        pass
    assert "frame" not in str(caught.value)


def say(said, monkeypatch):
    """What a launcher says, and nothing else."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MASTER_")) or name in TORCHRUN]:
        monkeypatch.delenv(name)
    for name in TORCHRUN:
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    for name, value in said.items():
        if value is not None:
            monkeypatch.setenv(name, value)
