"""Whole commands on the device: several ranks, and the real vLLM. Targets are tiny, so that it takes minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from gpu_table import Row, Skipped, judged
from workplace import make

_TIMEOUT_S = 240
_ALIKE = 2e-2  # relative, of losses: bfloat16 and another order of sums


def check_ranks(device: str) -> Iterator[Row]:
    """A run on every device of this machine, against one rank that accumulates."""
    count = torch.cuda.device_count() if device == "cuda" else 2
    if count < 2:
        raise Skipped("there is one device here")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        common = [*make(work), "trainer.packed_length=64", "trainer.epochs=2"]
        _spectrain("run", *common, f"trainer.gradient_accumulation={count}", f"run.dir={work / 'one'}")
        _spectrain("run", *common, f"trainer.devices={count}", f"run.dir={work / 'all'}")
        one, every = (_losses(work / name) for name in ("one", "all"))
        worst = max(abs(a / b - 1) for a, b in zip(every, one, strict=True))
        yield judged("ddp", worst <= _ALIKE, f"losses of {count} ranks differ from one rank's by {worst:.1e}")


def check_served(device: str) -> Iterator[Row]:
    """vLLM answers and captures, a drafter is trained on that, and vLLM drafts with it what our loop drafts."""
    if find_spec("vllm") is None:
        raise Skipped("vLLM is not installed")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # float32 is what vLLM's attention on GPUs does not take.
        served = ["engine=vllm", "target.dtype=bfloat16", "engine.args.gpu_memory_utilization=0.3"]
        common = [*make(work, head_dim=64), *served, f"run.dir={work / 'run'}"]
        _spectrain("fit", *common)
        yield judged("vLLM capture", True, "its hidden states are those of the unmodified model; a drafter is trained")
        said = _spectrain("eval", "parity", *common)
        yield judged("parity", True, next((line for line in said if "parity" in line), "passed"))


def _spectrain(*arguments: str) -> list[str]:
    """Lines that the command printed. RuntimeError with the last of them where it failed."""
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
    command = [sys.executable, "-m", "spectrain", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    sys.stderr.write(done.stderr)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode:
        raise RuntimeError(f"spectrain {arguments[0]} ends with {done.returncode}: {lines[-1] if lines else ''}")
    return lines


def _losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]
