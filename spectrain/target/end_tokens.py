"""Ids that end an answer of the target: one definition for every engine, the chat template and the loss mask."""

from __future__ import annotations

from typing import Any

from spectrain.errors import InputError


def end_token_ids(tokenizer: Any, generation_config: Any) -> tuple[int, ...]:
    """Ids that end an answer, ascending: the generation config's and the tokenizer's, which is what vLLM stops at too.

    Raises InputError if neither names one: generation would never stop.
    """
    own = getattr(generation_config, "eos_token_id", None)
    ids = {own} if isinstance(own, int) else {int(token) for token in own or ()}
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise InputError("the target names no end token: set eos_token_id in its generation_config.json")
    return tuple(sorted(ids))
