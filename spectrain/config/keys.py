"""How a section of the configuration declares its keys: type, default, bounds and a sentence of help, in one place.

    @dataclass(frozen=True)
    class TrainerConfig(Section, name="trainer"):
        epochs: int = key(3, "how often every training document is seen", at_least=1)
        schedule: Literal["cosine", "wsd", "constant"] = key("cosine", "learning rate after the warm-up")

What a value must satisfy is checked whenever a section is made, from YAML or by hand, and the error names the key as
the user writes it. Conflicts between keys of one section go into its ``_check``; those between sections into
``stages/checks.py``.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Literal

from spectrain.errors import ConfigError

LONGEST_NAME = 100  # bytes; file systems take 255, and what is called by a name says more

_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("less than", operator.lt),
}
# Of whole numbers that only choose or end something, and cost nothing by being large.
ANY_COUNT = 1 << 31
SEEDS = 1 << 63  # seeds are below
PROCESSES = 1024
TOP_K = 1 << 31  # vLLM keeps it in 32 bits
_COLDEST = 1e-3  # colder is greedy decoding by another name, until float32 overflows
HOTTEST = 1000.0  # hotter, every token is as likely as any other
FILE_NAME_BYTES = 100  # of a text that becomes part of a file's name: what is put around it has room in the usual 255
_TYPES: dict[Any, tuple[str, str]] = {  # type -> what one value is called, and several
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "texts"),
    Any: ("anything", "anything"),
}


def key(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    make: Any = dataclasses.MISSING,
    example: str = "",
    most_bytes: int | None = None,
    **bounds: float,
) -> Any:
    """A key of a section.

    Args:
        help: what it means, with its unit, and what null means where it may be null.
        make: makes the default (for lists and sections).
        example: a value to show in the help, where the one that is made up from the type would say little.
        most_bytes: of a text.
        bounds: at_least, above, at_most, below; ``None``, where the type allows it, satisfies them all. Every
            number has one above: what lies beyond is a slip, which would be met after hours or by allocating.
    """
    assert bounds.keys() <= _BOUNDS.keys()
    return dataclasses.field(
        default=default,
        default_factory=make,
        metadata={"help": help, "example": example, "most_bytes": most_bytes, **bounds},
    )


@dataclasses.dataclass(frozen=True)
class Section:
    """Base of all sections. ``name``: its path in the configuration, such as ``drafter.loss``."""

    section_name: ClassVar[str] = ""

    def __init_subclass__(cls, name: str = "") -> None:
        cls.section_name = name or cls.section_name

    def __post_init__(self) -> None:
        section: type = type(self)
        kinds = key_types(section)
        for field in dataclasses.fields(self):
            check_value(
                f"{self.section_name}.{field.name}", getattr(self, field.name), kinds[field.name], field.metadata
            )
        self._check()

    def _check(self) -> None:
        """Conflicts between keys of this section. Raises ConfigError."""

    def _require_distinct(self, *names: str) -> None:
        """ConfigError for a list of this section in which a value comes twice."""
        for name in names:
            values = getattr(self, name)
            require(
                len(set(values)) == len(values), f"{self.section_name}.{name}={list(values)} names one of them twice"
            )


def require(condition: object, message: str) -> None:
    """ConfigError with ``message`` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_name(key: str, name: str) -> None:
    """ConfigError unless ``name`` can be part of a file's name: then nothing that is called by it lies elsewhere, and
    no other program takes it for an option.
    """
    plain = name and name.isprintable() and not name.startswith((".", "-")) and not set(name) & set("/\\")
    require(
        plain and len(name.encode()) <= LONGEST_NAME,
        f"{key}={name[:LONGEST_NAME]} names files: use at most {LONGEST_NAME} bytes, no slashes, and no dot or dash in "
        f"front",
    )


def split_revision(key: str, path: str, revision: str | None) -> tuple[str, str | None]:
    """(path, revision) of ``ORG/NAME@REVISION``; a path that is a folder, or names no revision, stays as it is."""
    repo, at, named = path.rpartition("@")
    if not at or not named or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", repo) or os.path.exists(path):
        return path, revision
    require(revision in (None, named), f"{key}.path={path} and {key}.revision={revision}: name one revision")
    return repo, named


