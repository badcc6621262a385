"""The overrides of a command line: parsed by Hydra's grammar, with unknown keys and options refused by name, and the
errors of Hydra, OmegaConf and YAML as one line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from spectrain.config.conversion import all_keys, mappings, suggest, unknown_key
from spectrain.config.folders import GROUP_FOLDERS, group_options
from spectrain.errors import ConfigError

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
    """The keys that overrides set; groups that they choose are none."""
    found: set[str] = set()
    for override in parsed:
        key = str(override.key_or_group)
        if key in GROUP_FOLDERS or _is_hydras(key):
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
    chosen = [name for override in parsed if override.key_or_group == "drafter" for name in _values(override)]
    without_file = [name for name in dict.fromkeys(chosen) if name not in group_options("drafter")]
    if not without_file or any(override.key_or_group == "drafter.module" for override in parsed):
        return tuple(without_file)
    return tuple(name for name in without_file if name in installed_drafters())


def installed_drafters() -> frozenset[str]:
    """Drafters that installed packages register; what they are, is not looked at."""
    return frozenset(metadata.entry_points(group=DRAFTER_ENTRY_POINTS).names)


def _values(override: Override) -> list[str]:
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
            raise ConfigError(f"cannot read {line!r}: write key=value or group=option") from error
        if all_keys().get(key) in (str, str | None, tuple[str, ...]) and value[:1] not in ("'", '"', "["):
            # Hydra's grammar has no room for "=", "~", brackets or letters beyond ASCII in bare text; a path may have
            # them all.
            line = f"{key}={quoted(value)}"
            return line, parser.parse_override(line)
        raise ConfigError(
            f"cannot read {line!r} ({first_line(error)}): put text with special characters into quotes"
        ) from error


def _check_name(override: Override, parsed: Sequence[Override]) -> None:
    key = str(override.key_or_group)
    if _is_hydras(key):
        return
    if key in GROUP_FOLDERS:
        users = user_drafters(parsed) if key == "drafter" else ()
        for option in _values(override):
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


@contextmanager
def one_line() -> Iterator[None]:
    """Errors of Hydra, OmegaConf and YAML as one line of ours."""
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


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return re.sub(r"\s+", " ", text.splitlines()[0]) if text else type(error).__name__
