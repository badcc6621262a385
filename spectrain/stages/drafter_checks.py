"""What can be refused about the drafter before work starts: its configuration for a command, its folder, and whether
it fits the target. Each check raises ConfigError or InputError with one sentence; nothing here writes anything.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from spectrain.config.commands import Command
from spectrain.config.drafter_schema import BLOCK_METHODS, BlockConfig, DrafterConfig
from spectrain.config.schema import SpectrainConfig
from spectrain.errors import ConfigError, InputError

if TYPE_CHECKING:
    from spectrain.stages.context import Context
    from spectrain.target.spec import TargetSpec

_DRAFTER_FILES = ("config.json", "model.safetensors")
_POLICY_KEYS = "decoding.draft_policy, suite.policies"
_CONFIDENCE_ADVICE = "use fixed, or train one with drafter=dspark"


# --- the configuration alone ---------------------------------------------------------------------------------------


def check_fresh_drafts(config: SpectrainConfig, command: Command) -> None:
    """A fresh drafter gives as many drafts as the simulation takes."""
    most, wanted = config.drafter.most_drafts, config.decoding.num_speculative_tokens
    if "fit" in command.stages and config.drafter.path is None and most is not None and wanted > most:
        raise ConfigError(
            f"decoding.num_speculative_tokens={wanted}: blocks of {config.drafter.block.block_size} slots give {most} "
            f"drafts a round, "
            "lower it or raise drafter.block.block_size"
        )


def check_policies(config: SpectrainConfig, command: Command) -> None:
    """Drafting by confidence is done by our own loop, with a drafter that has a confidence head."""
    if not command.measures or config.draft_policies == ("fixed",):
        return
    if config.engine.name != "hf":
        raise ConfigError(
            f"engine={config.engine.name} verifies all drafts: use decoding.draft_policy=fixed and no suite.policies, "
            f"or engine=hf"
        )
    if config.drafter.path is not None:
        check_confidence(Path(config.drafter.path).expanduser())
    elif command.trains and (config.drafter.method != "dspark" or config.drafter.block.confidence is False):
        raise ConfigError(
            f"{_POLICY_KEYS}: this {config.drafter.method} drafter has no confidence head to draft by; "
            f"{_CONFIDENCE_ADVICE}"
        )


def check_attention(drafter: DrafterConfig) -> None:
    import torch

    if drafter.attention == "flex" and not torch.cuda.is_available():
        raise ConfigError("drafter.attention=flex trains on a GPU alone: use auto")


# --- a folder -----------------------------------------------------------------------------------------------------


def check_drafter_folder(folder: Path, field: str) -> None:
    """The folder holds a drafter: configuration and weights."""
    advice = (
        "name a folder that fit has written"
        if field == "drafter.path"
        else "run spectrain fit first, or name one with drafter.path"
    )
    if field == "drafter.path" and not os.path.isdir(folder):
        raise InputError(
            f"{field}={folder} is no folder here: one from the Hub comes with `hf download {folder} --local-dir FOLDER`"
        )
    for file in _DRAFTER_FILES:
        if not os.path.isfile(folder / file):  # unlike Path.is_file, False for names that no file can have
            raise InputError(f"{field}: {folder} holds no drafter ({file} is missing): {advice}")


def check_confidence(folder: Path) -> None:
    """The drafter in a folder states its confidence."""
    from spectrain.drafters.drafter_folder import read_method, read_shape

    if read_method(folder) != "dspark" or not getattr(read_shape(folder), "confidence", False):
        raise ConfigError(
            f"{_POLICY_KEYS}: the drafter in {folder} has no confidence head to draft by; {_CONFIDENCE_ADVICE}"
        )


def check_drafts(folder: Path, num_drafts: int) -> None:
    """A drafter's blocks give as many drafts as are asked for; an autoregressive drafter can always go on."""
    from spectrain.drafters.drafter_folder import read_method, read_shape

    most = getattr(read_shape(folder), "num_drafts", num_drafts) if read_method(folder) in BLOCK_METHODS else num_drafts
    if num_drafts > most:
        raise ConfigError(
            f"decoding.num_speculative_tokens={num_drafts}: the drafter in {folder} gives {most} a round, lower it"
        )


