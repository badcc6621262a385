"""How a component's configuration rejects a value: one sentence that names the key."""

from __future__ import annotations

from spectrain.errors import ConfigError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def one_of(name: str, value: object, options: tuple[object, ...]) -> None:
    require(value in options, f"{name}={value} is unknown: use one of {', '.join(map(str, options))}")
