"""What tests with the real vLLM share. They are left out where it is not installed. Tools are in ``vllm_tools.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rounds_process import RoundsProcess
from vllm_tools import vllm_target

from spectrain.engines.vllm.args import vllm_version
from spectrain.errors import ConfigError

collect_ignore = ["cpu"]
try:
    vllm_version()
except ConfigError:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_target("llama", tmp_path_factory.mktemp("vllm") / "llama")


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_target("qwen3", tmp_path_factory.mktemp("vllm") / "qwen3")


@pytest.fixture(scope="session")
def rounds_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoundsProcess]:
    """One import of vLLM for all drafters whose rounds are compared."""
    with RoundsProcess(tmp_path_factory.mktemp("rounds") / "vllm.log") as process:
        yield process
