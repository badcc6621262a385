"""JSON as others wrote it, against the fields of a record: types, and what no measurement gives."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any


def frozen(value: Any) -> Any:
    """Lists, at any depth, as tuples."""
    if isinstance(value, dict):
        return {name: frozen(entry) for name, entry in value.items()}
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def impossible(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """(field, number) of what no measurement gives, at any depth: counts, shares and seconds are finite and not below
    zero. JSON that others wrote may say NaN, and a number may be too large for a float.
    """
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from impossible(entry, key)
    elif isinstance(value, list):
        for entry in value:
            yield from impossible(entry, name)
    elif isinstance(value, int | float) and not 0 <= value <= sys.float_info.max:
        yield name, value


def fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value fits a field's type: the few shapes that records use."""
    if isinstance(hint, types.UnionType):
        return any(fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        if not isinstance(value, list):
            return False
        items = items[:1] * len(value) if items[-1] is Ellipsis else items
        return len(items) == len(value) and all(fits(item, kind) for item, kind in zip(value, items, strict=True))
    if dataclasses.is_dataclass(hint):
        fields = typing.get_type_hints(hint)
        return (
            isinstance(value, dict)
            and value.keys() == fields.keys()
            and all(fits(value[name], fields[name]) for name in fields)
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
