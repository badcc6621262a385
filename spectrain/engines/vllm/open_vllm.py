"""Opens the service that ``engine.name`` asks for: the one place that knows both kinds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spectrain.config.schema import EngineConfig, TargetConfig
from spectrain.engines.vllm.requests import VLLMClient


def open_vllm(
    engine: EngineConfig,
    target: TargetConfig,
    folder: Path,
    logs: Path,
    purpose: str,
    extra_args: Mapping[str, Any],
    record_rounds: bool = False,
) -> VLLMClient:
    """A running target, ready for requests; the caller closes it.

    Args:
        folder: the target's checkpoint.
        logs: the folder that vLLM's output goes to, as ``vllm-<purpose>.log``.
        extra_args: engine arguments that the purpose asks for.
        record_rounds: answers hold the ids that were proposed in every round (engine ``vllm`` only).

    Raises ``RunError`` if it does not come up.
    """
    if engine.name == "vllm_server":
        from spectrain.engines.vllm.open_servers import open_pool

        return open_pool(engine, target, folder, logs, purpose, extra_args)
    from spectrain.engines.vllm.args import engine_args
    from spectrain.engines.vllm.process import VLLMProcess

    return VLLMProcess(
        engine, engine_args(engine, target, folder, extra_args), logs / f"vllm-{purpose}.log", record_rounds
    )
