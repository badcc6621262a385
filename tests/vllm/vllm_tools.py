"""Tiny targets that vLLM takes, and engine configurations with its CPU build mended (``cpu/``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tiny import tiny_target

from spectrain.config.schema import EngineConfig

CPU = Path(__file__).parent / "cpu"
# vLLM's CPU kernels take few head sizes; 32 is the smallest.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 5,
}


def vllm_environment(**variables: str) -> dict[str, str]:
    """For ``engine.environment``: the repairs, and little memory."""
    path = os.pathsep.join(filter(None, [str(CPU), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "VLLM_CPU_KVCACHE_SPACE": "1", **variables}


def vllm_engine(args: dict[str, Any] | None = None, **fields: Any) -> EngineConfig:
    """``engine=vllm`` for a tiny target. ``args``: engine arguments of vLLM."""
    given = {"name": "vllm", "max_num_seqs": 8, "startup_timeout_s": 900.0, "environment": vllm_environment()}
    return EngineConfig(**{**given, **fields}, args={"max_num_batched_tokens": 512, **(args or {})})


def vllm_target(family: str, folder: Path, **overrides: Any) -> Path:
    """A tiny target of a shape that vLLM's CPU kernels take."""
    return tiny_target(family, folder, **{**SHAPE, **overrides})
