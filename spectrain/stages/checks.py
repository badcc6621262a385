"""Everything that can be checked before work starts.

Conflicts inside one component are rejected by its dataclass (``config.py``). Here are those between components, and
between the
configuration and the world: prompt files, the target's dimensions, the run directory, the disk. Each check raises
ConfigError or InputError with one sentence; nothing here writes anything.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from spectrain.config.drafter_schema import BLOCK_METHODS, BlockConfig, DrafterConfig
from spectrain.config.folders import prompt_roots
from spectrain.config.schema import SpectrainConfig
from spectrain.errors import ConfigError, InputError
from spectrain.stages.run_dir import RunDir

if TYPE_CHECKING:
    from spectrain.data.prompts import PromptSplit
    from spectrain.stages.context import Context
    from spectrain.target.resolve import TargetSource
    from spectrain.target.spec import TargetSpec

# Tracker of accelerate -> the package that it needs.
_TRACKERS = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "aim": "aim",
    "comet_ml": "comet_ml",
    "mlflow": "mlflow",
    "clearml": "clearml",
    "dvclive": "dvclive",
    "swanlab": "swanlab",
}
_DRAFTER_FILES = ("config.json", "model.safetensors")
_POLICY_KEYS = "decoding.draft_policy, suite.policies"
_CONFIDENCE_ADVICE = "use fixed, or train one with drafter=dspark"


def check_config(config: SpectrainConfig, command: str) -> None:
    """What the configuration alone tells. Needs no torch, so errors come at once."""
    if not config.target.path:
        there = os.path.isfile(Path(config.run.dir) / "config.yaml")
        known = "" if there else f" (run.dir={config.run.dir} holds no config.yaml to go on from)"
        raise ConfigError(
            f"no target is chosen: add recipe=quickstart, target=smollm2_135m, or target.path=FOLDER_OR_HUB_ID{known}"
        )
    if not config.run.dir:
        raise ConfigError("run.dir is empty: name the folder of the run")
    if command in ("eval", "run") and not config.suite.prompts:
        raise ConfigError("suite.prompts is empty: name a JSON-lines file, as in suite=jsonl suite.prompts=FILE.jsonl")
    if command != "eval" and not config.data.train:
        raise ConfigError("no prompts are chosen: add data=quickstart, or data=jsonl data.train=FILE.jsonl")
    _check_lengths(config, command)
    _check_trackers(config)
    _check_engine(config, command)
    _check_drafts(config, command)
    _check_policies(config, command)
    if config.drafter.path is not None:
        check_drafter_folder(Path(config.drafter.path).expanduser(), "drafter.path")


def prepare(config: SpectrainConfig, command: str, data_dir: Path | None = None, fetch: bool = True) -> Context:
    """Check everything that ``command`` depends on, and gather what was learnt. The run directory is not touched.

    ``data_dir``: the run directory that has responses, states and drafter for this one (a job of a sweep). ``fetch``: a
    target that is not on this machine is downloaded or converted, once everything else is known to be right; otherwise
    its dimensions stay unknown.
    """
    from spectrain.stages.context import Context
    from spectrain.target.resolve import locate_target

    run_dir = RunDir(config.run.dir)
    run_dir.check({})
    if command in ("eval", "run"):
        check_suite(config)
    reads_prompts = command != "eval" or config.suite.prompts == "heldout"
    prompts = load_prompt_split(config) if reads_prompts else None
    source = locate_target(config.target, unreachable_ok=not fetch)
    if source.revision:
        run_dir.check({"id": source.id, "revision": source.revision})
    if command == "run" and prompts is not None:
        _check_suite_is_unseen(config, prompts)
    context = Context(
        config=config,
        command=command,
        run_dir=run_dir,
        source=source,
        spec_or_none=target_spec(config, source),
        prompts_or_none=prompts,
        data_dir=run_dir if data_dir is None else RunDir(data_dir),
    )
    if command == "eval":
        check_drafter_folder(context.measured_drafter, "drafter.path" if config.drafter.path else "run.dir")
    if fetch and context.spec_or_none is None:
        context.learn_spec()
    if context.spec_or_none is not None:
        _check_against_target(context)
    if fetch:
        _ = context.template  # raises for a target that cannot chat
    return context


def _check_against_target(context: Context) -> None:
    config, spec = context.config, context.spec
    check_dimensions(config, spec)
    if context.command == "eval":
        check_drafter_fits(context.measured_drafter, spec)
        check_drafts(context.measured_drafter, config.decoding.num_speculative_tokens)
        if config.draft_policies != ("fixed",):
            check_confidence(context.measured_drafter)
    elif config.drafter.path is not None:
        _check_continued(context, Path(config.drafter.path).expanduser())
    if context.command in ("capture", "fit", "run"):
        check_disk(context)
    if context.command in ("fit", "run"):
        _check_attention(config.drafter)


# --- the configuration alone ---------------------------------------------------------------------------------------


def _check_lengths(config: SpectrainConfig, command: str) -> None:
    answer, longest = config.sampling.max_new_tokens, config.target.max_length
    if answer >= longest:
        raise ConfigError(
            f"sampling.max_new_tokens={answer} leaves no room for a prompt in target.max_length={longest}: lower one, "
            f"or raise the other"
        )
    if command in ("fit", "run", "plan") and answer < 2:
        raise ConfigError(
            "sampling.max_new_tokens=1: a drafter learns what follows a generated token, let answers have 2 tokens at "
            "least"
        )
    rows = config.trainer.packed_length
    if command in ("fit", "run", "plan") and rows <= answer:
        raise ConfigError(
            f"trainer.packed_length={rows} cannot hold a prompt and an answer of sampling.max_new_tokens={answer}: "
            f"raise packed_length"
        )
    drafts, measured = config.decoding.num_speculative_tokens, config.suite.max_new_tokens or answer
    if drafts > measured:
        raise ConfigError(
            f"decoding.num_speculative_tokens={drafts} is more than an answer may have ({measured} tokens): lower it"
        )


def _check_trackers(config: SpectrainConfig) -> None:
    for tracker in config.logger.trackers:
        if tracker not in _TRACKERS:
            raise ConfigError(f"logger.trackers: {tracker} is unknown: use {', '.join(_TRACKERS)}")
        if importlib.util.find_spec(_TRACKERS[tracker]) is None:
            raise ConfigError(
                f"logger.trackers: {tracker} is not installed: pip install {_TRACKERS[tracker]}, or use logger=none"
            )


def _check_drafts(config: SpectrainConfig, command: str) -> None:
    """A fresh drafter gives as many drafts as the simulation takes."""
    most, wanted = config.drafter.most_drafts, config.decoding.num_speculative_tokens
    if command in ("fit", "run", "plan") and config.drafter.path is None and most is not None and wanted > most:
        raise ConfigError(
            f"decoding.num_speculative_tokens={wanted}: blocks of {config.drafter.block.block_size} slots give {most} "
            f"drafts a round, "
            "lower it or raise drafter.block.block_size"
        )


def _check_policies(config: SpectrainConfig, command: str) -> None:
    """Drafting by confidence is done by our own loop, with a drafter that has a confidence head."""
    if command not in ("eval", "run") or config.draft_policies == ("fixed",):
        return
    if config.engine.name != "hf":
        raise ConfigError(
            f"engine={config.engine.name} verifies all drafts: use decoding.draft_policy=fixed and no suite.policies, "
            f"or engine=hf"
        )
    if config.drafter.path is not None:
        check_confidence(Path(config.drafter.path).expanduser())
    elif command == "run" and (config.drafter.method != "dspark" or config.drafter.block.confidence is False):
        raise ConfigError(
            f"{_POLICY_KEYS}: this {config.drafter.method} drafter has no confidence head to draft by; "
            f"{_CONFIDENCE_ADVICE}"
        )


def check_confidence(folder: Path) -> None:
    """The drafter in a folder states its confidence."""
    from spectrain.drafters.drafter_folder import read_method, read_shape

    if read_method(folder) != "dspark" or not getattr(read_shape(folder), "confidence", False):
        raise ConfigError(
            f"{_POLICY_KEYS}: the drafter in {folder} has no confidence head to draft by; {_CONFIDENCE_ADVICE}"
        )


def _check_engine(config: SpectrainConfig, command: str) -> None:
    """vLLM is here if it is to be started here, and knows the arguments it will be given."""
    from spectrain.engines.vllm.args import check_own_args

    one_pass = (
        config.capture.during_generation and command != "eval"
    )  # which generates nothing: the run that it measures may have
    if one_pass and config.engine.connector == "stock":
        raise ConfigError(
            "capture.during_generation=true needs engine.connector=spectrain: vLLM's own does not keep whole "
            "conversations"
        )
    if config.engine.name == "hf":
        if one_pass:
            raise ConfigError(
                "capture.during_generation=true needs vLLM: add engine=vllm or engine=vllm_server, or set it to false"
            )
    elif config.engine.name == "vllm" or not config.engine.urls:
        check_own_args(config.engine.args, measures=command in ("eval", "run"))
    elif command in ("capture", "run") or one_pass:
        raise ConfigError(
            "engine.urls: servers that run already do not hand out hidden states: leave engine.urls empty, so that "
            "servers are started "
            "with what capture needs, or use another engine for capture"
        )


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


# --- files ---------------------------------------------------------------------------------------------------------


def load_prompt_split(config: SpectrainConfig) -> PromptSplit:
    """Training and held-out prompts; raises for a missing, empty or broken file, and for prompts that are both."""
    from spectrain.data.prompts import split_prompts

    return split_prompts(config.data, prompt_roots())


def check_suite(config: SpectrainConfig) -> None:
    """The suite's prompt file is there and can be read."""
    from spectrain.data.prompts import find_prompt_file, load_prompts

    if config.suite.prompts != "heldout":
        load_prompts(find_prompt_file(config.suite.prompts, prompt_roots(), "suite.prompts"))
    elif not config.data.train:
        raise ConfigError(
            "suite.prompts=heldout needs the run's prompts: add data=..., or suite=jsonl suite.prompts=FILE.jsonl"
        )


