"""Configuration of the engine: who runs the target, and how (group ``engine``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from spectrain.config.keys import Section, key, refuse_dash, require
from spectrain.config.launcher_schema import VARIABLE
from spectrain.errors import ConfigError

_DEVICES = 4096
_LONGEST_S = 1e7  # four months


@dataclass(frozen=True)
class EngineConfig(Section, name="engine"):
    """Who runs the target for ``generate`` and ``capture``, and serves it for ``eval`` (group ``engine``)."""

    name: Literal["hf", "vllm", "vllm_server"] = key(
        "hf",
        "hf: transformers, in this process; vllm: vLLM on this machine; vllm_server: one or many vLLM servers",
    )
    batch_size: int = key(16, "hf: conversations decoded together", at_least=1, at_most=1 << 16)
    capture_tokens: int = key(2048, "hf: tokens of a padding-free batch of capture", at_least=1, at_most=1 << 24)
    tensor_parallel_size: int = key(1, "vLLM: devices that each layer is split over", at_least=1, at_most=_DEVICES)
    pipeline_parallel_size: int = key(
        1, "vLLM: groups of devices that the layers are shared out to", at_least=1, at_most=_DEVICES
    )
    data_parallel_size: int = key(1, "vLLM: copies of the target that share the requests", at_least=1, at_most=_DEVICES)
    max_num_seqs: int | None = key(
        None,
        "vLLM: requests that run together; null: vLLM's own default",
        at_least=1,
        example="128",
        at_most=1 << 20,
    )
    gpu_memory_utilization: float | None = key(
        None,
        "vLLM: share of a device's memory that it takes; null: vLLM's own default",
        above=0,
        at_most=1,
        example="0.85",
    )
    quantization: str | None = key(
        None, "vLLM: quantization of the target's weights, by vLLM's name; null: as the checkpoint is", example="fp8"
    )
    attention_backend: str | None = key(
        None, "vLLM: attention kernel, by vLLM's name; null: vLLM's own choice", example="FLASH_ATTN"
    )
    drafter_attention_backend: str | None = key(
        None,
        "vLLM: attention kernel of the drafter, which vLLM never takes over from the target; null: vLLM's own choice",
        example="TRITON_ATTN",
    )
    enforce_eager: bool | None = key(None, "vLLM: no compiled graphs; null: eager on CPU, vLLM's own default elsewhere")
    args: dict[str, Any] = key(
        make=dict, help="vLLM: any other engine argument, by its name there", example="{max_num_batched_tokens: 8192}"
    )
    environment: dict[str, str] = key(
        make=dict, help="vLLM: environment variables of its processes", example="{VLLM_LOGGING_LEVEL: DEBUG}"
    )
    connector: Literal["spectrain", "stock"] = key(
        "spectrain",
        "vLLM: who writes captured hidden states; spectrain: straight into shards; stock: vLLM's own way, a file per "
        "request",
    )
    self_check: Literal["auto", "taps", "greedy", "off"] = key(
        "auto",
        "vLLM: what captured hidden states are checked against; taps: those of transformers; greedy: the tokens that "
        "vLLM generates; off: nothing; auto: taps where the target fits into memory beside it, greedy elsewhere",
    )
    urls: tuple[str, ...] = key(
        (),
        "vllm_server: servers that are running already; none: replicas are started, and stopped at the end",
        example="[http://node1:8000]",
    )
    replicas: int = key(1, "vllm_server: servers to start", at_least=1, at_most=_DEVICES)
    devices: tuple[str, ...] = key(
        (), "vllm_server: devices of each replica; none: all replicas see the same", example='["0,1"]'
    )
    concurrency: int = key(64, "vllm_server: requests under way at each server", at_least=1, at_most=1 << 16)
    retries: int = key(
        4,
        "vllm_server: times that a request is tried again before its server counts as dead",
        at_least=0,
        at_most=1000,
    )
    startup_timeout_s: float = key(900.0, "vLLM: seconds that a server may take to start", above=0, at_most=_LONGEST_S)
    request_timeout_s: float = key(600.0, "vLLM: seconds that a request may take", above=0, at_most=_LONGEST_S)

    def _check(self) -> None:
        for url in self.urls:
            _check_url(url)
        require(
            not self.devices or len(self.devices) == self.replicas,
            f"engine.devices names {len(self.devices)} sets of devices for engine.replicas={self.replicas}: name one "
            f"for each",
        )
        named = {
            name: getattr(self, name) for name in ("quantization", "attention_backend", "drafter_attention_backend")
        }
        for name, value in (*named.items(), *((f"args.{name}", value) for name, value in self.args.items())):
            refuse_dash(f"engine.{name}", value)
        for name in self.environment:
            require(
                VARIABLE.fullmatch(name),
                f"engine.environment.{name} is no name of a variable: use letters and digits",
            )


@dataclass(frozen=True)
class HiddenStatesConfig(Section, name="hidden_states"):
    """How hidden states are stored. Where training gets them from: ``states``."""

    dtype: Literal["auto", "float32", "bfloat16", "int8", "int8_grouped", "float8_e4m3"] = key(
        "auto",
        "what is stored; auto: what the target computes in; int8 and float8_e4m3 (OCP's) have a scale per token and "
        "tap, int8_grouped one per 64 channels of it, for targets some of whose channels are much larger than others",
    )
    shard_bytes: int = key(1 << 30, "size in bytes at which a shard is closed", at_least=1 << 16, at_most=1 << 40)
    verify_checksums: bool = key(True, "before training, compare each shard that is new or changed with its checksum")
    verify_at_start_bytes: int = key(
        100_000_000_000,
        "where more bytes of hidden states than that are new or changed, a shard is compared with its checksum when "
        "training first reads it, not before training",
        at_least=0,
        at_most=1 << 50,
    )


def _check_url(url: str) -> None:
    """The address of a server: scheme, host, perhaps a port and a path."""
    require(url.startswith(("http://", "https://")), f"engine.urls: {url} must begin with http:// or https://")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:  # of a port that is no number, of brackets that are not closed
        raise ConfigError(f"engine.urls: {url} is no address ({error}): write http://HOST:PORT") from error
    plain = url.isprintable() and " " not in url and not parts.query and not parts.fragment
    require(host and port != 0 and plain, f"engine.urls: {url} is no address: write http://HOST:PORT")
