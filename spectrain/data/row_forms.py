"""Rows of data sets as others have them, as conversations for the target to answer.

    messages       [{role, content}, …], also called conversation; ShareGPT's conversations [{from, value}, …]
    prompt         a text, or such messages; also called question, query, problem, inputs
    instruction    a text, with an optional input below it
    turns          the user's texts, as in prompt files

A content may be a text or a list of parts of type text. What answers the rows hold is left out: a drafter learns from
the target's own. A row that cannot be used raises ``UnusableRowError`` with a reason that whoever reads rows counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spectrain.data.prompts import Conversation

# What a row may be made of -> the columns that are taken for it where the configuration names none, the first that is
# there.
COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "question", "query", "problem", "inputs"),
    "instruction": ("instruction",),
    "turns": ("turns",),
    "input": ("input",),
    "system": ("system", "system_prompt"),
    "tools": ("tools",),
    "category": ("category",),
    "language": ("language",),
}
_FORMS = ("messages", "prompt", "instruction", "turns")
_ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
}


class UnusableRowError(Exception):
    """Why a row is left out, in the same words for all rows of which it is true."""


def conversation_of(row: Mapping[str, Any], columns: Mapping[str, str], name: str, where: str) -> Conversation:
    """The conversation in a row: user turns, system prompt, tools.

    Args:
        columns: what of ``COLUMNS`` is in which column; what is not named is looked for.
        name: of the conversation.
        where: the row is, for messages.

    Raises UnusableRowError. Raises KeyError, naming the column, where ``columns`` names one that the row does not have.
    """
    found = {part: _column(row, part, columns) for part in COLUMNS}
    form = next((part for part in _FORMS if found[part] is not None), None)
    named = [part for part in _FORMS if part in columns]
    if form is None or (named and form not in named):
        form = named[0] if named else form
    if form is None or found[form] is None:
        raise UnusableRowError("no prompt in it")
    system, turns = _form(form, found)
    given = found["system"]
    if system is None and isinstance(given, str) and given.strip():
        system = given
    return Conversation(
        id=name,
        turns=tuple(map(_plain, turns)),
        system=None if system is None else _plain(system),
        tools=_tools(found["tools"]),
        domain=_named(found["category"]),
        language=_named(found["language"]),
        source=where,
    )


def _column(row: Mapping[str, Any], part: str, columns: Mapping[str, str]) -> Any:
    if part in columns:
        return row[columns[part]]
    return next((row[name] for name in COLUMNS[part] if row.get(name) is not None), None)


def _form(form: str, found: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """(system prompt, user turns)"""
    value = found[form]
    if form == "messages" or (form == "prompt" and isinstance(value, list)):
        return _messages(value)
    if form == "turns" and isinstance(value, list) and value:
        return None, list(map(_text, value))
    text = _text(value)
    if form == "instruction" and found["input"] is not None:
        below = _text(found["input"])
        text = f"{text}\n\n{below}" if below.strip() else text
    return None, [text]


def _messages(value: Any) -> tuple[str | None, list[str]]:
    if isinstance(value, str):  # JSON in a column of texts
        value = _json(value)
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise UnusableRowError("messages that are no list of messages")
    system: str | None = None
    turns: list[str] = []
    expected: tuple[str, ...] = ("system", "user")
    for message in value:
        role = _ROLES.get(str(message.get("role") or message.get("from")).lower())
        if role is None:
            raise UnusableRowError("a role that is neither system, user nor assistant")
        if role not in expected:
            raise UnusableRowError("it begins with an answer" if not turns else "roles that do not alternate")
        content = message.get("content")
        if role == "system":
            text = _text(message.get("value") if content is None else content)
            system = text if text.strip() else None
        elif role == "user":
            turns.append(_text(message.get("value") if content is None else content))
        expected = ("assistant",) if role == "user" else ("user",)
    if not turns:
        raise UnusableRowError("no prompt in it")
    return system, turns


def _text(value: Any) -> str:
    """A text, or a list of parts of type text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
        if any(part.get("type", "text") != "text" or not isinstance(part.get("text"), str) for part in value):
            raise UnusableRowError("parts that are no text")
        return "".join(part["text"] for part in value)
    raise UnusableRowError("no prompt in it" if value is None or value == [] else "a prompt that is no text")


def _named(value: Any) -> str | None:
    """A kind of text, or a language, where the row says one."""
    return value if isinstance(value, str) and value.strip() else None


def _plain(text: str) -> str:
    if not text.strip():
        raise UnusableRowError("an empty prompt")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UnusableRowError("half of a surrogate pair")
    return text


def _tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    """Tool definitions, in the form that chat templates want: a function alone (as xLAM has it) is wrapped."""
    value = _json(value) if isinstance(value, str) and value.strip() else value
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise UnusableRowError("tools that are no list of objects")
    return tuple(dict(tool) if "type" in tool else {"type": "function", "function": dict(tool)} for tool in value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UnusableRowError("JSON that cannot be read") from None
