"""The help texts: what each command does, reads and writes, and what every key, section and group means.

Everything comes from the table of commands, the schema and the files of the groups, so the help cannot fall behind.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spectrain.config.commands import COMMANDS, SWITCHES, Command
from spectrain.config.folders import GROUP_FOLDERS, group_options
from spectrain.config.keys import describe, describe_bounds, options, without_null
from spectrain.config.overrides import all_keys, flatten, mappings, sections, suggest, unknown_key
from spectrain.config.schema import SpectrainConfig
from spectrain.errors import ConfigError

_WIDTH = 100
_TYPE_COLUMN = 46
_MOST_OPTIONS = 40  # of a group on its line of a command's help


def overview() -> str:
    """``spectrain --help``."""
    lines = [
        *_wrapped(
            "spectrain trains drafters for speculative decoding; the acceptance it shows is the acceptance the server "
            "gives."
        ),
        "",
        "Usage: spectrain COMMAND [group=option ...] [key=value ...] [--dry-run] [-m] [--debug]",
        "",
        "Commands",
        *(f"  {command.name:<10}{command.summary}" for command in COMMANDS.values()),
        "",
        "Options",
        *_switch_lines(),
        "",
        "Start with:  spectrain run recipe=quickstart",
        "More:        spectrain COMMAND --help, spectrain help KEY",
    ]
    return "\n".join(lines)


def command_help(command: Command) -> str:
    """``spectrain COMMAND --help``."""
    groups = [group for group in dict.fromkeys(("recipe", *command.sections)) if group in GROUP_FOLDERS]
    lines = [
        f"spectrain {command.name}: {command.summary}",
        "",
        *_wrapped(command.detail),
        *(f"  spectrain {word.name:<16}  {word.summary}" for word in command.words),
        f"  reads   {command.reads}",
        f"  writes  {command.writes}",
        "",
    ]
    if command.sections:
        lines += [
            "Groups (group=option); files of your own beside the working directory are found too",
            *(line for group in groups for line in _wrapped(_group_line(group), "  ", " " * 18)),
            "",
            "Keys (key=value), here with their defaults",
            *(line for section, keys in keys_by_section(command.keys) for line in _key_block(section, keys)),
            *_wrapped(f"All keys of a section: spectrain help SECTION, such as {command.sections[-1]}", "  "),
            "",
        ]
    own = [
        f"  {option.flag + (f' {option.metavar}' if option.metavar else ''):<18}{option.help}"
        for option in command.options
    ]
    lines += ["Options", *own, *_switch_lines(), "", "Examples", *(f"  {example}" for example in command.examples)]
    return "\n".join(lines)


def explain(topics: Sequence[str]) -> str:
    """``spectrain help TOPIC ...``: keys, sections, groups and commands. Raises ConfigError for what is none of
    these.
    """
    if not topics:
        return overview()
    named = " ".join(topics)
    if any(word.name == named for command in COMMANDS.values() for word in command.words):
        return _explain(named)
    return "\n\n".join(_explain(topic) for topic in topics)


def _explain(topic: str) -> str:
    """All that a word means: `capture` is a command and a section, `trainer` a section and a group."""
    commands = {name: command for entry in COMMANDS.values() for name, command in _with_words(entry)}
    parts = [command_help(commands[topic])] if topic in commands else []
    if topic in sections():
        parts.append(_section_help(topic))
    elif topic in all_keys():
        parts.append(_key_help(topic))
    elif (mapping := _mapping_of(topic)) is not None:
        parts.append(_key_help(mapping))
    if topic in GROUP_FOLDERS:
        parts.append(_group_help(topic))
    if parts:
        return "\n\n".join(parts)
    close = suggest(topic, [*commands, *sections(), *GROUP_FOLDERS]) if "." not in topic else []
    raise ConfigError(f"unknown topic {topic}: did you mean {close[0]}?") if close else unknown_key(topic)


def _with_words(command: Command) -> Iterable[tuple[str, Command]]:
    return [(command.name, command), *((word.name, word) for word in command.words)]


def _mapping_of(topic: str) -> str | None:
    return next((name for name in mappings() if topic.startswith(f"{name}.")), None)


# --- keys ----------------------------------------------------------------------------------------------------------


def _field(key: str) -> dataclasses.Field[Any]:
    section, _, name = key.rpartition(".")
    return next(field for field in dataclasses.fields(sections()[section]) if field.name == name)


def help_of(key: str) -> str:
    """The sentence that explains a key."""
    return _field(key).metadata.get("help", "")


def type_of(key: str) -> str:
    """Type or options, and bounds."""
    bounds = describe_bounds(_field(key).metadata)
    return f"{describe(all_keys()[key])}{f'; {bounds}' if bounds else ''}"


def default_of(key: str) -> str:
    """As one would type it."""
    return _yaml_value(flatten(SpectrainConfig())[key])


def example_of(key: str) -> str:
    """A value to show: the key's own example, or another value of its type than the default."""
    given = _field(key).metadata.get("example")
    if given:
        return str(given)
    kind, _ = without_null(all_keys()[key])
    default = flatten(SpectrainConfig())[key]
    inner = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
    choices = [option for option in options(kind) if option not in (None, default)] or list(options(kind))
    if choices:
        value = str(choices[0])
    elif inner is bool:
        value = _yaml_value(not default)
    elif inner in (int, float):
        value = _yaml_value(_another_number(inner, default, _field(key).metadata))
    else:
        value = "NAME"
    return f"[{value}]" if typing.get_origin(kind) is tuple else value


