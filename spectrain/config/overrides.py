"""The overrides of a command line: parsed by Hydra's grammar, with unknown keys and options refused by name, and the
errors of Hydra, OmegaConf and YAML as one line.

From plain values to typed configuration, with strict types.

Hydra hands over nested dicts; here they become the dataclasses of ``schema.py``. A value of the wrong type is an error
that names the key, the type and the value; nothing is converted that could hide a mistake (``true`` is not 1, ``2.0``
is not a whole number). Three readings are allowed because nobody could mean anything else: a whole number for a decimal
one, a list for a tuple, and a single value for a tuple of one (``data.train=prompts.jsonl``). Options and bounds are
checked by the sections themselves (``keys.py``).
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re
import shutil
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import Any, Literal, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from spectrain.config.folders import GROUP_FOLDERS, group_options
from spectrain.config.keys import describe, is_mapping, key_types, without_null
from spectrain.config.schema import SpectrainConfig
from spectrain.errors import ConfigError, RunError
from spectrain.masking import MASK, MaskedText, is_secret_key, mask_override
from spectrain.signals import CONTINUES


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
    inner = [name.rpartition(".")[2] for name in sections() if name.rpartition(".")[0] == section]
    near = [f"{section}.{name}".removeprefix(".") for name in suggest(last, [*siblings, *inner])]
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
        raise ConfigError(f"{key} is a section: set its keys, not the section itself, got {_show(values, key)}")
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
            raise ConfigError(f"{key} must be a mapping of names to values, got {_show(value, key)}")
        return {str(name): _convert(entry, parts[1], f"{key}.{name}") for name, entry in value.items()}
    if origin is Literal:  # which of them are allowed, the section knows
        return _scalar(value, type(parts[0]), key)
    return _scalar(value, kind, key)


def _tuple(value: Any, item: Any, key: str) -> tuple[Any, ...]:
    if isinstance(value, list | tuple):
        return tuple(_convert(entry, item, f"{key}[{index}]") for index, entry in enumerate(value))
    if value is None or isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a list, got {_show(value, key)}")
    return (_convert(value, item, key),)


def _scalar(value: Any, kind: type, key: str) -> Any:
    if kind is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ConfigError(f"{key} must be a finite number, got {value}")
        return float(value)
    if kind is str and type(value) is int:  # run.name=7
        return str(value)
    if type(value) is not kind and not (kind is str and isinstance(value, MaskedText)):
        raise ConfigError(f"{key} must be {describe(kind)}, got {_show(value, key)}")
    return value


def _show(value: Any, key: str) -> str:
    if is_secret_key(key):
        return MASK
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


DRAFTER_ENTRY_POINTS = "spectrain.drafters"  # group of entry points under which packages register drafters


def read_overrides(overrides: Sequence[str]) -> tuple[list[str], list[Override]]:
    """(lines for Hydra, what they parse to). Raises ConfigError for syntax, unknown keys and unknown options."""
    parser = OverridesParser.create()
    lines, parsed = [], []
    for line in overrides:
        line, override = _parse(parser, line)
        lines.append(line)
        parsed.append(override)
    for override in parsed:
        _check_name(override, parsed)
    return lines, parsed


def set_keys(parsed: Sequence[Override]) -> frozenset[str]:
    """The keys that overrides set; groups that they choose are none, but for ``drafter``, which is drafter.method."""
    found: set[str] = set()
    for override in parsed:
        key = str(override.key_or_group)
        if key in GROUP_FOLDERS or _is_hydras(key):
            found |= {"drafter.method"} if key == "drafter" else set()
            continue
        value = None if override.is_sweep_override() else override.value()
        found |= _leaves(key, value)
    return frozenset(found)


def _leaves(key: str, value: object) -> set[str]:
    if isinstance(value, dict) and key not in mappings():
        return {leaf for name, entry in value.items() for leaf in _leaves(f"{key}.{name}", entry)}
    return {key}


def product(parsed: Sequence[Override]) -> list[list[str]]:
    """The override lists of a plain sweep. Empty where another sweeper chooses the values."""
    if any(str(override.key_or_group) == "hydra/sweeper" for override in parsed):
        return []
    values: dict[str, list[str]] = {}
    for override in parsed:
        if str(override.key_or_group).startswith("hydra"):
            continue
        key = str(override.get_key_element())
        if not override.is_sweep_override():
            values[key] = [f"{key}={override.get_value_element_as_str()}"]
        elif override.is_discrete_sweep():
            values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            raise ConfigError(f"{override.input_line}: name the values (key=a,b), or choose another hydra/sweeper")
    return [list(job) for job in itertools.product(*values.values())]


def user_drafters(parsed: Sequence[Override]) -> tuple[str, ...]:
    """Drafters that are chosen and have no file: of ``drafter.module``, or of an installed package. Nothing is
    imported.
    """
    chosen = [name for override in parsed if override.key_or_group == "drafter" for name in options_of(override)]
    without_file = [name for name in dict.fromkeys(chosen) if name not in group_options("drafter")]
    if not without_file or any(override.key_or_group == "drafter.module" for override in parsed):
        return tuple(without_file)
    return tuple(name for name in without_file if name in installed_drafters())


def installed_drafters() -> frozenset[str]:
    """Drafters that installed packages register; what they are, is not looked at."""
    return frozenset(metadata.entry_points(group=DRAFTER_ENTRY_POINTS).names)


def options_of(override: Override) -> list[str]:
    if override.is_sweep_override():
        return list(override.sweep_string_iterator()) if override.is_discrete_sweep() else []
    value = override.value()
    return [] if isinstance(value, list) else ["null" if value is None else str(value)]


def quoted(text: str) -> str:
    """Text as Hydra's grammar reads it back, whatever characters it has."""
    return QuotedString(text, Quote.single).with_quotes()


