"""Suites: the prompts an evaluation answers, the same ones every time.

A suite's prompts come from the run's own held-out ones, from a prompt file, or from a data set on the Hub; a file named
by ``suite.path`` stands for any of them where there is no network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from spectrain.config.evaluation_schema import SuiteConfig
from spectrain.data.prompts import Conversation, read_prompts
from spectrain.errors import InputError
from spectrain.evaluation.code_execution import docstring_tests
from spectrain.evaluation.hub_prompts import hub_prompts

HELDOUT = "heldout"


def load_suite(
    config: SuiteConfig, heldout: Sequence[Conversation], roots: Sequence[Path], system: str | None = None
) -> list[Conversation]:
    """The conversations of a suite, at most ``config.max_prompts``, without their answers if they were imported with
    some.

    Files and folders are looked for as seen from the working directory, then in ``roots``. A prompt that occurs twice
    counts once. ``system``: for conversations of a file that have no system prompt of their own. Raises InputError for
    a source that is missing or broken, a run without held-out prompts, and a category that nothing belongs to.
    """
    return [dataclasses.replace(c, answers=None) for c in _chosen(config, heldout, roots, system)]


def right_answers(config: SuiteConfig, roots: Sequence[Path], system: str | None = None) -> dict[str, str]:
    """Digest of a prompt -> the right answer to its last turn: of the Hub's column ``suite.answer``, or of a file's
    last assistant message. Empty for a suite that is not graded, and where code must not be run.

    Tests that are not brought along are the examples in the prompt's docstrings.
    """
    by_tests = config.grading == "tests"
    if config.grading == "none" or config.uses_heldout or (by_tests and not config.execute_code):
        return {}
    found = {}
    for c in _chosen(config, (), roots, system):
        right = c.answers[-1] if c.answers and c.answers[-1] else None
        if right is None and by_tests:
            right = docstring_tests(c.turns[-1])
        if right is not None:
            found[c.prompt_digest()] = right
    return found


def source_size(config: SuiteConfig, heldout: Sequence[Conversation], roots: Sequence[Path]) -> int:
    """How many different prompts the suite's source has."""
    return len(_distinct(_source(config, heldout, roots)))


def _chosen(
    config: SuiteConfig, heldout: Sequence[Conversation], roots: Sequence[Path], system: str | None
) -> list[Conversation]:
    conversations = _source(config, heldout, roots)
    if system is not None and not config.uses_heldout:
        conversations = [c if c.system is not None else dataclasses.replace(c, system=system) for c in conversations]
    return evenly_spaced(_distinct(conversations), config.max_prompts)


def _source(config: SuiteConfig, heldout: Sequence[Conversation], roots: Sequence[Path]) -> list[Conversation]:
    if config.uses_heldout:
        conversations = list(heldout)
        if not conversations:
            raise InputError(
                "suite.prompts=heldout, but this run has no held-out prompts: set data.heldout, or measure on a file "
                "with suite=jsonl"
            )
    elif config.path is not None:
        conversations = read_prompts(config.path, roots, "suite.path")
    elif config.hub:
        conversations = hub_prompts(config)
    else:
        conversations = read_prompts(config.prompts, roots, "suite.prompts")
    if not conversations:
        raise InputError(f"suite.hub={config.hub} has no rows in split {config.split}: choose another suite.split")
    if config.domain and "{" not in config.domain:
        conversations = [c if c.domain else dataclasses.replace(c, domain=config.domain) for c in conversations]
    if not config.categories:
        return conversations
    found = [c for c in conversations if c.domain in config.categories]
    lacking = [name for name in config.categories if name not in {c.domain for c in conversations}]
    if lacking:
        known = ", ".join(sorted({c.domain for c in conversations if c.domain})) or "none"
        raise InputError(f"suite.categories: no prompt of category {lacking[0]}: its categories are {known}")
    return found


def _distinct(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Each prompt once, the first of equal ones."""
    distinct = {c.prompt_digest(): c for c in reversed(conversations)}
    return [distinct[digest] for digest in dict.fromkeys(c.prompt_digest() for c in conversations)]


def evenly_spaced(items: Sequence[Conversation], most: int) -> list[Conversation]:
    """At most ``most`` items, in order and evenly spaced, because prompt files are often sorted by kind: 3 of 6 are
    number 0, 2 and 4.
    """
    count = min(most, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def lengthened(
    conversations: Sequence[Conversation], tokens: int, count_tokens: Callable[[str], int]
) -> list[Conversation]:
    """The same conversations, each preceded, in its first turn, by texts of the others until it has about ``tokens``
    tokens: the question stays last, so what is asked is the same at every length of context.

    Which texts precede which is fixed by their order; the last of them is cut to what is left, by characters.
    """
    texts = ["\n".join(c.turns) for c in conversations]
    sizes = [max(1, count_tokens(text)) for text in texts]
    return [
        dataclasses.replace(c, turns=(_preceded(c.turns[0], index, texts, sizes, tokens), *c.turns[1:]))
        for index, c in enumerate(conversations)
    ]


def _preceded(question: str, index: int, texts: Sequence[str], sizes: Sequence[int], tokens: int) -> str:
    room = tokens - sizes[index]
    before: list[str] = []
    step = 0
    while room > 0:
        step += 1
        other = (index + step) % len(texts)
        part = texts[other]
        if sizes[other] > room:
            part = part[: max(1, len(part) * room // sizes[other])]
        before.append(part)
        room -= sizes[other]
    return "\n\n".join([*before, question])
