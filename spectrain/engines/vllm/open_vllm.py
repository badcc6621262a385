"""Opens the vLLM that ``engine`` describes: the one place that knows both kinds of client.

A child process (``engine=vllm``), or a pool of servers (``engine=vllm_server``): those that run already
(``engine.urls``), or replicas that are started here. Several data-parallel ranks are one server even with
``engine=vllm``: vLLM's server already shares requests among its ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.console import say
from spectrain.engines.vllm.args import engine_args, environment, is_cpu_build, target_original_length
from spectrain.engines.vllm.openai_api import base_url, check_server_model
from spectrain.engines.vllm.process import VLLMProcess
from spectrain.engines.vllm.requests import VLLMClient
from spectrain.engines.vllm.server_process import ServerProcess, server_command
from spectrain.engines.vllm.servers import Endpoint, ServerPool
from spectrain.errors import ConfigError

# Under way at each rank of a server of ``engine=vllm``, if ``engine.max_num_seqs`` does not say how many run together:
# vLLM's own default on most devices. More than that wait inside vLLM, which costs nothing.
_REQUESTS_PER_RANK = 256


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
        logs: the folder that vLLM's output goes to, as ``vllm-<purpose>.log``, with a number for each server.
        extra_args: engine arguments that the purpose asks for.
        record_rounds: completions hold the ids that were proposed in every round. Only a child process tells, whatever
            engine is configured, and only one rank: all of them propose the same.

    Raises ``ConfigError`` for a server that has another model, or that would have to be started with ``extra_args``;
    ``RunError`` for one that does not answer, or if vLLM does not come up.
    """
    if record_rounds:
        engine = replace(engine, name="vllm", data_parallel_size=1)
    elif engine.data_parallel_size > 1:
        engine = as_server(engine)
    if engine.name == "vllm":
        args = engine_args(engine, target, folder, extra_args)
        return VLLMProcess(engine, args, logs / f"vllm-{purpose}.log", record_rounds)
    if engine.urls:
        endpoints = _running(engine, target, folder, purpose, extra_args)
    else:
        endpoints = _started(engine, target, folder, logs, purpose, extra_args)
    return ServerPool(endpoints, engine.retries, engine.request_timeout_s, engine.startup_timeout_s)


def as_server(engine: EngineConfig) -> EngineConfig:
    """The same vLLM as a server, which several processes can ask."""
    if engine.name != "vllm":
        return engine
    concurrency = (engine.max_num_seqs or _REQUESTS_PER_RANK) * engine.data_parallel_size * 5 // 4 + 1
    return replace(engine, name="vllm_server", urls=(), replicas=1, devices=(), concurrency=concurrency)


def _running(
    engine: EngineConfig, target: TargetConfig, folder: Path, purpose: str, extra_args: Mapping[str, Any]
) -> list[Endpoint]:
    if extra_args:
        raise ConfigError(
            f"engine.urls: servers that run already cannot be given what {purpose} needs "
            f"({', '.join(sorted(extra_args))}): leave engine.urls empty, so that servers are started for it, or use "
            f"engine=vllm"
        )
    # An ordered set: the first is named in errors.
    names = dict.fromkeys((target.path, str(folder), str(folder.resolve())))
    urls = dict.fromkeys(map(base_url, engine.urls))
    lengths = (target.max_length, target_original_length(folder))
    return [Endpoint(url, check_server_model(url, names, *lengths), engine.concurrency) for url in urls]


def _started(
    engine: EngineConfig, target: TargetConfig, folder: Path, logs: Path, purpose: str, extra_args: Mapping[str, Any]
) -> list[Endpoint]:
    args = {**_with_rounds(extra_args), "served_model_name": [target.name]}
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


def _with_rounds(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """``extra_args``, and with them the rounds of each request in its reply, where there is speculation."""
    method = (extra_args.get("speculative_config") or {}).get("method", "extract_hidden_states")
    rounds = {} if method == "extract_hidden_states" else {"per_request_spec_decode_metrics": "detailed"}
    return {**rounds, **extra_args}


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
