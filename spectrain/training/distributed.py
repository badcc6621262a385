"""The processes of one training, *ranks*, one a device: how they are started, how they wait for the first one, and how
they end together.

``trainer.devices=N`` starts the command again N times through torch's own launcher (the one behind ``torchrun``);
``torchrun``, ``accelerate launch`` and ``srun`` start it that often themselves. Either way a process learns from its
environment who it is, joins the group before it does anything else, and takes these variables out of its environment,
so that no program started later (vLLM) believes that it is a rank, too.

Rank 0 does alone what has to be done once: it holds the lock of the run directory, runs earlier stages, decides,
writes, and prints. The others wait for what it found, over a group of its own whose timeout is long: generation takes
hours, where the group that exchanges gradients gives up after minutes. An error of rank 0 ends all ranks with its exit
code, and is said once.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from spectrain import signals
from spectrain.console import console, say
from spectrain.errors import ConfigError, RunError, SpectrainError
from spectrain.processes import ProcessId, available_cores

T = TypeVar("T")

_WAIT = timedelta(days=14)  # for the first rank, which may be generating
_AGREE = timedelta(seconds=10)  # whether all ranks failed alike
# What launchers tell a rank, and what would make a program that it starts believe that it is one.
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PREFIXES = ("MASTER_", "TORCHELASTIC_", "ROLE_", "GROUP_")
# From a signal to the step's end, where ranks save together; a scheduler's warning (Slurm: USR1@120) leaves as long.
PATIENCE_S = 100.0
_SHUTDOWN_S = "120"  # until the launcher kills ranks that got a signal
_THREADS_ARE_OURS = "SPECTRAIN_RANK_THREADS"  # set beside an OMP_NUM_THREADS that the user did not choose
_LOST_PEER = ("gloo", "Gloo", "NCCL", "RCCL", "Broken pipe", "Connection reset")


class PeerError(SpectrainError):
    """Another rank has failed and said why: this one ends with the same exit code and says nothing."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another rank has failed")
        self.exit_code = exit_code


@dataclass(frozen=True)
class _Outcome:
    """Of what the first rank did alone."""

    value: Any = None
    exit_code: int = 0