def check_drafter_fits(folder: Path, spec: TargetSpec) -> None:
    """A drafter's folder is whole, and was made for a target of these dimensions."""
    from spectrain.drafters.drafter_folder import load_drafter, read_shape
    from spectrain.drafters.serving_config import read_serving_config

    usual_taps = spec.default_taps()
    shape = read_shape(folder, usual_taps)
    found = {"target_hidden_size": shape.layer.hidden_size, "vocab_size": shape.target_vocab_size}
    for name, wanted in (("target_hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size)):
        if found[name] != wanted:
            raise InputError(
                f"drafter {folder} was trained for another target: its {name} is {found[name]}, this target's {wanted}"
            )
    if max(shape.taps) > spec.num_layers:
        raise InputError(
            f"drafter {folder} was trained for another target: it reads tap {max(shape.taps)} of {spec.num_layers} "
            f"layers"
        )
    load_drafter(folder, usual_taps)  # raises for weights that are broken, or of another shape
    read_serving_config(str(folder))  # and for what a server would miss


def check_continued(context: Context, folder: Path) -> None:
    """``folder`` can be trained on: it fits the target, and nothing in the configuration contradicts it."""
    from spectrain.drafters.drafter_folder import read_method

    check_drafter_fits(folder, context.spec)
    method = read_method(folder)
    if context.config.drafter.method != method:
        raise ConfigError(f"drafter.path={folder} holds a {method} drafter: set drafter.method={method}")
    check_drafts(folder, context.config.decoding.num_speculative_tokens)
    _check_settled(context.config.drafter, folder, context.spec)
    if folder.resolve() == context.run_dir.drafter.resolve():
        raise ConfigError(
            f"drafter.path={folder} is where this run writes its own drafter: use another run.dir to go on from it"
        )


def _check_settled(drafter: DrafterConfig, folder: Path, spec: TargetSpec) -> None:
    """Nobody asks for other taps or other blocks than those of the drafter in ``folder``, which stand."""
    from spectrain.drafters.block.block_build import settings_of
    from spectrain.drafters.block.block_shape import BlockShape
    from spectrain.drafters.drafter_folder import read_shape

    shape = read_shape(folder, spec.default_taps())
    if drafter.taps is not None and drafter.taps != shape.taps:
        raise ConfigError(
            f"drafter.taps={list(drafter.taps)}, but the drafter in {folder} reads {list(shape.taps)}: set "
            f"drafter.taps=null"
        )
    for name, found in settings_of(shape).items() if isinstance(shape, BlockShape) else ():
        wanted = getattr(drafter.block, name)
        if wanted not in (found, getattr(BlockConfig(), name)):
            raise ConfigError(
                f"drafter.block.{name}={wanted}, but the drafter in {folder} has {found}, which stands: leave it out"
            )


# --- the target ----------------------------------------------------------------------------------------------------


def check_dimensions(config: SpectrainConfig, spec: TargetSpec) -> None:
    """The drafter fits the target."""
    from spectrain.drafters.build import drafter_shape, resolve_taps

    drafter = config.drafter
    longest, vocabulary = config.target.max_length, drafter.draft_vocab_size
    if longest > spec.max_position_embeddings:
        raise ConfigError(
            f"target.max_length={longest} exceeds the target's {spec.max_position_embeddings} positions: lower it"
        )
    if vocabulary is not None and vocabulary > spec.vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size={vocabulary} is larger than the target's vocabulary of {spec.vocab_size}: "
            f"lower it"
        )
    resolve_taps(drafter, spec)
    _check_heads(drafter, spec)
    drafter_shape(drafter, spec, drafter.block.mask_token_id or 0)


def _check_heads(drafter: DrafterConfig, spec: TargetSpec) -> None:
    from spectrain.drafters.build import layer_shape

    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        value = getattr(drafter, name)
        if value is not None and value < 1:
            raise ConfigError(f"drafter.{name}={value} must be at least 1")
    layer_shape(drafter, spec)