def _check_suite_is_unseen(config: SpectrainConfig, prompts: PromptSplit) -> None:
    """No prompt of the suite is trained on: what is measured on those says nothing of others."""
    from spectrain.evaluation.suites import load_suite

    trained = {conversation.prompt_digest(): conversation for conversation in prompts.train}
    seen = [
        c
        for c in load_suite(config.suite, prompts.heldout, prompt_roots(), config.data.system)
        if c.prompt_digest() in trained
    ]
    if seen:
        raise ConfigError(
            f"suite.prompts: {len(seen)} of its prompts are training prompts too, the first at {seen[0].where} "
            f"(as {trained[seen[0].prompt_digest()].where}): remove them from one side"
        )


# --- the target ----------------------------------------------------------------------------------------------------


def target_spec(config: SpectrainConfig, source: TargetSource) -> TargetSpec | None:
    """The target's dimensions, without downloading or converting it; None if they are not on this machine."""
    from spectrain.console import quiet_transformers
    from spectrain.target.bundled import find_gguf
    from spectrain.target.spec import TargetSpec

    if source.folder is not None:
        return TargetSpec.from_folder(source.folder, config.target.trust_remote_code)
    if source.kind == "hub":
        return _hub_spec(config, source)
    gguf = (
        find_gguf(config.target.bundled_package) if source.kind == "bundled" and config.target.bundled_package else None
    )
    if gguf is None:
        return None
    from transformers import AutoConfig

    with quiet_transformers():
        return TargetSpec.from_config(
            AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
        )


