"""Rotary parameters as vLLM reads them, where transformers reads them otherwise.

``longrope`` (Phi-3, Phi-4-mini, MiniCPM) has two lists of factors, for contexts up to the length a model was trained
with and for longer ones. vLLM chooses one list when it starts, by ``max_model_len``; transformers chooses anew in every
forward pass, by the longest row, so that one long prompt changes the answers to all others of its batch. Here the list
is chosen once, by the length that is served (``target.max_length``), and put in place of both: target, drafter and
server then agree whatever they are given. The factor on cosines and sines comes from ``max_position_embeddings`` alone;
``factor`` and ``attention_factor``, which transformers prefers, are not read by vLLM. Nor is the ``factor`` of
``proportional``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_KINDS = ("longrope", "su")  # the second is how the first releases of Phi-3 called it


def is_longrope(parameters: Mapping[str, Any]) -> bool:
    return (parameters.get("rope_type") or parameters.get("type")) in _KINDS


def original_length(config: Mapping[str, Any]) -> int | None:
    """The longest context, in tokens, that turns by the short factors; None where a ``config.json`` has no two lists.
    ``config``: of the language model, in the layout of any release of transformers.
    """
    for parameters in _sets(config.get("rope_parameters") or config.get("rope_scaling") or {}):
        if is_longrope(parameters):
            name = "original_max_position_embeddings"
            found = config.get(name) or parameters.get(name) or config.get("max_position_embeddings")
            return found if isinstance(found, int) else None
    return None


def settled(parameters: Mapping[str, Any], max_positions: int, served_length: int | None) -> dict[str, Any]:
    """One set of rotary parameters with the factors that a server of ``served_length`` tokens turns by, in place of
    both lists. None: what vLLM serves where it is not told, the original length.

    ``max_positions``: the model's ``max_position_embeddings``.
    """
    if parameters.get("rope_type") == "proportional":
        return {name: value for name, value in parameters.items() if name != "factor"}
    original = parameters.get("original_max_position_embeddings")
    if not is_longrope(parameters) or not isinstance(original, int) or original < 2:
        return dict(parameters)
    which = "long" if served_length is not None and served_length > original else "short"
    chosen = parameters.get(f"{which}_factor")
    size = parameters.get(f"{which}_mscale")
    if size is None:
        longer = max_positions / original
        size = math.sqrt(1 + math.log(longer) / math.log(original)) if longer > 1 else 1.0
    kept = {name: value for name, value in parameters.items() if name not in ("factor", "short_mscale", "long_mscale")}
    sizes = {name: size for name in ("short_mscale", "long_mscale") if name in parameters}
    return {**kept, **sizes, "short_factor": chosen, "long_factor": chosen, "attention_factor": float(size)}


def settle(hf_config: Any, served_length: int) -> None:
    """Settle a transformers configuration, in place."""
    text = hf_config.get_text_config(decoder=True)
    found = getattr(text, "rope_parameters", None)
    most = getattr(text, "max_position_embeddings", None)
    if not isinstance(found, Mapping) or not found or not isinstance(most, int):
        return
    if any(isinstance(value, Mapping) for value in found.values()):  # one set for each kind of layer
        text.rope_parameters = {
            kind: settled(part, most, served_length) if isinstance(part, Mapping) else part
            for kind, part in found.items()
        }
    else:
        text.rope_parameters = settled(found, most, served_length)


def _sets(found: Any) -> list[Mapping[str, Any]]:
    """The sets of rotary parameters in a field that holds one, or one for each kind of layer."""
    if not isinstance(found, Mapping):
        return []
    nested = [part for part in found.values() if isinstance(part, Mapping)]
    return nested or [found]
