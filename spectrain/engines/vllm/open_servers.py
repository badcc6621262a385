"""Opens the pool that ``engine=vllm_server`` describes: servers that run already (``engine.urls``), or replicas that
are started here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spectrain.config.schema import EngineConfig, TargetConfig
from spectrain.console import say
from spectrain.engines.vllm.args import engine_args, environment, is_cpu_build
from spectrain.engines.vllm.completions import base_url, check_server_model
from spectrain.engines.vllm.server_process import ServerProcess, server_command
from spectrain.engines.vllm.servers import Endpoint, ServerPool
from spectrain.errors import ConfigError


def open_pool(
    engine: EngineConfig, target: TargetConfig, folder: Path, logs: Path, purpose: str, extra_args: Mapping[str, Any]
) -> ServerPool:
    """Servers of the target, ready for requests; see ``clients.open_vllm``.

    Raises ConfigError for a server that has another model, or that would have to be started with ``extra_args``;
    RunError for one that does not answer or does not come up.
    """
    if engine.urls:
        endpoints = _running(engine, target, folder, purpose, extra_args)
    else:
        endpoints = _started(engine, target, folder, logs, purpose, extra_args)
    return ServerPool(endpoints, engine.retries, engine.request_timeout_s, engine.startup_timeout_s)


def _running(
    engine: EngineConfig, target: TargetConfig, folder: Path, purpose: str, extra_args: Mapping[str, Any]
) -> list[Endpoint]:
    if extra_args:
        raise ConfigError(
            f"engine.urls: servers that run already cannot be given what {purpose} needs "
            f"({', '.join(sorted(extra_args))}): leave "
            f"engine.urls empty, so that servers are started for it, or use engine=vllm"
        )
    names = dict.fromkeys(
        (target.path, str(folder), str(folder.resolve()))
    )  # an ordered set: the first is named in errors
    urls = dict.fromkeys(map(base_url, engine.urls))
    return [Endpoint(url, check_server_model(url, names, target.max_length), engine.concurrency) for url in urls]


def _started(
    engine: EngineConfig, target: TargetConfig, folder: Path, logs: Path, purpose: str, extra_args: Mapping[str, Any]
) -> list[Endpoint]:
    args = {**_counted(extra_args), "served_model_name": [target.name]}
    command = server_command(engine_args(engine, target, folder, args))
    servers = [
        ServerProcess(
            f"vLLM server {number + 1} of {engine.replicas}",
            command,
            _environment(engine, number),
            logs / f"vllm-{purpose}-{number + 1}.log",
        )
        for number in range(engine.replicas)
    ]
    say(f"starting {'a vLLM server' if len(servers) == 1 else f'{len(servers)} vLLM servers'}; output goes to {logs}")
    end_s = time.monotonic() + engine.startup_timeout_s
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready(end_s)
    except BaseException:
        for server in servers:
            server.end()
        for server in servers:
            server.stop()
        raise
    return [Endpoint(server.name, target.name, engine.concurrency, server) for server in servers]


def _counted(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """With the rounds of each request in its reply, where there is speculation."""
    method = (extra_args.get("speculative_config") or {}).get("method", "extract_hidden_states")
    counted = {} if method == "extract_hidden_states" else {"per_request_spec_decode_metrics": "detailed"}
    return {**counted, **extra_args}


def _environment(engine: EngineConfig, number: int) -> dict[str, str]:
    """Variables of replica ``number``: its own devices, or its share of the cores."""
    # A CPU server is two processes then, not three; each costs an import of vLLM.
    alone = is_cpu_build() and engine.data_parallel_size == 1
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if alone else {}
    variables |= environment(engine, (number, engine.replicas))
    if engine.devices:
        # Both names: CUDA's, and ROCm's, which wants them alike if both are there.
        variables |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), engine.devices[number])
    return variables