@dataclass(frozen=True)
class Ranks:
    """Rank ``index`` of ``count``; one rank of one where nothing was launched."""

    index: int = 0
    count: int = 1
    waiting: Any = None  # process group of those who wait for the first rank
    agreeing: Any = None  # process group that compares errors
    speaks_here: bool = False  # the first of those that its launcher has started, where another one has started others

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def from_first(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on the first rank, on every rank. Where it raises, the others raise PeerError."""
        if self.count == 1:
            return work()
        outcomes: list[_Outcome] = [_Outcome()]
        if self.is_first:
            try:
                with _all_cores():
                    outcomes = [_Outcome(work())]
            except BaseException as error:
                failed = _Outcome(
                    exit_code=getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1)
                )
                distributed.broadcast_object_list([failed], src=0, group=self.waiting)
                raise
        distributed.broadcast_object_list(outcomes, src=0, group=self.waiting)
        if outcomes[0].exit_code:
            raise PeerError(outcomes[0].exit_code)
        return outcomes[0].value

    def first_then_all(self, work: Callable[[], T]) -> T:
        """``work`` on the first rank, and then, if it went well there, on the others: what it fetches or mends is there
        for them.
        """
        if self.count == 1:
            return work()
        found: list[T] = []
        self.from_first(lambda: found.append(work()))
        return found[0] if found else work()

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.count > 1:
            distributed.barrier(group=self.waiting)

    def most(self, value: int) -> int:
        """The greatest ``value`` of all ranks, on every rank. On the host: devices are not waited for."""
        if self.count == 1:
            return value
        found = torch.tensor([value])
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self.waiting)
        return int(found)

    def gathered(self, value: T) -> list[T]:
        """``value`` of every rank, in their order, on every rank."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, value, group=self.waiting)
        return found

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all ranks, on the device where it lies; ``tensor`` itself is changed."""
        if self.count > 1:
            distributed.all_reduce(tensor)
        return tensor

    @contextmanager
    def keeping(self, keep: signals.Keep) -> Iterator[None]:
        """``signals.keeping``; ``keep`` is called, too, where another rank is gone, which ends this one."""
        with signals.keeping(keep):
            try:
                yield
            except Exception as error:
                if self.lost_a_peer(error):
                    with signals.held(), suppress(SpectrainError):
                        keep()
                raise

    def lost_a_peer(self, error: BaseException) -> bool:
        """Whether ``error`` says that another rank is gone."""
        told = not isinstance(error, SpectrainError) and any(word in str(error) for word in _LOST_PEER)
        return self.count > 1 and told

    def is_ours_to_say(self, error: BaseException) -> bool:
        """Whether this rank reports ``error``: the first one does for all where all failed alike; whoever failed by
        itself does; one that lost another rank does not, because that one has.
        """
        if self.count == 1:
            return True
        if isinstance(error, PeerError):
            return False
        if self.lost_a_peer(error):
            return False
        said: list[Any] = [None] * self.count
        try:
            distributed.all_gather_object(said, f"{type(error).__name__}: {error}", group=self.agreeing)
        except (RuntimeError, ValueError):  # the others are elsewhere, or gone
            return True
        return self.is_first


ALONE = Ranks()


# --- joining -------------------------------------------------------------------------------------------------------


@contextmanager
def joined() -> Iterator[Ranks]:
    """The place in the group of a process that a launcher has started. The group is left at the end; on the first rank
    alone anything is printed.
    """
    _name_slurm_task()
    _check_place()
    from accelerate import PartialState

    threads = int(os.environ.get("OMP_NUM_THREADS") or 0)
    try:
        state = PartialState(cpu=not torch.cuda.is_available(), timeout=_WAIT)
    except ValueError as error:
        raise ConfigError(f"what the launcher has set does not start several ranks: {error}") from error
    except RuntimeError as error:  # of the network, in many lines
        raise RunError(
            f"the ranks did not meet at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} "
            f"({str(error).strip().splitlines()[0]}): if another says why, mend that; if not, see whether this machine "
            f"reaches that one"
        ) from error
    if threads:
        torch.set_num_threads(threads)  # accelerate chooses otherwise
    for name in [n for n in os.environ if n in _OURS or n.startswith(_PREFIXES)]:
        del os.environ[name]
    if os.environ.pop(_THREADS_ARE_OURS, ""):
        del os.environ["OMP_NUM_THREADS"]
    ranks = Ranks(
        state.process_index,
        state.num_processes,
        distributed.new_group(backend="gloo", timeout=_WAIT),
        distributed.new_group(backend="gloo", timeout=_AGREE),
    )
    console.quiet = not ranks.is_first
    this = ProcessId.of_this()
    everybody = ranks.gathered((this, (this.host, this.boot, this.namespace, os.getppid())))
    launchers = [launcher for _, launcher in everybody]
    first_of_its_launcher = launchers.index(launchers[ranks.index]) == ranks.index
    ranks = replace(ranks, speaks_here=first_of_its_launcher and len(set(launchers)) > 1)
    if not ranks.is_first:
        signals.follow(everybody[0][0])
    signals.end_with_parent()  # torch's launcher, killed, would leave its ranks behind
    try:
        yield ranks
    except BaseException as error:
        if ranks.lost_a_peer(error) and ranks.speaks_here:
            console.quiet = False
            raise RunError(
                f"rank {ranks.index} of {ranks.count} has lost another one, and ends with it: what that one said, or "
                f"what its machine says, is why; what was made is kept; {signals.CONTINUES}"
            ) from error
        console.quiet = not ranks.is_ours_to_say(error)
        raise
    gc.collect()  # a wrapper around the drafter keeps its group alive, whose threads must not outlive the interpreter
    distributed.destroy_process_group()


def _name_slurm_task() -> None:
    """``srun`` tells a task its number in words of its own."""
    if "WORLD_SIZE" in os.environ or "SLURM_STEP_ID" not in os.environ:
        return
    # A step may have fewer tasks than the job.
    count = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS", "")
    names = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID"}
    missing = [slurm for slurm in names.values() if slurm not in os.environ]
    if missing:
        raise ConfigError(f"this is one of {count} tasks of srun, but {missing[0]} is not set: start it by srun itself")
    os.environ.update({"WORLD_SIZE": count, **{name: os.environ[slurm] for name, slurm in names.items()}})
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"srun starts {count} ranks but {missing[0]} is not set: export MASTER_ADDR (the first node's name) and "
            f"MASTER_PORT in the batch script"
        )


def _check_place() -> None:
    """What a launcher has said, before this process waits for others by it: they would not come."""
    if "WORLD_SIZE" not in os.environ:
        return  # accelerate reads what mpirun says
    count = int(os.environ["WORLD_SIZE"])
    limits = {"RANK": range(count), "LOCAL_RANK": range(count), "MASTER_PORT": range(1, 1 << 16)}
    for name, numbers in limits.items():
        said = os.environ.get(name)
        if said is None and name != "RANK":
            continue  # there are defaults
        if said is None or not said.isdecimal() or int(said) not in numbers:
            raise ConfigError(
                f"this is one of {count} ranks (WORLD_SIZE), but {name} is {'not set' if said is None else said}, "
                f"where {numbers[0]} to {numbers[-1]} make sense: torchrun, accelerate launch, srun and "
                f"trainer.devices={count} set it"
            )
    address = os.environ.get("MASTER_ADDR")
    try:
        socket.getaddrinfo(address or "localhost", None)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"MASTER_ADDR={address} is no machine that this one knows ({getattr(error, 'strerror', None) or error}): "
            f"name the first rank's"
        ) from error


@contextmanager
def _all_cores() -> Iterator[None]:
    """Inside: torch's products run on all cores, because the other ranks wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, len(available_cores())))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- starting ------------------------------------------------------------------------------------------------------


def count_devices(wanted: str) -> int:
    """How many ranks ``trainer.devices`` asks for on this machine. Raises ConfigError for more than there are GPUs."""
    there = torch.cuda.device_count()
    if wanted == "auto":
        return max(1, there)
    if there and int(wanted) > there:
        raise ConfigError(f"trainer.devices={wanted}: this machine has {there} (trainer.devices=auto takes them all)")
    return int(wanted)


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run ``spectrain ARGUMENTS`` as ``count`` ranks on this machine, and return the exit code of the one that failed
    first, or 0. Of a rank that was killed, which could say nothing, says so.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    signals.leave_to_others()  # the launcher hands them on to its ranks, and waits for them
    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what went wrong, the ranks say
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ |= {"OMP_NUM_THREADS": str(max(1, len(available_cores()) // count)), _THREADS_ARE_OURS: "1"}
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_S)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"spectrain-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,  # a run resumes by the same command, once somebody has read why it ended
        monitor_interval=0.2,
        signals_to_handle=",".join(signal.Signals(number).name for number in (*signals.ENDING, signal.SIGQUIT)),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "spectrain", *arguments)
    except ChildFailedError as error:
        _say_which_was_killed(error.failures)
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _say_which_was_killed(failures: Mapping[int, Any]) -> None:
    """A rank that was killed could not say it, and the others know only that it is gone."""
    for rank, failure in sorted(failures.items()):
        if failure.exitcode < 0 and -failure.exitcode not in signals.ENDING:
            name = signal.Signals(-failure.exitcode).name
            say(
                f"error: rank {rank} was ended by {name} (by somebody, or for want of memory), and the others with it; "
                f"what was made is kept; {signals.CONTINUES}"
            )
            return
