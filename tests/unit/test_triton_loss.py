"""The Triton kernel of the losses, in Triton's interpreter; on a GPU `make gpu-check` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from spectrain import cli


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with vLLM, or with torch for GPUs")
def test_the_kernel_computes_what_the_plain_losses_say() -> None:
    """In a process of its own, since the interpreter is chosen before Triton is imported."""
    cases = Path(__file__).with_name("interpreted_triton.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU trains with it")
def test_it_is_refused_where_it_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", "recipe=quickstart", "drafter.loss.implementation=triton", f"run.dir={tmp_path}", "--dry-run"]
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert "drafter.loss.implementation=triton" in said and "use fused" in said
