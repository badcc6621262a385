"""Prompts of a suite from a data set on the Hub, or a local folder of one: rows become user turns by the suite's prompt
form.

``datasets`` reads whatever the set is stored as. What it cannot find is one line that says what serves instead: a file
of one's own (``suite.path``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import PurePath
from typing import Any

from spectrain.config.evaluation_schema import SuiteConfig
from spectrain.data.hub_sets import open_set
from spectrain.data.prompts import Conversation
from spectrain.errors import ConfigError, InputError

_COLUMN = re.compile(r"\{([\w|]+)\}")


def hub_prompts(config: SuiteConfig) -> list[Conversation]:
    """A conversation a row, with the right answer as its ``answers`` where the suite has one.

    Raises ConfigError for a suite without a form; InputError for a source that cannot be reached or read, for a column
    that is not there, and for a row without a text.
    """
    if not config.turns:
        raise ConfigError(
            "suite.hub needs suite.turns: say how a row becomes a prompt, as in 'suite.turns=[\"{question}\"]'"
        )
    return [
        _conversation(config, row, number, category)
        for category, rows in _tables(config)
        for number, row in enumerate(rows, start=1)
    ]


def _tables(config: SuiteConfig) -> Iterator[tuple[str | None, list[dict[str, Any]]]]:
    """(category, rows) of each file of the suite, or of the whole data set."""
    if not config.files:
        yield None, _rows(config.hub, config.revision, config.subset, config.split, None)
    for file in config.files:
        yield PurePath(file).stem, _rows(config.hub, config.revision, config.subset, config.split, file)


@lru_cache(maxsize=16)
def _rows(hub: str, revision: str | None, subset: str | None, split: str, file: str | None) -> list[dict[str, Any]]:
    try:
        return [dict(row) for row in open_set(hub, subset, split, revision, file, streaming=False)]
    except Exception as error:  # what it raises is its own affair: of networks, of files, of scripts it will not run
        reason = (" ".join(str(error).split()) or type(error).__name__)[:200]
        raise InputError(
            f"suite.hub={hub} cannot be read ({reason}): connect to the Hub, or name a file of prompts with "
            "suite.path=FILE.jsonl"
        ) from error


def _conversation(config: SuiteConfig, row: Mapping[str, Any], number: int, category: str | None) -> Conversation:
    where = f"suite.hub={config.hub}, row {number}" + (f" of {category}" if category else "")
    turns = [text for form in config.turns for text in _texts(form, row, where)]
    domain = _filled(config.domain, row, where) if config.domain else row.get("category") or category
    answer = None
    if config.answer is not None:
        form = config.answer if "{" in config.answer else f"{{{config.answer}}}"
        answer = _filled(form, row, where)
    return Conversation(
        id=f"{config.name}-{category}-{number}" if category else f"{config.name}-{number}",
        turns=tuple(turns),
        domain=None if domain is None else str(domain),
        answers=None if answer is None else (*("",) * (len(turns) - 1), answer),
        source=where,
    )


def _texts(form: str, row: Mapping[str, Any], where: str) -> list[str]:
    """The turns that a form gives: one, unless it is a column that holds several texts."""
    alone = _COLUMN.fullmatch(form)
    value = _column(row, alone.group(1), where) if alone else None
    texts = [str(text) for text in value] if isinstance(value, list | tuple) else [_filled(form, row, where)]
    texts = [text.strip() for text in texts]
    if not texts or not all(texts):
        raise InputError(f"{where}: the turn {form!r} is empty: use another column in suite.turns")
    return texts


def _filled(form: str, row: Mapping[str, Any], where: str) -> str:
    def text(found: re.Match[str]) -> str:
        value = _column(row, found.group(1), where)
        return "\n".join(map(str, value)) if isinstance(value, list | tuple) else "" if value is None else str(value)

    return _COLUMN.sub(text, form)


def _column(row: Mapping[str, Any], names: str, where: str) -> Any:
    """The first of the columns ``a|b`` that the row has."""
    for name in names.split("|"):
        if row.get(name) is not None:
            return row[name]
    if any(name in row for name in names.split("|")):
        return None
    raise InputError(f"{where} has no column {names}: its columns are {', '.join(row)}")
