"""Typed configuration: one frozen dataclass a section (``*_schema.py``); its defaults are the only defaults.

Hydra composes YAML over these defaults (``loading.py``); ``build`` turns the result into dataclasses and rejects
unknown keys and wrong types by name (``overrides.py``). Every key declares its options, bounds and help with ``key``
(``keys.py``). Conflicts between keys of one section are rejected in its ``_check``, those between sections in
``stages/checks.py``. What null means, the help of the key says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal

from spectrain.config.convert_schema import ConvertConfig
from spectrain.config.data_schema import CaptureConfig, DataConfig, SamplingConfig
from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.engine_schema import EngineConfig, HiddenStatesConfig
from spectrain.config.evaluation_schema import DecodingConfig, SuiteConfig
from spectrain.config.export_schema import ExportConfig
from spectrain.config.keys import FILE_NAME_BYTES, Section, key, require
from spectrain.config.launcher_schema import LauncherConfig
from spectrain.config.plan_schema import PlanConfig
from spectrain.config.publish_schema import PublishConfig
from spectrain.config.serving_schema import ServingConfig
from spectrain.config.states_schema import StatesConfig
from spectrain.config.sweep_schema import SweepConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.config.trainer_schema import TrainerConfig

_TASKS = 1 << 16


@dataclass(frozen=True)
class RunConfig(Section, name="run"):
    """Where a run lives."""

    name: str = key("default", "name of the run, from which run.dir is made", most_bytes=FILE_NAME_BYTES)
    dir: str = key("runs/${run.name}", "folder of the run: responses, hidden states, drafter, evaluation and report")
    smoke: bool = key(
        False,
        "try the run from end to end in about a minute: a tiny random checkpoint of the target's architecture, few "
        "prompts and steps, on the CPU; in run.dir, or a folder of the same name with _smoke",
    )
    task: int = key(
        0,
        "generate, capture: number of this task, from 0; of a Slurm array: $SLURM_ARRAY_TASK_ID",
        at_least=0,
        at_most=_TASKS,
    )
    tasks: int = key(
        1,
        "generate, capture: tasks that share the prompts out, each a process anywhere; of a Slurm array: "
        "$SLURM_ARRAY_TASK_COUNT",
        at_least=1,
        at_most=_TASKS,
    )

    def _check(self) -> None:
        require(
            self.task < self.tasks,
            f"run.task={self.task} is none of run.tasks={self.tasks}, which are counted from 0 (sbatch "
            f"--array=0-{self.tasks - 1})",
        )


@dataclass(frozen=True)
class LoggerConfig(Section, name="logger"):
    """Trackers beside the JSON lines that are always written (group ``logger``)."""

    trackers: tuple[str, ...] = key(
        (), "trackers of accelerate, such as wandb, tensorboard and trackio", example="[tensorboard]"
    )
    offline: bool = key(False, "wandb keeps its runs on this machine, to be uploaded later with `wandb sync`")
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
    states: StatesConfig = key(make=StatesConfig)
    drafter: DrafterConfig = key(make=DrafterConfig)
    trainer: TrainerConfig = key(make=TrainerConfig)
    decoding: DecodingConfig = key(make=DecodingConfig)
    suite: SuiteConfig = key(make=SuiteConfig)
    export: ExportConfig = key(make=ExportConfig)
    sweep: SweepConfig = key(make=SweepConfig)
    serving: ServingConfig = key(make=ServingConfig)
    logger: LoggerConfig = key(make=LoggerConfig)
    launcher: LauncherConfig = key(make=LauncherConfig)
    plan: PlanConfig = key(make=PlanConfig)
    publish: PublishConfig = key(make=PublishConfig)
    convert: ConvertConfig = key(make=ConvertConfig)

    @property
    def states_computed(self) -> Literal["", "inprocess", "online"]:
        """Who computes hidden states while training asks for them; empty: they are stored before."""
        source = self.states.source
        if source == "cached":
            return "inprocess" if self.engine.name == "hf" else "online"
        return "" if source == "stored" else source

    @property
    def draft_policies(self) -> tuple[str, ...]:
        """Draft policies that an evaluation measures; the first one makes the headline."""
        return self.suite.policies or (self.decoding.draft_policy,)

    @property
    def swept_engines(self) -> tuple[EngineConfig, ...]:
        """The engines that a sweep measures with."""
        return tuple(replace(self.engine, name=name) for name in self.sweep.engines) or (self.engine,)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Numbers of conversations that an evaluation decodes together; the first one makes the headline."""
        return self.suite.batches or (self.suite.concurrency,)