def refuse_dash(key: str, value: Any) -> None:
    """ConfigError for text, or a list with text, that begins with a dash: on another program's command line it would
    be an option, and whoever wrote the recipe or the drafter that it comes from could switch on what he likes.
    """
    for text in value if isinstance(value, list | tuple) else (value,):
        if isinstance(text, str):
            require(not text.startswith("-"), f"{key}={text}: a dash in front would be read as an option: rename it")


@cache
def key_types(section: type) -> dict[str, Any]:
    """Name -> type of every key of a section."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def without_null(kind: Any) -> tuple[Any, bool]:
    """(type, whether it may be null) of ``kind``, which may be ``X | None``."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (found,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
        return found, True
    return kind, False


def options(kind: Any) -> tuple[Any, ...]:
    """The values that a ``Literal`` allows (of a tuple: each of its entries), ``None`` among them where the key may be
    null; empty for other types.
    """
    kind, nullable = without_null(kind)
    if typing.get_origin(kind) is tuple:
        return options(typing.get_args(kind)[0])
    found = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    return (None, *found) if found and nullable else found


def is_mapping(kind: Any) -> bool:
    """Whether a key holds names and values of its own, as ``engine.args`` does, or may (``target.device_map``)."""
    return kind is Any or typing.get_origin(without_null(kind)[0]) is dict


def describe(kind: Any) -> str:
    """A type in words: ``a list of whole numbers, or null``."""
    kind, nullable = without_null(kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        text = f"one of {', '.join(map(str, parts))}"
    elif origin is tuple:
        text = f"a list of {_several(parts[0])}"
    elif origin is dict:
        text = f"a mapping of names to {_several(parts[1])}"
    else:
        text = _TYPES[kind][0]
    return f"{text}, or null" if nullable else text


def _several(kind: Any) -> str:
    return ", ".join(map(str, options(kind))) if options(kind) else _TYPES[kind][1]


def describe_bounds(bounds: Mapping[str, Any]) -> str:
    """``at least 0, less than 1``; empty where there are none."""
    texts = [f"{text} {_number(bounds[word])}" for word, (text, _) in _BOUNDS.items() if word in bounds]
    most = bounds.get("most_bytes")
    return ", ".join([*texts, *([f"at most {most} bytes"] if most else [])])


def check_value(name: str, value: Any, kind: Any, bounds: Mapping[str, Any]) -> None:
    """ConfigError that names the key unless the value is one of its options and within its bounds."""
    if kind is Any:  # the section knows
        return
    if is_mapping(kind):
        for word, entry in value.items():
            check_value(f"{name}.{word}", entry, typing.get_args(kind)[1], bounds)
        return
    entries = value if isinstance(value, tuple) else (value,)
    allowed = options(kind)
    for entry in entries if allowed else ():
        require(entry in allowed, f"{name}={entry} is unknown: use one of {_listed(allowed)}")
    for word, (text, holds) in _BOUNDS.items():
        for entry in entries if word in bounds and value is not None else ():
            require(holds(entry, bounds[word]), f"{name}={entry} must be {text} {_number(bounds[word])}")
    most = bounds.get("most_bytes")
    if most is not None and isinstance(value, str):
        size = len(value.encode("utf-8", errors="replace"))
        require(size <= most, f"{name}={value[:20]}… has {size} bytes, it may have {most}: use a shorter one")


def _listed(allowed: tuple[Any, ...]) -> str:
    return ", ".join("null" if option is None else str(option) for option in allowed)


def _number(bound: float) -> str:
    """In digits, or as a power of two where those would say nothing."""
    if isinstance(bound, int) and bound >= 1 << 20 and bound.bit_count() == 1:
        return f"2^{bound.bit_length() - 1}"
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def check_temperature(name: str, value: float | None) -> None:
    """Raises ConfigError where a temperature is neither 0 nor one that float32 can divide by."""
    require(
        value is None or value == 0 or value >= _COLDEST, f"{name}={value} must be 0 (greedy) or at least {_COLDEST}"
    )
