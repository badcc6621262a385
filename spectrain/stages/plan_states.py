"""What ``states.source`` does to a plan: which hidden states lie on a disk, and how often the target runs for them."""

from __future__ import annotations

import torch

from spectrain.config.schema import SpectrainConfig
from spectrain.files import bytes_text, free_bytes
from spectrain.stages.context import Context
from spectrain.stages.target_size import target_bytes


def bytes_on_disk(context: Context, states_bytes: int) -> int:
    """Of ``states_bytes`` hidden states, those that lie on the disk together, at most."""
    states = context.config.states
    if states.source == "cached":
        return min(states_bytes, states.cache_bytes)
    return states_bytes if states.source == "stored" else 0


def target_passes(context: Context, epochs: float, ranks: int) -> tuple[float, float]:
    """How often the devices of the engine run the target over all documents: (for capture, while ``fit`` asks)."""
    config = context.config
    if not config.states_computed:
        return float(not config.capture.during_generation), 0.0
    once = config.states.source == "cached" and config.states.cache_bytes > 0
    asked = min(epochs, 1.0) if once else epochs
    return 0.0, asked / ranks if config.states_computed == "inprocess" else asked


def disk_lines(context: Context, states_bytes: int, captures: bool) -> list[tuple[str, str]]:
    """The lines of a plan about the disk. ``captures``: there are hidden states to store, on this machine."""
    states, free = context.config.states, free_bytes(context.data_dir.path)
    on_disk = bytes_on_disk(context, states_bytes)
    if not on_disk:
        return [("disk", f"no hidden states (states.source={states.source}), {bytes_text(free)} free")]
    cached = f", of {bytes_text(states_bytes)}, in states.cache_bytes" if on_disk < states_bytes else ""
    lines = [
        (
            "disk",
            f"{bytes_text(on_disk)} of hidden states at most ({context.states_dtype}{cached}), {bytes_text(free)} free",
        )
    ]
    if on_disk > free and captures:
        lower = "hidden_states.dtype=int8, data.max_train, sampling.max_new_tokens or states.source=inprocess"
        lines.append(("", f"MORE THAN IS FREE: {lower} lower it"))
    return lines


def target_beside(context: Context) -> float:
    """Bytes of the target that lie on the device of each rank of ``fit``. ``target.device_map`` lays it over as many
    devices as there are: none are counted.
    """
    if context.config.states_computed != "inprocess" or context.config.target.device_map is not None:
        return 0.0
    return target_bytes(context.spec, getattr(torch, context.dtype_name).itemsize)


def engine_devices(config: SpectrainConfig) -> int:
    """Devices that run the target."""
    engine = config.engine
    if engine.name == "hf":
        return 1
    one = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    return one * (max(len(engine.urls), engine.replicas) if engine.name == "vllm_server" else 1)
