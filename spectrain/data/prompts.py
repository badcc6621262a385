"""Prompts: the conversations that the target is asked to answer, and their division into training and held-out.

A record of a prompt file is either ``{"turns": ["…"]}``, user turns to be answered one after the other, with optional
``id``, ``system``, ``category``, ``language``, ``tools``; or ``{"messages": [{"role": …, "content": …}]}``, whose
answers, if there are any, are imported. A record that is anything else is an error that says where it is: a prompt that
is silently skipped or repaired would make two runs incomparable. How records are stored: ``prompt_files.py``.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from spectrain.config.data_schema import DataConfig
from spectrain.data.prompt_files import BrokenRecordError, find_prompt_file, find_prompt_files, plain_stem, records
from spectrain.errors import ConfigError, InputError

__all__ = ["Conversation", "PromptSplit", "find_prompt_file", "load_prompts", "read_prompts", "split_prompts"]

_Kind = TypeVar("_Kind")
_FIELDS = ("turns", "messages", "id", "system", "category", "language", "tools")


class _Digested:
    """What a conversation keeps beside its fields."""

    __slots__ = ("_digest",)
    _digest: str


@dataclass(frozen=True, slots=True)  # with a dict each, a million conversations would take a third more
class Conversation(_Digested):
    """User turns and what surrounds them; the target's answers come later, unless the conversation is imported with
    them.

    ``language``: that of its texts, by whatever name the prompts call it; ``None`` where they do not say.
    ``source`` says where the conversation was read from ("file:line"), for messages only: it is no part of its
    identity.
    """

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    domain: str | None = None
    answers: tuple[str, ...] | None = None
    language: str | None = None
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
        try:
            return self._digest
        except AttributeError:
            digest = digest_json([self.system, self.turns, self.tools])
            object.__setattr__(self, "_digest", digest)
            return digest


def digest_json(value: object) -> str:
    """Sha256, in hex, of a JSON value. Key order counts: a template shows tools in the order of their keys."""
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


# Files


def load_prompts(path: str | Path) -> list[Conversation]:
    """Read one prompt file, in order. A conversation without ``id`` is called "<file stem>-<line number>".

    Raises InputError, with file and line, for anything that is not a prompt, for an id that comes twice, and for a file
    without prompts.
    """
    path = Path(path)
    conversations: list[Conversation] = []
    number_of_id: dict[str, int] = {}
    for where, number, read in records(path):
        try:
            conversation = _parse(read(), default_id=f"{plain_stem(path)}-{number}", source=where)
        except BrokenRecordError as error:
            raise InputError(f"{where}: {error}") from None
        first = number_of_id.setdefault(conversation.id, number)
        if first != number:
            raise InputError(f"{where}: id {conversation.id!r} is that of line {first} too: ids must differ")
        conversations.append(conversation)
    if not conversations:
        raise InputError(
            f'{path} holds no prompts: write one JSON object a line, such as {{"turns": ["How are you?"]}}'
        )
    return conversations


def read_prompts(name: str, roots: Sequence[Path], asked_by: str) -> list[Conversation]:
    """The prompts of the file, the folder or the files that ``name`` means; ``asked_by``: the key that holds it."""
    return [conversation for path in find_prompt_files(name, roots, asked_by) for conversation in load_prompts(path)]


def _require(condition: object, message: str) -> None:
    if not condition:
        raise BrokenRecordError(message)


def _parse(value: object, default_id: str, source: str) -> Conversation:
    record = _of_kind(value, dict, "the line")
    unknown = sorted(record.keys() - set(_FIELDS))
    if unknown:
        close = difflib.get_close_matches(unknown[0], _FIELDS, n=1)
        raise BrokenRecordError(
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
        language=_optional_text(record, "language"),
        answers=answers,
        source=source,
    )


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
    _refuse_images(value, place)
    text = _of_kind(value, str, place)
    _require(text.strip(), f"{place} is blank: give a text, or leave it out")
    # JSON can spell half of a surrogate pair, which no encoding can write and no tokenizer takes.
    _require(
        not any("\ud800" <= letter <= "\udfff" for letter in text),
        f"{place} holds half of a surrogate pair, which is not text",
    )
    return text


def _refuse_images(value: object, place: str) -> None:
    """Targets that see images are trained for on text alone: their language model is what drafters draft for."""
    parts = value if isinstance(value, list) else []
    kinds = [part.get("type") for part in parts if isinstance(part, dict)]
    for kind in kinds:
        _require(
            kind in (None, "text"),
            f"{place} holds a part of type {kind!r}: prompts are text alone, whatever the target sees; leave it out",
        )


_KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "an object", int: "a number", float: "a number"}


def _of_kind(value: object, kind: type[_Kind], place: str) -> _Kind:
    if isinstance(value, kind):
        return value
    raise BrokenRecordError(f"{place} is {_KINDS.get(type(value)) or json.dumps(value)} instead of {_KINDS[kind]}")


# The split


@dataclass(frozen=True)
class PromptSplit:
    """No prompt is in both lists. A prompt is in one of them several times where it comes with several answers: its
    samples, which are imported.
    """

    train: Sequence[Conversation]
    heldout: Sequence[Conversation]
    samples: int = 0  # conversations whose prompt was there before, with other answers
    repeated: int = 0  # conversations left out because they were there before, answers and all
    too_long: int = 0  # conversations left out because they leave no room for an answer
    rejected: int = 0  # conversations of a data set that the chat template does not take
    alike: int = 0  # training prompts left out because the template makes them equal to held-out ones

    def notes(self) -> list[str]:
        """What a user must know of the counts, a sentence each."""
        told = (
            (self.samples, "are further answers to a prompt that was there before: all are kept, as samples of it"),
            (self.repeated, "repeat another, answers included: they count once"),
            (self.too_long, "leave no room for an answer in target.max_length: left out (data.skip_too_long)"),
            (self.rejected, "are none that the chat template takes: left out"),
            (self.alike, "are the same as a held-out prompt after the chat template: left out of the training prompts"),
        )
        return [f"note: prompts: {count:,} {what}" for count, what in told if count]


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
    train = _Loaded.of(data.train, "data.train", data.system, roots)
    heldout = _Loaded.of(data.heldout, "data.heldout", data.system, roots)
    samples, repeated = train.samples + heldout.samples, train.repeated + heldout.repeated
    if heldout.conversations:
        shared = train.first.keys() & heldout.first.keys()
        if shared:
            first = next(conversation for digest, conversation in heldout.first.items() if digest in shared)
            raise ConfigError(
                f"data.heldout: {len(shared)} of its {len(heldout.first)} prompts are training prompts too, the first "
                f"at {first.where} "
                f"(as {train.first[first.prompt_digest()].where}): remove them from one side"
            )
    else:
        chosen = _choose_heldout(list(train.first), data.heldout_fraction, data.seed)
        train, heldout = train.part(lambda digest: digest not in chosen), train.part(lambda digest: digest in chosen)
    return PromptSplit(
        train=train.draw(data.max_train, data.seed),
        heldout=heldout.draw(data.max_heldout, data.seed),
        samples=samples,
        repeated=repeated,
    )


@dataclass
class _Loaded:
    """Conversations of some files, in their order. The key of each is the digest of its prompt, and for further samples
    of a prompt a digest of the answers, too.
    """

    conversations: dict[str, Conversation]
    first: dict[str, Conversation]  # by the prompt's digest
    samples: int = 0
    repeated: int = 0

    @classmethod
    def of(cls, names: Iterable[str], asked_by: str, system: str | None, roots: Sequence[Path]) -> _Loaded:
        loaded = cls({}, {})
        seen: set[tuple[str, tuple[str, ...] | None]] = set()
        for name in names:
            for read in read_prompts(name, roots, asked_by):
                conversation = read if read.system is not None else replace(read, system=system)
                digest = conversation.prompt_digest()
                if (digest, conversation.answers) in seen:
                    loaded.repeated += 1
                    continue
                seen.add((digest, conversation.answers))
                if digest in loaded.first:
                    loaded.samples += 1
                    key = digest_json([digest, conversation.answers])
                else:
                    key = digest
                    loaded.first[digest] = conversation
                loaded.conversations[key] = conversation
        return loaded

    def part(self, wanted: Callable[[str], bool]) -> _Loaded:
        """The conversations whose prompt's digest is wanted."""
        return _Loaded(
            {key: c for key, c in self.conversations.items() if wanted(c.prompt_digest())},
            {digest: c for digest, c in self.first.items() if wanted(digest)},
        )

    def draw(self, at_most: int | None, seed: int) -> list[Conversation]:
        drawn = set(sorted(self.conversations, key=lambda key: chance(key, seed, "draw"))[:at_most])
        return [conversation for key, conversation in self.conversations.items() if key in drawn]


def _choose_heldout(digests: Sequence[str], fraction: float, seed: int) -> set[str]:
    """About ``fraction`` of the prompts, at least one on either side."""
    if len(digests) < 2:
        raise ConfigError(
            "data.train has a single prompt, so none can be held out: add prompts, or name held-out ones in "
            "data.heldout"
        )
    ranked = sorted(digests, key=lambda digest: chance(digest, seed, "heldout"))
    below = sum(chance(digest, seed, "heldout") < fraction for digest in ranked)
    return set(ranked[: min(max(below, 1), len(ranked) - 1)])


def chance(digest: str, seed: int, purpose: str) -> float:
    """A number in [0, 1), uniform over prompts and independent between purposes."""
    return int(digest_json([purpose, seed, digest])[:13], 16) / 16**13
