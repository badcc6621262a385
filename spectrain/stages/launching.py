"""How a command that trains is started: alone, as one of a launcher's ranks, or as what starts them.

Imports nothing slow: every command asks it, and most have one rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spectrain import signals
from spectrain.config.commands import Command
from spectrain.config.schema import SpectrainConfig
from spectrain.console import say

if TYPE_CHECKING:
    from spectrain.training.distributed import Ranks


def launched() -> int:
    """How many ranks a launcher has started this process as one of; 1 where none has."""
    for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        if os.environ.get(name, "").isdecimal():
            return max(1, int(os.environ[name]))
    # A batch script runs in a task of its own, and so does what it starts without srun: those are one process.
    step = os.environ.get("SLURM_STEP_ID", "").isdecimal()
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", os.environ.get("SLURM_NTASKS", "")) if step else ""
    return max(1, int(tasks)) if tasks.isdecimal() else 1


@contextmanager
def ranks_of_launcher() -> Iterator[Ranks | None]:
    """This process's place among those that a launcher has started; None where none has, which costs no import."""
    if launched() == 1:
        yield None
        return
    # Until they have joined, a signal to all of them is said by one, too.
    signals.speaks = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    from spectrain.training.distributed import joined

    with joined() as ranks:
        yield ranks


def set_environment(config: SpectrainConfig, ranks: Ranks | None) -> None:
    """``launcher.environment``, for this process, which has imported nothing that reads it, and for its children."""
    lacking = {name: value for name, value in config.launcher.environment.items() if name not in os.environ}
    if ranks is None:
        os.environ.update({name: str(value) for name, value in lacking.items()})
    elif lacking:
        say(
            f"note: launcher.environment comes too late for ranks that are running, export it where they are started: "
            f"{', '.join(lacking)}"
        )


def devices_to_launch(config: SpectrainConfig, command: Command, given: frozenset[str]) -> int:
    """How many ranks this process starts instead of doing the work itself; 1 where it does it."""
    if config.trainer.devices == "1":
        return 1
    from spectrain.stages.checks import check_config
    from spectrain.training.distributed import count_devices

    check_config(config, command, given)  # a mistake is said before anything is started
    return count_devices(config.trainer.devices)