def _another_number(kind: type, default: Any, bounds: Any) -> Any:
    if kind is float:
        return default / 2 if default else 0.5
    least = int(bounds.get("at_least", 0))
    return 2 * default if isinstance(default, int) and default > 0 else least + 1


def _key_lines(key: str, indent: str = "  ") -> list[str]:
    """Two lines or more: the key with its default and type, then what it means."""
    head, kind = f"{indent}{key}={default_of(key)}", type_of(key)
    first = f"{head:<{_TYPE_COLUMN}}" if len(head) < _TYPE_COLUMN - 1 else f"{head}  "
    one_line = len(first) + len(kind) <= _WIDTH
    lines = [f"{first}{kind}"] if one_line else [head, *_wrapped(kind, f"{indent}    ")]
    return [*lines, *_wrapped(help_of(key), f"{indent}    ")]


def _key_block(section: str, keys: Iterable[str]) -> list[str]:
    return [f"  {section}", *(line for key in keys for line in _key_lines(key, "    "))]


def keys_by_section(keys: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Keys with the section that each belongs to, in the order of the schema."""
    found: dict[str, list[str]] = {name: [] for name in sections()}
    for key in dict.fromkeys(keys):
        found[key.rpartition(".")[0]].append(key)
    return [(name, members) for name, members in found.items() if members]


def _key_help(key: str) -> str:
    bounds = describe_bounds(_field(key).metadata)
    rows = [
        ("type", describe(all_keys()[key])),
        *([("bounds", bounds)] if bounds else []),
        ("default", default_of(key)),
        ("example", f"{key}={example_of(key)}"),
    ]
    lines = [key, *_wrapped(help_of(key), "  "), ""]
    for name, text in rows:
        lines += _wrapped(f"{name:<10}{text}", "  ", " " * 12)
    return "\n".join(lines)


def _section_help(name: str) -> str:
    """What a section is for, and all of its keys, those of the sections inside it too."""
    about = " ".join((inspect.getdoc(sections()[name]) or "").split()).replace("``", "")
    keys = [key for key in flatten(SpectrainConfig()) if key.startswith(f"{name}.")]
    lines = [*_wrapped(f"{name}: {about}"), "", "Keys (key=value), here with their defaults"]
    for section, members in keys_by_section(keys):
        lines += _key_block(section, members)
    return "\n".join(lines)


# --- groups --------------------------------------------------------------------------------------------------------


def _group_line(group: str) -> str:
    """Its options; where there are very many, those that begin alike as one: ``eagle3_… (20)``."""
    names = list(group_options(group))
    if len(names) <= _MOST_OPTIONS:
        return f"{group + '=':<16}{', '.join(names)}"
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.partition("_")[0], []).append(name)
    shown = [alike[0] if len(alike) == 1 else f"{kind}_… ({len(alike)})" for kind, alike in kinds.items()]
    return f"{group + '=':<16}{', '.join(shown)}: spectrain help {group}"


def _group_help(group: str) -> str:
    folder = f"{GROUP_FOLDERS[group]}/{group}"
    lines = _wrapped(f"Group {group}: {group}=OPTION, from {folder}, your own folder or the shipped one")
    found = group_options(group)
    width = max((len(name) for name in found), default=0) + 2
    for name, file in found.items():
        lines += _wrapped(f"{name:<{width}}{first_comment(file)}", "  ", " " * (width + 2))
    return "\n".join(lines)


def first_comment(file: Path) -> str:
    """What a YAML file says of itself: the first line of its comment that is no directive to Hydra, and the end of a
    sentence that runs on into the next lines.
    """
    comment: list[str] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or (comment and (not text or not text[0].islower())):
            break
        if not text or text.startswith("@"):
            continue
        if comment:
            text = re.split(r"(?<=\.)\s", text, maxsplit=1)[0]
        comment.append(text)
        if text.endswith("."):
            break
    return " ".join(comment)


# --- lines ---------------------------------------------------------------------------------------------------------


def _switch_lines() -> list[str]:
    return [f"  {', '.join(switch.flags):<18}{switch.help}" for switch in SWITCHES]


def _yaml_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ",".join(map(str, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {entry}" for name, entry in value.items()) + "}"
    return str(value)


def _wrapped(text: str, indent: str = "", further: str | None = None) -> list[str]:
    """Lines of at most 100 columns; ``further``: indent of all but the first."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if further is None else further,
        break_long_words=False,
        break_on_hyphens=False,
    )
