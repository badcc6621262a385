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
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Literal

from spectrain.errors import ConfigError

_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("less than", operator.lt),
}


def key(default: Any = dataclasses.MISSING, help: str = "", *, make: Any = dataclasses.MISSING, **bounds: float) -> Any:
    """A key of a section. ``make``: makes the default (for lists and sections). Bounds: at_least, above, at_most,
    below; ``None``, where the type allows it, satisfies them all.
    """
    assert bounds.keys() <= _BOUNDS.keys()
    return dataclasses.field(default=default, default_factory=make, metadata={"help": help, **bounds})


class Section:
    """Base of all sections. ``name``: where it stands in the configuration, such as ``drafter.loss``."""

    section_name: ClassVar[str] = ""

    def __init_subclass__(cls, name: str = "") -> None:
        cls.section_name = name or cls.section_name

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            kind = key_types(type(self))[field.name]
            check_value(f"{self.section_name}.{field.name}", getattr(self, field.name), kind, field.metadata)
        self._check()

    def _check(self) -> None:
        """Conflicts between keys of this section. Raises ConfigError."""


def require(condition: object, message: str) -> None:
    """ConfigError with ``message`` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


@cache
def key_types(section: type) -> dict[str, Any]:
    """Name -> type of every key of a section."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def options(kind: Any) -> tuple[Any, ...]:
    """The values that a ``Literal`` allows, ``None`` among them where the key may be null; empty for other types."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        found = [options(part) for part in typing.get_args(kind) if part is not types.NoneType]
        return (None, *found[0]) if len(found) == 1 and found[0] else ()
    if typing.get_origin(kind) is tuple:
        return options(typing.get_args(kind)[0])
    return ()


def check_value(name: str, value: Any, kind: Any, bounds: Any) -> None:
    """ConfigError that names the key unless the value is one of its options and within its bounds."""
    entries = value if isinstance(value, tuple) else (value,)
    allowed = options(kind)
    for entry in entries if allowed else ():
        require(entry in allowed, f"{name}={entry} is unknown: use one of {', '.join(map(str, allowed))}")
    for word, (text, holds) in _BOUNDS.items():
        for entry in entries if word in bounds and value is not None else ():
            require(holds(entry, bounds[word]), f"{name}={entry} must be {text} {bounds[word]:g}")
