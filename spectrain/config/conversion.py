"""From plain values to typed configuration, with strict types.

Hydra hands over nested dicts; here they become the dataclasses of ``schema.py``. A value of the wrong type is an error
that names the key, the type and the value; nothing is converted that could hide a mistake (``true`` is not 1, ``2.0``
is not a whole number). Three readings are allowed because nobody could mean anything else: a whole number for a decimal
one, a list for a tuple, and a single value for a tuple of one (``data.train=prompts.jsonl``). Options and bounds are
checked by the sections themselves (``keys.py``).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, cast

from spectrain.config.keys import describe, is_mapping, key_types, without_null
from spectrain.config.schema import SpectrainConfig
from spectrain.errors import ConfigError


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
def all_keys() -> dict[str, Any]:
    """Dotted key -> declared type, for every key of the configuration. Sections have their dataclass as type."""

    def collect(section: type, prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, kind in key_types(section).items():
            found[prefix + name] = kind
            if dataclasses.is_dataclass(kind):
                found |= collect(cast("type", kind), f"{prefix}{name}.")
        return found

    return collect(SpectrainConfig, "")


def sections() -> dict[str, type]:
    """Dotted name -> dataclass of every section, those inside others included, in the order of the schema."""
    return {name: cast("type", kind) for name, kind in all_keys().items() if dataclasses.is_dataclass(kind)}


def mappings() -> tuple[str, ...]:
    """Keys that hold names and values of their own, such as ``engine.args``."""
    return tuple(name for name, kind in all_keys().items() if is_mapping(kind))


def unknown_key(key: str) -> ConfigError:
    """The error for a key that does not exist, with the nearest one that does."""
    known = [name for name in all_keys() if name not in sections()]
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
    kinds = key_types(section)
    prefix = f"{key}." if key else ""
    for name in values:
        if name not in kinds:
            raise unknown_key(f"{prefix}{name}")
    return section(**{name: _convert(value, kinds[name], f"{prefix}{name}") for name, value in values.items()})


def _convert(value: Any, kind: Any, key: str) -> Any:
    kind, nullable = without_null(kind)
    if kind is Any or (nullable and value is None):  # Any: of another program's making, handed on as it is
        return value
    if dataclasses.is_dataclass(kind):
        return _build(cast("type", kind), value, key)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return _tuple(value, parts[0], key)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be a mapping of names to values, got {_show(value)}")
        return {str(name): _convert(entry, parts[1], f"{key}.{name}") for name, entry in value.items()}
    if origin is Literal:  # which of them are allowed, the section knows
        return _scalar(value, type(parts[0]), key)
    return _scalar(value, kind, key)


def _tuple(value: Any, item: Any, key: str) -> tuple[Any, ...]:
    if isinstance(value, list | tuple):
        return tuple(_convert(entry, item, f"{key}[{index}]") for index, entry in enumerate(value))
    if value is None or isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a list, got {_show(value)}")
    return (_convert(value, item, key),)


def _scalar(value: Any, kind: type, key: str) -> Any:
    if kind is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ConfigError(f"{key} must be a finite number, got {value}")
        return float(value)
    if kind is str and type(value) is int:  # run.name=7
        return str(value)
    if type(value) is not kind:
        raise ConfigError(f"{key} must be {describe(kind)}, got {_show(value)}")
    return value


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
