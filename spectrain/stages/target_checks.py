"""What can be refused about the target at work, before it works: a family that nothing is known of, attention that is
not installed, prompts that its template or its length cannot take, a drafter that no memory here holds.

Needs the target's folder, not its weights. Each check raises ConfigError or InputError with one sentence; nothing here
writes anything.
"""

from __future__ import annotations

import importlib.util
import os
from itertools import chain, compress
from typing import TYPE_CHECKING

from spectrain.console import say
from spectrain.errors import ConfigError, InputError
from spectrain.files import bytes_text, digest_strings

if TYPE_CHECKING:
    from spectrain.config.commands import Command
    from spectrain.config.schema import SpectrainConfig
    from spectrain.stages.context import Context

_PARAMETER_BYTES = 12  # weight, gradient and one moment in float32: the least that training takes
_CHECKED: set[str] = set()  # prompts that were found right: the jobs of a sweep ask the same ones
_OWN_LOOP = ("eager", "sdpa")  # attention that takes the masks of rows of different lengths


def check_at_work(context: Context) -> None:
    """Everything about a target whose folder is here."""
    _check_prompts(context)
    _check_attention_implementation(context)
    if context.command.trains:
        _check_memory(context)


def _in_process(context: Context) -> bool:
    """Whether this process runs the target itself."""
    runs = context.command.measures or "generate" in context.command.stages
    beside = context.command.trains and context.config.states_computed == "inprocess"
    return beside or (context.config.engine.name == "hf" and runs)


def check_family(context: Context) -> None:
    """Whoever runs the target here, or computes with its head, knows its family, or says what was found of it. Needs
    its dimensions alone.
    """
    from spectrain.target.families import head_math

    command = context.command
    if _in_process(context) or command.captures or command.trains or command.measures:
        math = head_math(context.spec.config)
        if math.family.found:
            from spectrain.target.generic_family import describe

            say(f"target {context.config.target.name}: {describe(math, context.spec.model_type)}")


def _check_prompts(context: Context) -> None:
    """The template takes every conversation that is still to be answered, and leaves room for an answer."""

    from spectrain.data.responses import ResponseStore
    from spectrain.engines.conversations import Dialogue, Turns

    command, longest = context.command, context.config.target.max_length
    if context.prompts_or_none is None and context.config.data.selects:
        return  # a plan that does not read them
    if "generate" in command.stages:
        stored = ResponseStore(context.data_dir.responses).whole_keys()
        missing = stored.places_of(context.asked.keys) < 0
        conversations = chain(context.prompts.train, context.prompts.heldout) if missing.any() else iter(())
        # Prompts without answers were looked at when they were screened.
        imported = [c for c in compress(conversations, missing.tolist()) if c.answers is not None]
        asked_for = digest_strings(
            [context.template.digest, longest, [[c.prompt_digest(), c.answers] for c in imported]]
        )
        if imported and asked_for not in _CHECKED:
            Turns(Dialogue, context.template, context.eos_ids, context.sampling, longest).check(imported, quiet=True)
            _CHECKED.add(asked_for)
    if command.asks_suite(context.config.sweep.suites):
        from spectrain.stages.answer_suite import answer_limit, suite_prompts  # and with it what draws a report

        for conversation in suite_prompts(context):
            answer_limit(context, conversation, context.template.first_prompt_ids(conversation))


def _check_attention_implementation(context: Context) -> None:
    """The kernel that this process is asked to run the target with is installed, and takes the masks that it needs."""
    from transformers.utils import (
        is_flash_attn_2_available,
        is_flash_attn_3_available,
        is_torch_flex_attn_available,
    )

    name = context.config.target.attn_implementation
    if not _in_process(context) or name in _OWN_LOOP:
        return
    is_there = {
        "flash_attention_2": is_flash_attn_2_available,
        "flash_attention_3": is_flash_attn_3_available,
        "flex_attention": is_torch_flex_attn_available,
    }[name]
    if not is_there():
        raise ConfigError(f"target.attn_implementation={name} is not installed here: use sdpa or eager")
    if not context.spec.hybrid and (context.command.measures or _generates(context)):
        raise ConfigError(
            f"target.attn_implementation={name} takes no 4-D mask, which rows of different lengths need: use sdpa or "
            f"eager"
        )


def _generates(context: Context) -> bool:
    from spectrain.stages import generate

    return not generate.decide(context).skip


def _check_memory(context: Context) -> None:
    from spectrain.stages.plan import drafter_parameters

    parameters = sum(size for size, dimensions in drafter_parameters(context).values() if dimensions > 1)
    there = memory_bytes(context.config.target.device)
    if parameters * _PARAMETER_BYTES > there:
        raise ConfigError(
            f"a drafter of {parameters / 1e6:,.0f} M parameters takes more than "
            f"{bytes_text(parameters * _PARAMETER_BYTES)} to train, there are {bytes_text(there)}: lower "
            f"drafter.num_layers, drafter.intermediate_size or drafter.draft_vocab_size"
        )


def memory_bytes(device: str) -> int:
    """All the memory of the device, in use or not."""
    import torch

    from spectrain.target.model import choose_device

    chosen = choose_device(device)
    if chosen.type == "cuda":
        return torch.cuda.get_device_properties(chosen).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# --- trackers ------------------------------------------------------------------------------------------------------


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


def check_trackers(config: SpectrainConfig) -> None:
    """Their packages are installed."""
    for tracker in config.logger.trackers:
        if tracker not in _TRACKERS:
            raise ConfigError(f"logger.trackers: {tracker} is unknown: use {', '.join(_TRACKERS)}")
        if importlib.util.find_spec(_TRACKERS[tracker]) is None:
            raise ConfigError(
                f"logger.trackers: {tracker} is not installed: pip install {_TRACKERS[tracker]}, or use logger=none"
            )


def check_strategy(config: SpectrainConfig, command: Command) -> None:
    """The engine that shards is installed."""
    strategy = config.trainer.strategy
    if command.trains and strategy.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"trainer.strategy={strategy}: DeepSpeed is not installed: pip install 'spectrain[deepspeed]', or use "
            f"trainer.strategy=fsdp2, which shares out weights, gradients and moments with torch alone"
        )


def check_trackers_answer(context: Context) -> None:
    """Trackers that need an account and a network have both: hours later, nobody would be there to log in."""
    from spectrain.stages import fit

    if "wandb" not in context.config.logger.trackers or not context.command.trains or fit.decide(context).skip:
        return
    if context.config.logger.offline:
        return
    if os.environ.get("WANDB_MODE", "online") not in ("online", "run", "shared"):
        return
    import wandb  # type: ignore[import-not-found,unused-ignore]

    try:
        _ = wandb.Api(timeout=10).viewer
    except Exception as error:  # of the network, of the Hub of runs, of its client
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"logger.trackers: wandb does not answer ({type(error).__name__}: {reason}): log in with `wandb login`, "
            f"set logger.offline=true, or use logger=none"
        ) from error
