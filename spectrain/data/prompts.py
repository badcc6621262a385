"""Prompts: the conversations that the target is asked to answer, and their division into training and held-out.

A prompt file is JSON lines. Either ``{"turns": ["…"]}``, user turns to be answered one after the other, with optional
``id``, ``system``, ``category``, ``tools``; or ``{"messages": [{"role": …, "content": …}]}``, whose answers, if there
are any, are imported. A line that is anything else is an error that names the line: a prompt that is silently skipped
or repaired would make two runs incomparable.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from spectrain.config.schema import DataConfig
from spectrain.errors import ConfigError, InputError
from spectrain.reading import check_file

_Kind = TypeVar("_Kind")
_MOST_BYTES = 1 << 40
_FIELDS = ("turns", "messages", "id", "system", "category", "tools")


@dataclass(frozen=True)
class Conversation:
    """User turns and what surrounds them; the target's answers come later, unless the conversation is imported with
    them.

    ``source`` says where the conversation was read from ("file:line"), for messages only: it is no part of its
    identity.
    """

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    domain: str | None = None
    answers: tuple[str, ...] | None = None
    source: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError(f"conversation {self.id} has no turns")
        if self.answers is not None and len(self.answers) != len(self.turns):
            raise ValueError(f"conversation {self.id} has {len(self.turns)} turns but {len(self.answers)} answers")

    @property
    def where(self) -> str:
        """How messages to the user name this conversation."""
        return self.source or f"conversation {self.id}"

    def prompt_digest(self) -> str:
        """Sha256 of everything the target is shown (system, turns, tools): equal digests are the same prompt, whatever
        their ids.
        """
        return digest_json([self.system, self.turns, self.tools])


def digest_json(value: object) -> str:
    """Sha256, in hex, of a JSON value. Key order counts: a template shows tools in the order of their keys."""
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


# Files


def load_prompts(path: str | Path) -> list[Conversation]:
    """Read one prompt file, in order. A conversation without ``id`` is called "<file stem>-<line number>".

    Blank lines, a byte order mark and CRLF line ends are fine. Raises InputError, with file and line, for anything that
    is not a prompt, for an id that comes twice, and for a file without prompts.
    """
    path = Path(path)
    conversations: list[Conversation] = []
    line_of_id: dict[str, int] = {}
    for number, line in _lines(path):
        try:
            conversation = _parse(line, default_id=f"{path.stem}-{number}", source=f"{path}:{number}")
        except _BrokenLineError as error:
            raise InputError(f"{path}:{number}: {error}") from None
        first = line_of_id.setdefault(conversation.id, number)
        if first != number:
            raise InputError(f"{path}:{number}: id {conversation.id!r} is that of line {first} too: ids must differ")
        conversations.append(conversation)
    if not conversations:
        raise InputError(
            f'{path} holds no prompts: write one JSON object a line, such as {{"turns": ["How are you?"]}}'
        )
    return conversations


def find_prompt_file(name: str, roots: Sequence[Path], asked_by: str) -> Path:
    """The file that ``name`` means: as it is, seen from the working directory, then in ``roots``; ".jsonl" may be left
    out.

    ``asked_by`` is the configuration field that holds the name, for the error (InputError) if there is no such file.
    """
    names = [name] if name.endswith(".jsonl") else [name, f"{name}.jsonl"]
    for folder in (Path(), *roots):
        for candidate in names:
            path = folder / os.path.expanduser(candidate)
            if os.path.isfile(path):  # unlike Path.is_file, False for names that no file can have
                return path
    shipped = sorted({path.stem for root in roots if root.is_dir() for path in root.glob("*.jsonl")})
    close = difflib.get_close_matches(Path(name).stem, shipped, n=1)
    places = f"it is neither in {Path.cwd()} nor among the shipped prompts ({', '.join(shipped) or 'none'})"
    hint = f"did you mean {close[0]}?" if close else places
    raise InputError(f"{asked_by}: no prompt file {name}: {hint}")


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    """Lines that are not blank, with their numbers, counted from 1."""
    check_file(path, _MOST_BYTES)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read as a prompt file: {error.strerror}") from error
    # Split at line feeds only: JSON strings may hold other line separators, such as U+2028, as they are.
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8").strip(" \t\r")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start + 1}): save the file as UTF-8"
            ) from error
        if line:
            yield number, line


class _BrokenLineError(Exception):
    """What is wrong with a line; ``load_prompts`` adds where."""


def _require(condition: object, message: str) -> None:
    if not condition:
        raise _BrokenLineError(message)


def _parse(line: str, default_id: str, source: str) -> Conversation:
    record = _of_kind(_parse_json(line), dict, "the line")
    unknown = sorted(record.keys() - set(_FIELDS))
    if unknown:
        close = difflib.get_close_matches(unknown[0], _FIELDS, n=1)
        raise _BrokenLineError(
            f"unknown field {unknown[0]!r}: "
            + (f"did you mean {close[0]!r}?" if close else f"use {', '.join(_FIELDS)}")
        )
    _require(not {"turns", "messages"} <= record.keys(), "both 'turns' and 'messages': give one of them")
    system = _optional_text(record, "system")
    answers: tuple[str, ...] | None = None
    if "messages" in record:
        own_system, turns, answers = _parse_messages(_of_kind(record["messages"], list, "'messages'"))
        _require(
            own_system is None or system is None, "a system prompt both in 'system' and in 'messages': give one of them"
        )
        system = system if own_system is None else own_system
    else:
        _require("turns" in record, 'no \'turns\': give a list of user turns, such as "turns": ["How are you?"]')
        turns = tuple(
            _text(turn, f"turns[{index}]") for index, turn in enumerate(_of_kind(record["turns"], list, "'turns'"))
        )
        _require(turns, "'turns' is empty: give at least one user turn")
    tools = None if record.get("tools") is None else _of_kind(record["tools"], list, "'tools'")
    return Conversation(
        id=_optional_text(record, "id") or default_id,
        turns=turns,
        system=system,
        tools=tuple(_of_kind(tool, dict, f"tools[{index}]") for index, tool in enumerate(tools)) if tools else None,
        domain=_optional_text(record, "category"),
        answers=answers,
        source=source,
    )


def _parse_json(line: str) -> Any:
    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            names = [name for name, _ in pairs]
            raise _BrokenLineError(f"field {next(name for name in names if names.count(name) > 1)!r} comes twice")
        return record

    def no_constants(name: str) -> None:
        raise _BrokenLineError(f"not JSON: {name} is not a JSON value")

    try:
        return json.loads(line, object_pairs_hook=no_repeats, parse_constant=no_constants)
    except json.JSONDecodeError as error:
        raise _BrokenLineError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets nested thousands deep
        raise _BrokenLineError(f"not usable JSON: {error}") from error


def _parse_messages(messages: list[Any]) -> tuple[str | None, tuple[str, ...], tuple[str, ...] | None]:
    """(system, user turns, answers or None) of an optional system message, then user and assistant by turns."""
    texts: dict[str, list[str]] = {"system": [], "user": [], "assistant": []}
    expected = ["system", "user"]
    for index, value in enumerate(messages):
        place = f"messages[{index}]"
        message = _of_kind(value, dict, place)
        for name in message:
            _require(
                name in ("role", "content"),
                f"{place} has an unknown field {name!r}: only 'role' and 'content' are understood",
            )
        role = message.get("role")
        _require(role in expected, f"{place} has role {json.dumps(role)} where {' or '.join(expected)} must be")
        texts[str(role)].append(_text(message.get("content"), f"{place}.content"))
        expected = ["assistant"] if role == "user" else ["user"]
    system, turns, answers = texts["system"], texts["user"], texts["assistant"]
    _require(turns, "'messages' has no user message")
    _require(
        not answers or len(answers) == len(turns),
        "the last message is the user's, but earlier ones are answered: answer it, remove it, or give the user's "
        "turns alone as 'turns'",
    )
    return (system[0] if system else None), tuple(turns), (tuple(answers) if answers else None)


def _optional_text(record: dict[str, Any], name: str) -> str | None:
    value = record.get(name)
    return None if value is None else _text(value, f"{name!r}")


def _text(value: object, place: str) -> str:
    text = _of_kind(value, str, place)
    _require(text.strip(), f"{place} is blank: give a text, or leave it out")
    # JSON can spell half of a surrogate pair, which no encoding can write and no tokenizer takes.
    _require(
        not any("\ud800" <= letter <= "\udfff" for letter in text),
        f"{place} holds half of a surrogate pair, which is not text",
    )
    return text


_KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "an object", int: "a number", float: "a number"}


def _of_kind(value: object, kind: type[_Kind], place: str) -> _Kind:
    if isinstance(value, kind):
        return value
    raise _BrokenLineError(f"{place} is {_KINDS.get(type(value)) or json.dumps(value)} instead of {_KINDS[kind]}")


# The split


@dataclass(frozen=True)
class PromptSplit:
    """No prompt is in both lists, and none is twice in one of them."""

    train: list[Conversation]
    heldout: list[Conversation]


def split_prompts(data: DataConfig, roots: Sequence[Path]) -> PromptSplit:
    """Load the prompts of a run and divide them into training and held-out.

    The division and the draw of ``max_train`` and ``max_heldout`` depend on each prompt's own digest and ``data.seed``
    alone: a prompt does not change sides when others are added, or when the files are reordered. Order within a split
    is that of the files.

    Raises InputError for files that are missing or broken, ConfigError if no training prompt is named, if explicit
    held-out prompts are training prompts too, or if there are too few prompts to divide.
    """
    if not data.train:
        raise ConfigError("data.train names no prompt file: give at least one")
    if data.system is not None and not data.system.strip():
        raise ConfigError("data.system is blank: give a text, or null for what the chat template does by itself")
    train = _load_distinct(data.train, "data.train", data.system, roots)
    heldout = _load_distinct(data.heldout, "data.heldout", data.system, roots)
    if heldout:
        shared = train.keys() & heldout.keys()
        if shared:
            first = next(conversation for digest, conversation in heldout.items() if digest in shared)
            raise ConfigError(
                f"data.heldout: {len(shared)} of its {len(heldout)} prompts are training prompts too, the first at "
                f"{first.where} "
                f"(as {train[first.prompt_digest()].where}): remove them from one side"
            )
    else:
        chosen = _choose_heldout(list(train), data.heldout_fraction, data.seed)
        heldout = {digest: train.pop(digest) for digest in list(train) if digest in chosen}
    return PromptSplit(
        train=_draw(train, data.max_train, data.seed), heldout=_draw(heldout, data.max_heldout, data.seed)
    )


def _load_distinct(
    names: Iterable[str], asked_by: str, system: str | None, roots: Sequence[Path]
) -> dict[str, Conversation]:
    """Digest -> conversation, in file order; of equal prompts the first, even where imported answers differ."""
    distinct: dict[str, Conversation] = {}
    for name in names:
        for conversation in load_prompts(find_prompt_file(name, roots, asked_by)):
            asked = conversation if conversation.system is not None else replace(conversation, system=system)
            distinct.setdefault(asked.prompt_digest(), asked)
    return distinct


def _choose_heldout(digests: Sequence[str], fraction: float, seed: int) -> set[str]:
    """About ``fraction`` of the prompts, at least one on either side."""
    if len(digests) < 2:
        raise ConfigError(
            "data.train has a single prompt, so none can be held out: add prompts, or name held-out ones in "
            "data.heldout"
        )
    ranked = sorted(digests, key=lambda digest: _chance(digest, seed, "heldout"))
    below = sum(_chance(digest, seed, "heldout") < fraction for digest in ranked)
    return set(ranked[: min(max(below, 1), len(ranked) - 1)])


def _draw(prompts: dict[str, Conversation], at_most: int | None, seed: int) -> list[Conversation]:
    drawn = set(sorted(prompts, key=lambda digest: _chance(digest, seed, "draw"))[:at_most])
    return [conversation for digest, conversation in prompts.items() if digest in drawn]


def _chance(digest: str, seed: int, purpose: str) -> float:
    """A number in [0, 1), uniform over prompts and independent between purposes."""
    return int(digest_json([purpose, seed, digest])[:13], 16) / 16**13
