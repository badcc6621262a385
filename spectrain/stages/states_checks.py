"""What can be refused about where hidden states come from, and go to, before work starts."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from spectrain.config.commands import Command
from spectrain.config.schema import SpectrainConfig
from spectrain.errors import ConfigError, InputError
from spectrain.files import bytes_text, free_bytes, mount_point

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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
    missing_D, replaced = _to_capture(context)
    count, needed = _sized(context, missing_D)
    free = free_bytes(folder) + replaced
    if needed > 2 * free:
        raise ConfigError(
            f"the hidden states of {count:,} documents need up to {bytes_text(needed)}, the disk mounted on "
            f"{mount_point(folder)} has {bytes_text(free)} free for run.dir={folder}: use hidden_states.dtype=int8, "
            f"fewer prompts (data.max_train), states.source=inprocess or online, or another run.dir"
        )


def _to_capture(context: Context) -> tuple[npt.NDArray[np.bool_] | None, int]:
    """Which of the D responses that are asked for have no hidden states yet (None: no one has any), and the bytes of
    those that will be removed before.
    """
    import numpy as np

    from spectrain.data.hidden_states import INDEX_NAME
    from spectrain.data.response_parts import DamagedPartError
    from spectrain.data.shard_damage import stored_key_column
    from spectrain.stages import capture

    folder, nothing = context.data_dir.hidden_states, np.zeros(0, dtype=bool)
    if context.source.folder is None or not (folder / INDEX_NAME).is_file():
        return None, 0
    try:
        decision = capture.decide(context)
    except DamagedPartError:  # its prompts are answered again first
        return nothing, 0
    if decision.skip:
        return nothing, 0
    if decision.action == "restart":
        return None, sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return stored_key_column(folder).places_of(context.asked.keys) < 0, 0


def _sized(context: Context, missing_D: npt.NDArray[np.bool_] | None) -> tuple[int, int]:
    """(documents, bytes of their hidden states). Where all responses are there, by their tokens; else by the prompts,
    which are read for it, and at most.
    """
    import numpy as np

    from spectrain.data.hidden_states import bytes_per_token
    from spectrain.data.responses import ResponseStore
    from spectrain.data.stored_responses import StoredResponses
    from spectrain.stages.plan import states_bytes

    if missing_D is not None and not missing_D.any():
        return 0, 0
    responses = ResponseStore(context.data_dir.responses)
    with suppress(InputError):  # some are not there, or cannot be read
        if context.source.folder is not None and responses.parts():
            lengths_D = StoredResponses(responses, context.asked).lengths_D
            missing_D = np.ones(len(lengths_D), dtype=bool) if missing_D is None else missing_D
            return int(missing_D.sum()), int(lengths_D[missing_D].sum()) * bytes_per_token(context.store_meta())
    prompts: list[Conversation] = [*context.prompts.train, *context.prompts.heldout]
    if missing_D is not None:
        prompts = [conversation for conversation, missing in zip(prompts, missing_D.tolist(), strict=True) if missing]
    return len(prompts), states_bytes(context, prompts)
