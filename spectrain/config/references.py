"""References in a configuration, ``${target.name}`` or ``${oc.env:TOKEN}``, followed by OmegaConf.

What is secret or came from the environment leaves as ``MaskedText``, so that no file and no message shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from omegaconf import OmegaConf

from spectrain.config.overrides import one_line
from spectrain.masking import mask


def resolve(values: Mapping[Any, Any]) -> dict[str, Any]:
    """``values`` with references followed; what is secret, and what came from the environment, as ``MaskedText``."""
    if not _has_references(values):
        return cast("dict[str, Any]", mask(values, values))
    with one_line():
        resolved = written = OmegaConf.to_container(OmegaConf.create(dict(values)), resolve=True)
        quoted_values = _quote_environment(values)
        if quoted_values != values:
            # The same with references to the environment as they were written, and all that refers to those.
            written = OmegaConf.to_container(OmegaConf.create(quoted_values), resolve=True)
    masked: dict[str, Any] = mask(resolved, written)
    return masked


def _has_references(values: Any) -> bool:
    """Whether OmegaConf has to look at them: also for what is no JSON, which it may refuse."""
    if isinstance(values, dict):
        return any(not isinstance(name, str) or _has_references(value) for name, value in values.items())
    if isinstance(values, list):
        return any(map(_has_references, values))
    return "${" in values if isinstance(values, str) else not isinstance(values, bool | int | float | None)


def _quote_environment(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _quote_environment(value) for name, value in values.items()}
    if isinstance(values, list):
        return [_quote_environment(value) for value in values]
    if isinstance(values, str) and re.search(r"\$\{\s*oc\.env\s*:", values):
        return re.sub(r"(?<!\\)\$\{", r"\\${", values)
    return values
