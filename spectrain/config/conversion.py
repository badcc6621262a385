"""From plain values to typed configuration, with strict types.

Hydra hands over nested dicts; here they become the dataclasses of ``config.py``. A value of the wrong type is an error
that names the key, the type and the value; nothing is converted that could hide a mistake (``true`` is not 1, ``2.0``
is not a whole number). Three readings are allowed because nobody could mean anything else: a whole number for a decimal
one, a list for a tuple, and a single value for a tuple of one (``data.train=prompts.jsonl``).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from spectrain.config.schema import SpectrainConfig
from spectrain.errors import ConfigError

_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def build(values: Mapping[str, Any]) -> SpectrainConfig:
    """``values``: nested mapping, as ``dataclasses.asdict`` gives. Missing keys take their default.

    Raises ConfigError: an unknown key, a value of the wrong type, or a conflict inside one component.
    """
    return _build(SpectrainConfig, values, "")


def flatten(config: object, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value for every field of a configuration (dict fields stay whole)."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat


@cache
def key_types() -> dict[str, Any]:
    """Dotted key -> declared type, for every key of the configuration. Sections have their dataclass as type."""

    def collect(section: type, prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, kind in typing.get_type_hints(section).items():
            found[prefix + name] = kind
            if dataclasses.is_dataclass(kind):
                found |= collect(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        return found

    return collect(SpectrainConfig, "")


def unknown_key(key: str) -> ConfigError:
    """The error for a key that does not exist, with the nearest one that does."""
    known = [name for name, kind in key_types().items() if not dataclasses.is_dataclass(kind)]
    section, _, last = key.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in known if section and name.rpartition(".")[0] == section]
    near = [f"{section}.{name}" for name in suggest(last, siblings)]
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    for close in near, elsewhere, [] if siblings else suggest(key, known):
        if close:
            return ConfigError(f"unknown key {key}: did you mean {close[0]}?")
    if siblings:
        return ConfigError(f"unknown key {key}: the keys of {section} are {', '.join(siblings)}")
    return ConfigError(
        f"unknown key {key}: the sections are {', '.join(field.name for field in dataclasses.fields(SpectrainConfig))}"
    )


def suggest(word: str, options: Iterable[str]) -> list[str]:
    """The option that ``word`` probably means, as a list of none or one."""
    return difflib.get_close_matches(word, list(options), n=1, cutoff=0.7)


def _build(section: type, values: Any, key: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key} is a section: set its keys, not the section itself, got {_show(values)}")
    hints = typing.get_type_hints(section)
    prefix = f"{key}." if key else ""
    for name in values:
        if name not in hints:
            raise unknown_key(f"{prefix}{name}")
    return section(**{name: _convert(value, hints[name], f"{prefix}{name}") for name, value in values.items()})


def _convert(value: Any, kind: Any, key: str) -> Any:
    if kind is Any:  # of another program's making: handed on as it is
        return value
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, key)  # type: ignore[arg-type]
    if isinstance(kind, types.UnionType):  # only "X | None" occurs
        return (
            None
            if value is None
            else _convert(value, next(arg for arg in kind.__args__ if arg is not types.NoneType), key)
        )
    origin = typing.get_origin(kind)
    if origin is tuple:
        item = typing.get_args(kind)[0]
        if isinstance(value, list | tuple):
            return tuple(_convert(entry, item, f"{key}[{index}]") for index, entry in enumerate(value))
        if value is None or isinstance(value, Mapping):
            raise ConfigError(f"{key} must be a list, got {_show(value)}")
        return (_convert(value, item, key),)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be a mapping of names to values, got {_show(value)}")
        item = typing.get_args(kind)[1]
        return {str(name): _convert(entry, item, f"{key}.{name}") for name, entry in value.items()}
    return _scalar(value, kind, key)


def _scalar(value: Any, kind: type, key: str) -> Any:
    if kind is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ConfigError(f"{key} must be a finite number, got {value}")
        return float(value)
    if kind is str and type(value) is int:  # run.name=7
        return str(value)
    if type(value) is not kind:
        raise ConfigError(f"{key} must be {_TYPE_NAMES[kind]}, got {_show(value)}")
    return value


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
