"""``run.smoke=true``: any recipe from end to end in about a minute, on a CPU.

The target becomes a tiny random checkpoint of its own architecture (``target/tiny_targets.py``), made from a seed in
the run directory; prompts, lengths, layers and steps shrink, vLLM and accelerators are left out. What the recipe says
of method, losses, taps by default, sampling and suite stays, and so does every key that the command line sets. It shows
that a recipe runs, and measures nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from spectrain.config.commands import Command
from spectrain.config.schema import SpectrainConfig
from spectrain.console import quiet_transformers, say
from spectrain.drafters.registry import known_method
from spectrain.errors import ConfigError
from spectrain.files import digest_strings, replace_folder
from spectrain.reading import understood
from spectrain.target.resolve import known_dimensions
from spectrain.target.spec import load_config

_FOLDER = "smoke_target"
_SUFFIX = "_smoke"
# Values that every smoke run has.
_SMALL: dict[str, Any] = {
    "target.revision": None,
    "target.bundled_package": None,
    "target.dimensions": {},
    "target.dtype": "float32",
    "target.device": "cpu",
    "target.device_map": None,
    "target.trust_remote_code": False,
    "data.max_train": 12,
    "data.max_heldout": 4,
    "sampling.max_new_tokens": 24,
    "engine.name": "hf",
    "engine.tensor_parallel_size": 1,
    "engine.pipeline_parallel_size": 1,
    "engine.data_parallel_size": 1,
    "engine.args": {},
    "engine.quantization": None,
    "engine.urls": (),
    "engine.replicas": 1,
    "engine.devices": (),
    "capture.during_generation": False,
    "hidden_states.dtype": "auto",
    "states.source": "stored",
    "drafter.taps": None,
    "drafter.intermediate_size": None,
    "drafter.num_attention_heads": None,
    "drafter.num_key_value_heads": None,
    "drafter.head_dim": None,
    "drafter.gemma4_mtp.hidden_size": None,
    "trainer.devices": "1",
    "trainer.epochs": 3,
    "trainer.micro_batch_size": 1,
    "trainer.gradient_accumulation": 1,
    "trainer.precision": "float32",
    "trainer.loader_workers": 0,
    "suite.max_new_tokens": 24,
    "logger.trackers": (),
    "plan.device": "auto",
}
# Greatest values: smaller ones of the recipe stay.
_AT_MOST: dict[str, int] = {
    "target.max_length": 2048,
    "engine.batch_size": 16,
    "drafter.num_layers": 2,
    "drafter.draft_vocab_size": 128,
    "drafter.block.anchors": 16,
    "drafter.dspark.markov_rank": 16,
    "drafter.dflash2.selector_rank": 16,
    "trainer.packed_length": 512,
    "trainer.max_steps": 9,
    "trainer.eval_documents": 4,
    "suite.max_prompts": 2,
}
_NO_LIMIT = ("trainer.max_steps",)  # null means none, elsewhere it means nothing


def smoke_config(
    config: SpectrainConfig, command: Command, dry_run: bool = False, given: Set[str] = frozenset()
) -> SpectrainConfig:
    """``config`` on a tiny checkpoint, which is written into the run directory unless ``command`` only looks, as in a
    dry run. ``given``: keys that the command line set, which stay. Raises ConfigError for a target whose architecture
    is not known here, InputError for one that there is no tiny checkpoint of.
    """
    from spectrain.target.tiny_targets import config_like

    run_dir = config.run.dir if "run.dir" in given else config.run.dir + _SUFFIX
    values: dict[str, Any] = {name: value for name, value in _SMALL.items() if name not in given}
    for name, most in _AT_MOST.items():
        value = _read(config, name)
        if name not in given and (value is not None or name in _NO_LIMIT):
            values[name] = most if value is None else min(value, most)
    if config.target.tiny is not None:  # it makes itself, and is as small
        for name in [name for name in values if name.startswith("target.")]:
            del values[name]
        return _with(config, {**values, "run.dir": run_dir})
    tiny = config_like(_architecture(config))
    if command.looks_only or dry_run:
        path = f"smoke/{config.target.name}"
        values["target.dimensions"] = {"of": path, "source": "tiny, made when it runs", "config": tiny.to_dict()}
    else:
        method = known_method(config.drafter.method)
        with_head = method is not None and method.serves_as_target  # the target's own, which is to be tuned
        path = str(_written(tiny, Path(run_dir).expanduser(), with_head))
    small = _with(config, {**values, "run.dir": run_dir, "target.path": path})
    say(f"smoke run: {type(tiny).__name__.removesuffix('Config')} with {path}, random weights; it measures nothing")
    return small


def _architecture(config: SpectrainConfig) -> Any:
    """The transformers configuration of the target itself, without network."""
    target, known = config.target, known_dimensions(config.target)
    folder = Path(target.path).expanduser()
    if os.path.isdir(folder):
        return load_config(folder, target.trust_remote_code)
    if known is None:
        raise ConfigError(
            f"run.smoke=true: the architecture of target.path={target.path} is not known here; choose a target that "
            f"ships (spectrain help target), or give a folder that holds its config.json"
        )
    from transformers import AutoConfig

    with understood(f"target.dimensions of {target.path}"), quiet_transformers():
        return AutoConfig.for_model(**known)


def _written(tiny: Any, run_dir: Path, mtp_head: bool) -> Path:
    """The folder of the tiny target, made once: the same architecture gives the same weights."""
    from spectrain.target.smoke_targets import add_mtp_head
    from spectrain.target.tiny_targets import write_target

    def write(folder: Path) -> None:
        write_target(tiny, folder)
        if mtp_head:
            add_mtp_head(folder)

    digest = digest_strings([tiny.to_json_string(), mtp_head])[:12]
    folder = run_dir / f"{_FOLDER}-{digest}"
    if not folder.is_dir():
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_folder(folder, write)
    return folder


def _read(section: Any, name: str) -> Any:
    for part in name.split("."):
        section = getattr(section, part)
    return section


def _with(section: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with keys by their dotted names."""
    changed: dict[str, Any] = {}
    for field in fields(section):
        value = getattr(section, field.name)
        inner = {n.partition(".")[2]: v for n, v in values.items() if n.startswith(f"{field.name}.")}
        if field.name in values:
            changed[field.name] = values[field.name]
        elif inner and is_dataclass(value):
            changed[field.name] = _with(value, inner)
    return replace(section, **changed)