def _hub_spec(config: SpectrainConfig, source: TargetSource) -> TargetSpec | None:
    """The dimensions of a target on the Hub, from its configuration alone, which is not kept."""
    from spectrain.target.resolve import fetch_config
    from spectrain.target.spec import TargetSpec

    with tempfile.TemporaryDirectory() as folder:
        if not fetch_config(config.target, source, Path(folder)):
            return None
        try:
            return TargetSpec.from_folder(Path(folder), config.target.trust_remote_code)
        except (
            InputError
        ):  # one that needs more than its configuration (code of its own); what is wrong shows once it is here
            return None


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


def _check_continued(context: Context, folder: Path) -> None:
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


def _check_attention(drafter: DrafterConfig) -> None:
    import torch

    if drafter.attention == "flex" and not torch.cuda.is_available():
        raise ConfigError("drafter.attention=flex trains on a GPU alone: use auto")


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


def _check_heads(drafter: DrafterConfig, spec: TargetSpec) -> None:
    from spectrain.drafters.build import layer_shape

    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        value = getattr(drafter, name)
        if value is not None and value < 1:
            raise ConfigError(f"drafter.{name}={value} must be at least 1")
    layer_shape(drafter, spec)


# --- the disk ------------------------------------------------------------------------------------------------------


def check_disk(context: Context) -> None:
    """There is room for the states. The estimate is an upper bound (answers may be short), so only twice too much is
    refused.
    """
    from spectrain.stages.plan import estimate

    folder = context.data_dir.path
    while not folder.exists():
        folder = folder.resolve().parent
    present = sum(file.stat().st_size for file in context.data_dir.hidden_states.glob("*.safetensors"))
    needed, free = estimate(context).states_bytes - present, shutil.disk_usage(folder).free
    if needed > 2 * free:
        raise ConfigError(
            f"the states need up to {needed / 1e9:,.1f} GB, {folder} has {free / 1e9:,.1f} GB free: "
            "use hidden_states.dtype=int8, fewer prompts (data.max_train), or another run.dir"
        )
