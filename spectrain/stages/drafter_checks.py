"""What can be refused about the drafter before work starts: its kind and configuration for a command, its folder, and
whether it fits the target. Each check raises ConfigError or InputError with one sentence; nothing here writes anything.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Collection, Set
from pathlib import Path
from typing import TYPE_CHECKING

from spectrain.config.commands import Command
from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.overrides import flatten, suggest
from spectrain.config.schema import SpectrainConfig
from spectrain.console import say
from spectrain.drafters.drafter_digests import CONFIG, WEIGHTS, weight_files
from spectrain.errors import ConfigError, InputError

if TYPE_CHECKING:
    from spectrain.drafters.drafter import DrafterShape
    from spectrain.drafters.registry import DrafterMethod
    from spectrain.stages.context import Context
    from spectrain.target.spec import TargetSpec

_POLICY_KEYS = "decoding.draft_policy, suite.policies"
_ANY_TAPS = (0,)  # for questions that taps do not decide: a folder may leave them to the target
_CONFIDENCE_ADVICE = "use fixed, or train one with drafter=dspark"


# --- the configuration alone ---------------------------------------------------------------------------------------


def check_kind(config: SpectrainConfig, command: Command, given: Set[str] = frozenset()) -> None:
    """The kind of drafter is known, has what the configuration asks for, and drafts as much as is asked for.

    ``given``: keys that the command line set. One that the kind does not read is refused there; in a recipe it is
    another kind's.
    """
    from spectrain.drafters.registry import find_method, load_module

    kinds = load_module(config.drafter.module)
    method = find_method(config.drafter.method)
    if "drafter.module" in given and method.name not in kinds:
        say(f"note: drafter.module registers {', '.join(kinds)}, but the drafter is {method.name}: drafter={kinds[0]}?")
    if not method.trainable:
        raise ConfigError(f"drafter.method={method.name}: this version serves such drafters, it does not train them")
    _refuse_sections_of_others(method, given)
    method.check(config.drafter)
    if config.drafter.init == "last_layer" and not method.is_tuned:
        raise ConfigError("drafter.init=last_layer is of heads that targets bring along (drafter=mtp): use target")
    if config.export.stitch and not method.serves_as_target:
        raise ConfigError(
            f"export.stitch=true: a folder of {method.label} drafters links no files of the target, leave it out"
        )
    if command.measures and config.engine.name != "hf" and method.speculative_config is None:
        raise ConfigError(
            f"engine={config.engine.name}: vLLM has no {method.name} drafters, measure this one with engine=hf"
        )
    by_vllm = config.engine.name != "hf" and config.states_computed != "inprocess"
    if method.reads_target_kv and by_vllm and "capture" in command.stages:
        raise ConfigError(
            f"engine={config.engine.name}: {method.name} drafters learn from the target's own keys and values, which "
            f"vLLM does not hand out: use engine=hf (responses may be generated with vLLM before), or "
            f"states.source=inprocess"
        )
    _check_loss(config)
    _check_policies(config, command, method)
    most, wanted = method.max_drafts(config.drafter), config.decoding.num_speculative_tokens
    if "fit" in command.stages and config.drafter.path is None and most is not None and wanted > most:
        block = f" (drafter.block.block_size={config.drafter.block.block_size})" if "block" in method.sections else ""
        raise ConfigError(
            f"decoding.num_speculative_tokens={wanted}: a drafter of this configuration gives {most} drafts a round"
            f"{block}: lower the one or raise the other"
        )


def _refuse_sections_of_others(method: DrafterMethod, given: Set[str]) -> None:
    others = sections_of_others(method)
    for key in sorted(given):
        parent, _, rest = key.partition(".")
        section = rest.partition(".")[0]
        if parent == "drafter" and section in others:
            raise ConfigError(f"{key}: drafter.method={method.name} does not read drafter.{section}: leave it out")


def sections_of_others(method: DrafterMethod) -> set[str]:
    """Sections of ``drafter`` that are some kinds' own and not this one's, options among them."""
    fields = dataclasses.fields(DrafterConfig)
    sections = {field.name for field in fields if dataclasses.is_dataclass(field.default_factory)}
    options = set() if method.reads_options else {"options"}
    return (sections - {"loss", *method.sections}) | options


def _check_loss(config: SpectrainConfig) -> None:
    """Every term is one that the implementation has."""
    from spectrain.drafters.losses.reference import TERMS
    from spectrain.drafters.losses.terms import FUSED_TERMS

    loss = config.drafter.loss
    for name in loss.weights:
        if name not in TERMS:
            close = suggest(name, TERMS)
            hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(TERMS)}"
            raise ConfigError(f"drafter.loss.weights.{name}: loss name {name} is unknown: {hint}")
        if loss.implementation != "reference" and name not in FUSED_TERMS:
            raise ConfigError(
                f"drafter.loss.weights.{name}: the {loss.implementation} implementation has no such term: set "
                f"drafter.loss.implementation=reference"
            )


def _check_policies(config: SpectrainConfig, command: Command, method: DrafterMethod) -> None:
    """Drafting by confidence is done by our own loop, with a drafter that has a confidence head."""
    if not command.measures or config.draft_policies == ("fixed",):
        return
    if config.engine.name != "hf":
        raise ConfigError(
            f"engine={config.engine.name} verifies all drafts: use decoding.draft_policy=fixed and no suite.policies, "
            f"or engine=hf"
        )
    if config.drafter.path is not None:
        from spectrain.drafters.hub_drafters import drafter_path

        check_confidence(drafter_path(config.drafter))
    elif command.trains and not method.has_confidence(config.drafter):
        raise ConfigError(
            f"{_POLICY_KEYS}: this {method.name} drafter has no confidence head to draft by; {_CONFIDENCE_ADVICE}"
        )


def check_baselines(config: SpectrainConfig, names: Collection[str]) -> None:
    """ConfigError for a method that lacks what it needs."""
    if "draft_model" in names and config.decoding.draft_model is None:
        raise ConfigError(
            "the method draft_model needs decoding.draft_model: name a small model with the target's tokenizer"
        )
    if "suffix" in names and config.engine.name == "vllm" and not importlib.util.find_spec("arctic_inference"):
        raise ConfigError(
            "the method suffix in vLLM needs the package arctic-inference, which is not installed: install it, leave "
            "suffix out, or use engine=hf"
        )


def check_measurement(config: SpectrainConfig, command: Command) -> None:
    """What a command that decodes a suite compares, grades and tests can be had."""
    if command.measures:
        check_baselines(config, config.suite.baselines)
        if not command.sweeps and config.suite.execute_code and config.suite.grading != "tests":
            raise ConfigError(
                f"suite.execute_code=true: suite {config.suite.name} is not graded by tests, leave it out"
            )
        _check_lossless(config, command)


def _check_lossless(config: SpectrainConfig, command: Command) -> None:
    """The test of sampled outputs can be made where it is asked for."""
    seeds = config.suite.lossless_seeds
    if not seeds:
        return
    if command.name not in ("eval", "run"):
        raise ConfigError(f"suite.lossless_seeds={seeds}: {command.name} does not draw them, use spectrain eval")
    if config.decoding.temperature == 0:
        raise ConfigError(
            f"suite.lossless_seeds={seeds} is of decoding.temperature above 0: at 0 outputs are compared token by token"
        )
    if "none" not in config.suite.baselines or config.engine.urls:
        raise ConfigError(f"suite.lossless_seeds={seeds} compares with no speculation: add none to suite.baselines")


def check_training_kernels(drafter: DrafterConfig) -> None:
    """What was asked for by name runs on this machine."""
    import torch

    if drafter.attention == "flex" and not torch.cuda.is_available():
        raise ConfigError("drafter.attention=flex trains on a GPU alone: use auto")
    if drafter.loss.implementation == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("drafter.loss.implementation=triton needs Triton, which is not installed: use fused")
        if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError("drafter.loss.implementation=triton trains on a GPU alone: use fused")


# --- a folder -----------------------------------------------------------------------------------------------------


def check_drafter_folder(folder: Path, field: str) -> None:
    """The folder holds a drafter: configuration and weights."""
    advice = (
        "name a folder that fit has written"
        if field == "drafter.path"
        else "run spectrain fit first, or name one with drafter.path"
    )
    if field == "drafter.path" and not os.path.isdir(folder):
        raise InputError(f"{field}={folder} is no folder here, and no Hub id: those have an owner, as in ORG/NAME")
    if not os.path.isfile(folder / CONFIG):  # unlike Path.is_file, False for names that no file can have
        raise InputError(f"{field}: {folder} holds no drafter ({CONFIG} is missing): {advice}")
    if not weight_files(folder):
        raise InputError(f"{field}: {folder} holds no drafter ({WEIGHTS} is missing): {advice}")


def check_confidence(folder: Path) -> None:
    """The drafter in a folder states its confidence."""
    from spectrain.drafters.drafter_folder import read_shape

    if not read_shape(folder, _ANY_TAPS).has_confidence:
        raise ConfigError(
            f"{_POLICY_KEYS}: the drafter in {folder} has no confidence head to draft by; {_CONFIDENCE_ADVICE}"
        )


def check_drafts(folder: Path, num_drafts: int) -> None:
    """The drafter in a folder gives as many drafts a round as are asked for."""
    from spectrain.drafters.drafter_folder import read_shape

    most = read_shape(folder, _ANY_TAPS).max_drafts
    if most is not None and num_drafts > most:
        raise ConfigError(
            f"decoding.num_speculative_tokens={num_drafts}: the drafter in {folder} gives {most} a round, lower it"
        )


def refuse_other_method(folder: Path, found: str, asked: str, given: Set[str]) -> None:
    """Nobody asks on the command line for another kind of drafter than the one in ``folder``."""
    if asked != found and given & {"drafter", "drafter.method"}:
        raise ConfigError(
            f"drafter={asked}, but the drafter in {folder} is a {found} drafter: leave drafter out, or name another "
            f"folder with drafter.path"
        )


def note_other_target(context: Context, folder: Path) -> None:
    """Say so where a drafter was trained for another target. It may work, if less well; what fits in no way is an
    error of ``check_drafter_fits``.
    """
    from spectrain.drafters.serving_config import read_serving_config

    other = read_serving_config(str(folder)).other_target(context.identity)
    if other is not None:
        say(f"note: {other}")


def check_drafter_fits(folder: Path, spec: TargetSpec) -> None:
    """A drafter's folder is whole, and was made for a target of these dimensions."""
    from spectrain.drafters.drafter_folder import load_drafter, read_method, read_shape
    from spectrain.drafters.overlay import check_links, is_overlay
    from spectrain.drafters.registry import find_method
    from spectrain.drafters.serving_config import read_serving_config

    usual_taps = spec.default_taps()
    shape = read_shape(folder, usual_taps)
    found = {"target_hidden_size": shape.hidden_size, "vocab_size": shape.target_vocab_size}
    for name, wanted in (("target_hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size)):
        if found[name] != wanted:
            raise InputError(
                f"drafter {folder} was trained for another target: its {name} is {found[name]}, this target's {wanted}"
            )
    misfit = find_method(read_method(folder)).misfit(shape, spec)
    if misfit:
        raise InputError(f"drafter {folder} was trained for another target: {misfit}")
    deepest = max(shape.taps, default=0)
    if deepest > spec.num_layers:
        raise InputError(
            f"drafter {folder} was trained for another target: it reads tap {deepest} of {spec.num_layers} layers"
        )
    if is_overlay(folder):
        check_links(folder)
    load_drafter(folder, usual_taps)  # raises for weights that are broken, or of another shape
    read_serving_config(str(folder))  # and for what a server would miss


def check_measured(context: Context) -> None:
    """The drafter that a command measures fits the target, and is what the command line says of it."""
    from spectrain.drafters.drafter_folder import read_method, read_shape

    config, folder = context.config, context.measured_drafter
    _restore_links(folder, context.source.folder)
    check_drafter_fits(folder, context.spec)
    refuse_other_method(folder, read_method(folder), config.drafter.method, context.given)
    _check_settled(config.drafter, folder, context.spec, context.given)
    check_context(read_shape(folder, _ANY_TAPS), config.target.max_length)
    check_drafts(folder, config.decoding.num_speculative_tokens)
    if config.draft_policies != ("fixed",):
        check_confidence(folder)
    note_other_target(context, folder)


def _restore_links(folder: Path, target: Path | None) -> None:
    from spectrain.drafters.overlay import is_overlay, restore_links

    if target is not None and is_overlay(folder):
        restore_links(folder, target)


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
    note_other_target(context, folder)


def _check_settled(drafter: DrafterConfig, folder: Path, spec: TargetSpec, given: Set[str] | None = None) -> None:
    """Nobody asks for other taps or another shape than those of the drafter in ``folder``, which stay. ``given``: the
    keys that ask; None: all of them.
    """
    from spectrain.drafters.drafter_folder import read_method, read_shape
    from spectrain.drafters.registry import find_method

    def asks(key: str) -> bool:
        return given is None or key in given

    shape = read_shape(folder, spec.default_taps())
    if asks("drafter.taps") and drafter.taps is not None and drafter.taps != shape.taps:
        raise ConfigError(
            f"drafter.taps={list(drafter.taps)}, but the drafter in {folder} reads {list(shape.taps)}: set "
            f"drafter.taps=null"
        )
    asked, plain = flatten(drafter), flatten(DrafterConfig())
    for name, found in find_method(read_method(folder)).settings(shape).items():
        if asks(f"drafter.{name}") and asked[name] not in (found, plain[name]):
            raise ConfigError(
                f"drafter.{name}={asked[name]}, but the drafter in {folder} has {found}, which stays: leave it out"
            )


# --- the target ----------------------------------------------------------------------------------------------------


def check_dimensions(config: SpectrainConfig, spec: TargetSpec) -> None:
    """The drafter fits the target."""
    from spectrain.drafters.registry import find_method

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
    check_context(find_method(drafter.method).shape(drafter, spec), longest)


def check_context(shape: DrafterShape, max_length: int) -> None:
    """A drafter computes texts of ``target.max_length`` as it is served."""
    most = shape.most_context
    if most is not None and max_length > most:
        raise ConfigError(
            f"target.max_length={max_length}: beyond {most:,} tokens (index_topk) this target's multi-token-prediction "
            f"head reads keys that its indexer chooses, which is not computed here: set target.max_length={most}"
        )
