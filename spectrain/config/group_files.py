"""The YAML files behind the chosen groups, read and checked before Hydra composes them: a file that is none, that
includes itself or holds something else than keys is refused by its name, and a value that turns out wrong is said with
the file that sets it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spectrain.config.folders import GROUP_FOLDERS, group_options
from spectrain.errors import ConfigError, InputError
from spectrain.reading import read_text

_MOST_BYTES = 1 << 20
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)\s*$", re.MULTILINE)
_NAMED = re.compile(r"(?:unknown key )?([a-z]\w*(?:\.\w+)*)")


@dataclass(frozen=True)
class GroupFile:
    """One option's file. ``keys``: dotted names of what it sets, as it is composed."""

    path: Path
    keys: frozenset[str]


def chosen_files(chosen: Sequence[tuple[str, str]]) -> list[GroupFile]:
    """The files of (group, option) pairs and of those that they choose in turn; later ones win. Options without a file
    (of a drafter's own module) have none. InputError for a file that is no configuration.
    """
    found: dict[Path, GroupFile] = {}
    for group, option in chosen:
        for file in _read(group, option, ()):
            found.pop(file.path, None)
            found[file.path] = file
    return list(found.values())


def set_in(message: str, files: Sequence[GroupFile], given: frozenset[str]) -> str:
    """`` (in FILE)`` for an error whose message begins with a key that a file sets and the command line does not."""
    named = _NAMED.match(message)
    key = named.group(1) if named else ""
    if not key or key in given:
        return ""
    for file in reversed(files):
        if any(name == key or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in file.keys):
            return f" (in {file.path})"
    return ""


def _read(group: str, option: str, within: tuple[Path, ...]) -> Iterator[GroupFile]:
    path = group_options(group).get(option)
    if path is None:
        return
    if path in within:
        raise InputError(f"{path} includes itself, by way of {', '.join(file.name for file in within)}")
    text = read_text(path, _MOST_BYTES)
    values = _parse(path, text)
    for other in _others(path, group, values.pop("defaults", [])):
        yield from _read(*other, (*within, path))
    package = _PACKAGE.search(text)
    prefix = group if package is None else package.group(1).replace("_global_", "").strip(".")
    yield GroupFile(path, frozenset(_leaves(values, prefix)))


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"broken YAML in {path}{line}: {getattr(error, 'problem', None) or error}") from error
    except (ValueError, RecursionError) as error:  # a date that is none, brackets nested thousands deep
        raise ConfigError(f"broken YAML in {path}: {error}") from error
    if values is None:  # comments alone: the group's defaults
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise InputError(f"{path} is no configuration: write KEY: VALUE")
    return values


def _others(path: Path, group: str, entries: object) -> Iterator[tuple[str, str]]:
    """(group, option) of what a defaults list chooses."""
    if not isinstance(entries, list):
        raise InputError(f"{path}: defaults is {entries!r:.60}, it must be a list such as [override /target: NAME]")
    for entry in entries:
        if isinstance(entry, str):
            parent, _, name = entry.rpartition("/")
            chosen = {parent or group: name}
        elif isinstance(entry, dict):
            chosen = entry
        else:
            raise InputError(
                f"{path}: defaults holds {entry!r:.60}, it must hold entries such as override /target: NAME"
            )
        for name, options in chosen.items():
            other = str(name).removeprefix("optional ").removeprefix("override ").partition("@")[0].strip().strip("/")
            for option in options if isinstance(options, list) else [options]:
                if other in GROUP_FOLDERS and isinstance(option, str):
                    yield other, option


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, dict) and value:
            yield from _leaves(value, key)
        else:
            yield key
