"""Suites: the prompts an evaluation answers, the same ones every time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from spectrain.config.evaluation_schema import SuiteConfig
from spectrain.data.prompts import Conversation, read_prompts
from spectrain.errors import InputError

HELDOUT = "heldout"


def load_suite(
    config: SuiteConfig, heldout: Sequence[Conversation], roots: Sequence[Path], system: str | None = None
) -> list[Conversation]:
    """The conversations of a suite, at most ``config.max_prompts``, without their answers if they were imported with
    some.

    ``config.prompts`` is "heldout" for ``heldout``, this run's own, or a prompt file, folder or pattern: as seen from
    the working directory, then in ``roots``. A prompt that occurs twice counts once. ``system``: for conversations of a
    file that have no system prompt of their own. Raises InputError for a file that is missing or broken, and for a run
    without held-out prompts.
    """
    if config.prompts == HELDOUT:
        conversations = list(heldout)
        if not conversations:
            raise InputError(
                "suite.prompts=heldout, but this run has no held-out prompts: set data.heldout, or measure on a file "
                "with suite=jsonl"
            )
    else:
        conversations = read_prompts(config.prompts, roots, "suite.prompts")
        if system is not None:
            conversations = [
                c if c.system is not None else dataclasses.replace(c, system=system) for c in conversations
            ]
    distinct = {c.prompt_digest(): c for c in reversed(conversations)}  # the first of equal prompts wins
    ordered = [distinct[digest] for digest in dict.fromkeys(c.prompt_digest() for c in conversations)]
    return [dataclasses.replace(c, answers=None) for c in evenly_spaced(ordered, config.max_prompts)]


def evenly_spaced(items: Sequence[Conversation], most: int) -> list[Conversation]:
    """At most ``most`` items, in order and evenly spaced, because prompt files are often sorted by kind: 3 of 6 are
    number 0, 2 and 4.
    """
    count = min(most, len(items))
    return [items[i * len(items) // count] for i in range(count)]