def _is_hydras(key: str) -> bool:
    return key.startswith("hydra") or "/" in key or "@" in key


def _parse(parser: OverridesParser, line: str) -> tuple[str, Override]:
    if line.startswith(mappings()):
        line = f"++{line}"  # adds the key where there is none
    try:
        return line, parser.parse_override(line)
    except HydraException as error:
        key, equals, value = line.partition("=")
        if not equals:
            raise ConfigError(f"cannot read {mask_override(line)!r}: write key=value or group=option") from error
        if all_keys().get(key) in (str, str | None, tuple[str, ...]) and value[:1] not in ("'", '"', "["):
            # Hydra's grammar has no room for "=", "~", brackets or letters beyond ASCII in bare text; a path may have
            # them all.
            line = f"{key}={quoted(value)}"
            return line, parser.parse_override(line)
        detail = "" if is_secret_key(key) else f" ({first_line(error)})"  # Hydra quotes the line
        raise ConfigError(
            f"cannot read {mask_override(line)!r}{detail}: put text with special characters into quotes"
        ) from error


def _check_name(override: Override, parsed: Sequence[Override]) -> None:
    key = str(override.key_or_group)
    if _is_hydras(key):
        return
    if override.is_add() and not override.is_force_add() and (key in GROUP_FOLDERS or key in all_keys()):
        raise ConfigError(f"+{key}: there is such a key already: write {key}=VALUE, without the +")
    if key in GROUP_FOLDERS:
        users = user_drafters(parsed) if key == "drafter" else ()
        for option in options_of(override):
            if option not in group_options(key) and option not in users:
                raise _unknown_option(key, option)
        return
    if key.startswith(tuple(f"{section}." for section in mappings())):
        return
    if key not in all_keys():
        raise unknown_key(key)


def _unknown_option(group: str, option: str) -> ConfigError:
    options = [*group_options(group), *(sorted(installed_drafters()) if group == "drafter" else [])]
    close = suggest(option, options)
    hint = f"did you mean {close[0]}? " if close else ""
    return ConfigError(
        f"{group}={option} is unknown: {hint}{group} can be {', '.join(options) or 'nothing: no file is there'}"
    )


# --- errors --------------------------------------------------------------------------------------------------------


def check_launcher(overrides: Sequence[str]) -> None:
    """ConfigError for a launcher of sweeps that cannot start anything here."""
    for override in read_overrides(overrides)[1]:
        if override.key_or_group == "hydra/launcher" and "slurm" in str(override.value()) and not shutil.which("srun"):
            raise ConfigError(
                f"hydra/launcher={override.value()}: this machine has no srun: start it where Slurm is, or use "
                f"hydra/launcher=submitit_local"
            )


@contextmanager
def one_line() -> Iterator[None]:
    """Errors of Hydra, its launchers, OmegaConf and YAML as one line of ours."""
    try:
        yield
    except MissingConfigException as error:
        options = f": the options are {', '.join(error.options)}" if error.options else ""
        raise ConfigError(f"configuration {error.missing_cfg_file} was not found{options}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name}, line {mark.line + 1}: " if mark else ""
        raise ConfigError(f"broken YAML in {where}{getattr(error, 'problem', None) or first_line(error)}") from error
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
        detail = f" ({first_line(cause)})" if cause else ""
        raise ConfigError(f"cannot compose the configuration: {first_line(error)}{detail}") from error
    except RuntimeError as error:
        if not type(error).__module__.startswith("submitit"):
            raise
        raise RunError(
            f"a job of the sweep has not ended well ({first_line(error)[:200]}): its log is in .submitit of its "
            f"sweep's folder; {CONTINUES}"
        ) from error


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return re.sub(r"\s+", " ", text.splitlines()[0]) if text else type(error).__name__
