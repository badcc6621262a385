"""What can be refused about where hidden states come from, and go to, before work starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spectrain.config.commands import Command
from spectrain.config.schema import SpectrainConfig
from spectrain.errors import ConfigError
from spectrain.files import bytes_text, free_bytes, mount_point

if TYPE_CHECKING:
    from spectrain.data.prompts import Conversation
    from spectrain.stages.context import Context


def check_source(config: SpectrainConfig, command: Command) -> None:
    """``states.source`` can be had from the engine, and is not asked to store."""
    source, computed = config.states.source, config.states_computed
    if not computed or "capture" not in command.stages:
        return
    if not command.trains and not command.looks_only:
        raise ConfigError(
            f"states.source={source}: hidden states are computed while training asks for them, {command.name} has "
            f"nothing to store: leave it out, or add states.source=stored"
        )
    if computed == "online" and config.engine.name == "hf":
        raise ConfigError(
            f"states.source={source} asks vLLM, engine=hf starts none: use states.source=inprocess, or engine=vllm"
        )
    if computed == "inprocess" and config.target.device_map is not None and command.trains:
        _require_one_rank(config)
    if config.capture.during_generation:
        raise ConfigError(
            f"capture.during_generation=true stores hidden states, states.source={source} reads none: set it to false, "
            f"or add states.source=stored"
        )
    if config.trainer.loader_workers:
        raise ConfigError(
            f"trainer.loader_workers={config.trainer.loader_workers}: with states.source={source} batches are made "
            f"where hidden states are asked for, in the trainer's own process: leave it out, or set it to 0"
        )
    if computed == "online" and config.engine.urls and config.engine.connector != "stock":
        raise ConfigError(
            f"engine.urls: servers that run already have vLLM's own connector (docs/vllm.md says how they are started "
            f"for states.source={source}): add engine.connector=stock, or leave engine.urls empty"
        )


def _require_one_rank(config: SpectrainConfig) -> None:
    """Each rank runs the whole target, and would lay it over the devices of all."""
    from spectrain.stages.launching import launched

    if config.trainer.devices != "1" or launched() > 1:
        raise ConfigError(
            f"target.device_map={config.target.device_map} lays one target over the devices, states.source=inprocess "
            f"gives every rank its own: use one rank (trainer.devices=1), or states.source=stored"
        )


def check_disk(context: Context) -> None:
    """There is room for the hidden states that are still to be captured, or cached. The estimate is an upper bound
    (answers may be short), so only twice too much is refused.
    """
    from spectrain.stages.plan import states_bytes

    states, folder = context.config.states, context.data_dir.path
    if states.source in ("online", "inprocess"):
        return
    if states.source == "cached":
        needed, free = states.cache_bytes, free_bytes(context.run_dir.path)
        asked = [*context.prompts.train, *context.prompts.heldout]
        if min(needed, states_bytes(context, asked)) > 2 * free:
            raise ConfigError(
                f"states.cache_bytes={needed}: the disk mounted on {mount_point(context.run_dir.path)} has "
                f"{bytes_text(free)} free for run.dir={context.run_dir.path}: lower it, or use another run.dir"
            )
        return
    missing, replaced = _to_capture(context)
    needed, free = states_bytes(context, missing), free_bytes(folder) + replaced
    if needed > 2 * free:
        raise ConfigError(
            f"the hidden states of {len(missing):,} documents need up to {bytes_text(needed)}, the disk mounted on "
            f"{mount_point(folder)} has {bytes_text(free)} free for run.dir={folder}: use hidden_states.dtype=int8, "
            f"fewer prompts (data.max_train), states.source=inprocess or online, or another run.dir"
        )


def _to_capture(context: Context) -> tuple[list[Conversation], int]:
    """Conversations that have no hidden states yet, and the bytes of those that will be removed before."""
    from spectrain.data.hidden_states import INDEX_NAME
    from spectrain.data.response_parts import DamagedPartError
    from spectrain.data.shard_damage import stored_key_column
    from spectrain.stages import capture

    prompts, folder = context.prompts, context.data_dir.hidden_states
    if context.source.folder is None or not (folder / INDEX_NAME).is_file():
        return [*prompts.train, *prompts.heldout], 0
    try:
        decision = capture.decide(context)
    except DamagedPartError:  # its prompts are answered again first
        return [], 0
    if decision.skip:
        return [], 0
    if decision.action == "restart":
        return [*prompts.train, *prompts.heldout], sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    missing_D = stored_key_column(folder).places_of(context.asked.keys) < 0
    if not missing_D.any():
        return [], 0  # without reading a prompt
    asked = [*prompts.train, *prompts.heldout]
    return [conversation for conversation, missing in zip(asked, missing_D.tolist(), strict=True) if missing], 0
