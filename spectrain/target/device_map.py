"""A target whose layers lie on several devices (``target.device_map``), as accelerate lays and runs them.

Hooks around a module bring its inputs to where it computes, so between two layers a tensor may lie on either's device.
``TargetModel`` hides that: what it is given and what it hands out is on ``target.device``. Modules on ``cpu`` (where
there is an accelerator) and on ``disk`` are brought over for each pass, so every token read costs their bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.config.target_schema import TargetConfig
from spectrain.console import say
from spectrain.errors import ConfigError

_NOT_DEVICES = ("cpu", "disk")


@dataclass(frozen=True)
class Placement:
    """Where the parts of a target are put. ``offloaded``: keeps the folder of weights that are read for each pass, for
    as long as somebody holds it.
    """

    layers: Any  # as from_pretrained takes it; None: the CPU
    offloaded: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def of(cls, config: TargetConfig, device: torch.device) -> Placement:
        """``device``: that of target.device. ``ConfigError`` for a device that is not there."""
        if config.device_map is None:
            return cls({"": device} if device.type != "cpu" else None)
        check_devices(config.device_map)
        asked = config.device_map
        layers = asked if isinstance(asked, str) else {name: _device(place) for name, place in asked.items()}
        # Weights that transformers rewrites as it loads them (experts, codes) are written here.
        return cls(layers, tempfile.TemporaryDirectory(prefix="spectrain-offloaded-"))

    def options(self) -> dict[str, Any]:
        """For ``from_pretrained``."""
        folder = {} if self.offloaded is None else {"offload_folder": self.offloaded.name}
        return {"device_map": self.layers, **folder}


def check_devices(device_map: Any) -> None:
    """``ConfigError`` for a map that names a device that is not there."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for name, place in device_map.items() if isinstance(device_map, Mapping) else ():
        device = _device(place)
        if device not in _NOT_DEVICES and (torch.device(device).index or 0) >= there:
            raise ConfigError(
                f"target.device_map: {name} is to lie on {place}, there are {there} CUDA or ROCm devices here: "
                f"use cpu or disk, or target.device_map=auto"
            )


def check_names(device_map: Any, model: nn.Module) -> None:
    """``ConfigError`` for a map that leaves a weight of ``model`` out, or names what it does not have."""
    if not isinstance(device_map, Mapping):
        return
    weights = [name for name, _ in model.named_parameters()]
    modules = {name for name, _ in model.named_modules()}
    for name in device_map:
        if name not in modules and name not in weights:
            raise ConfigError(f"target.device_map: the target has no {name}, its weights begin with {_first(weights)}")
    for weight in weights:
        if not any(weight == name or weight.startswith(f"{name}.") for name in device_map):
            raise ConfigError(
                f"target.device_map says of {weight} not where it lies: name it, or a module that holds it"
            )


def _first(weights: Iterable[str]) -> str:
    return next(iter(weights), "nothing")


def _device(place: Any) -> str:
    return f"cuda:{place}" if isinstance(place, int) else str(place)


def runs_on(module: nn.Module, otherwise: torch.device) -> torch.device:
    """Where a module computes: not where its weights lie, if they are brought over for each pass. ``otherwise``: where
    one computes that has no weights.
    """
    place = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    weight = next(module.parameters(), None)
    if place is None:
        return otherwise if weight is None else weight.device
    return torch.device(place)


def brought_to(device: torch.device, *values: Any) -> tuple[Any, ...]:
    """Tensors, dictionaries of tensors and None, on a device."""

    def brought(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: brought(entry) for name, entry in value.items()}
        return value.to(device) if isinstance(value, Tensor) else value

    return tuple(brought(value) for value in values)


def note_offloaded(model: Any, asked: Any) -> None:
    """A line where accelerate was to lay out a target that the devices do not hold: it says nothing of it."""
    places = [str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()]
    beside = [place for place in places if place in _NOT_DEVICES]
    if isinstance(asked, str) and ("disk" in beside or 0 < len(beside) < len(places)):
        say(
            f"note: target.device_map={asked}: {len(beside)} of {len(places)} parts of the target do not fit the "
            f"devices, and are brought over for every pass, which is slow"
        )


def on_cpu_alone(model: Any) -> bool:
    """Whether everything of a transformers model computes on the CPU."""
    places = getattr(model, "hf_device_map", None) or {"": model.device}
    return all(str(place) in _NOT_DEVICES for place in places.values())
