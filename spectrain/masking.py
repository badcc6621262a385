"""What others must not read of a configuration: secrets, and how they are kept out of whatever is written or printed.

The one place that says what is secret: every value of ``engine.environment``, entries of ``engine.args`` and
``drafter.options`` that are named like a secret (``api_key``, ``hf_token``), user and password of a URL, and what comes
out of the environment by ``${oc.env:NAME}``. Such a value becomes a ``MaskedText`` when the configuration is composed:
it works as the text it is, and whoever writes it down (``files.plain``) writes what it shows instead. Lines for the
terminal go through ``mask_text``, which also knows values that were hidden (``hide``).

So that a run can go on in its directory, ``private_values`` are kept there in a file that its owner alone may read, and
``reveal`` puts them back; a reference to the environment stays the reference, and is read anew.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"
PRIVATE_FILE = "private.yaml"  # of a run directory, beside its config.yaml
_ENVIRONMENTS = (("engine", "environment"), ("launcher", "environment"))
_MAPPINGS = (("engine", "args"), ("drafter", "options"))  # of names that others chose
_URLS = ("engine", "urls")
# Where a name that holds no secret may say which place or thing is meant: what the terminal says of it is needed.
_PLACES = {"run", "target", "data", "suite", "path", "module"}
_SECRET_WORDS = {"key", "token", "secret", "password", "passwd", "pass", "pwd", "credential", "credentials", "auth"}
_ALSO_OF_NUMBERS = {"token", "key", "auth"}  # ``mask_token`` may be a number that is no secret
_SHORTEST = 6  # characters of a secret that is looked for in lines: shorter ones would hit innocent words
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,}\s]+)")
_USER = re.compile(r"(?<=//)[^/\s'\"]+@|\b[\w.%+-]+:[^\s/@'\"]+@(?=[\w\[])")
_QUERY = re.compile(r"(?i)([?&][\w-]*(?:key|token|secret|password|signature|credential|auth)=)[^&\s#'\"]+")
_hidden: set[str] = set()


class MaskedText(str):
    """Text that works as it is and is written down as ``shown``.

    ``compared``: what decides whether it changed since a stage ran; never the text. ``private``: ``shown`` does not
    lead back to it, so that it has to be kept for a later command.
    """

    shown: str
    compared: str
    private: bool

    def __new__(cls, text: str, shown: str = MASK, compared: str = MASK, private: bool = True) -> MaskedText:
        made = super().__new__(cls, text)
        made.shown, made.compared, made.private = shown, compared, private
        return made


def hide(secret: str) -> None:
    """From now on no line for the terminal has this text. Very short ones are left: they hide nothing."""
    if len(secret) >= _SHORTEST:
        _hidden.add(str(secret))


def mask_text(text: str) -> str:
    """``text`` without users and passwords of URLs, and without all that was hidden."""
    text = _QUERY.sub(rf"\g<1>{MASK}", _USER.sub(f"{MASK}@", text))
    for secret in sorted(_hidden, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def is_secret_name(name: str) -> bool:
    """Whether a name, of a variable or an argument, is one that secrets have: its last word says so, or for a variable
    in capitals any word.
    """
    words = re.split(r"[_.\- ]+", name.lower())
    return bool(_SECRET_WORDS & set(words if name.isupper() else words[-1:]))


def is_secret_key(key: str) -> bool:
    """Whether the value of a key of the configuration (``engine.environment.HF_TOKEN``) must not be shown."""
    return _is_secret(tuple(key.lstrip("+~").split(".")))


def _is_secret(path: tuple[Any, ...]) -> bool:
    if path[:2] in _ENVIRONMENTS:
        return True
    names = [name for name in path[2:] if isinstance(name, str)]
    return path[:2] in _MAPPINGS and any(is_secret_name(name) for name in names)


def mask_override(line: str) -> str:
    """A ``key=value`` of a command line as an error may show it."""
    key, equals, _ = line.partition("=")
    return f"{key}{equals}{MASK}" if equals and is_secret_key(key) else mask_text(line)


# --- the configuration ---------------------------------------------------------------------------------------------


def mask(values: Any, written: Any, path: tuple[Any, ...] = ()) -> Any:
    """``values``, nested mappings and lists, with ``MaskedText`` for what must not be shown.

    written: the same with references to the environment as they were written.
    """
    if isinstance(values, Mapping):
        same = isinstance(written, Mapping)  # else one reference gave all of them
        return {name: mask(value, written[name] if same else value, (*path, name)) for name, value in values.items()}
    if isinstance(values, list | tuple):
        same = isinstance(written, list | tuple)
        return [mask(value, written[index] if same else value, (*path, index)) for index, value in enumerate(values)]
    return _masked(values, written, path)


def _masked(value: Any, written: Any, path: tuple[Any, ...]) -> Any:
    if _is_secret(path) and _counts_as_text(value, path):
        hide_all = path[:2] not in _ENVIRONMENTS or is_secret_name(str(path[-1]))
        if hide_all:
            hide(str(value))
        compared = MASK if hide_all else f"{MASK} ({_digest(mask_text(str(value)))})"
        if written != value:
            return MaskedText(value, str(written), compared, private=False)
        return MaskedText(str(value), MASK, compared)
    if not isinstance(value, str):
        return value
    shown = mask_text(written) if path[:2] == _URLS or "//" in written else written
    if shown != written:
        return MaskedText(value, shown, shown)
    if written != value:
        place = bool(_PLACES & {path[0], path[-1]})
        secrets = [name for name in _VARIABLE.findall(written) if is_secret_name(name) or not place]
        for name in secrets:
            hide(os.environ.get(name, ""))
        return MaskedText(value, written, f"{written} ({_digest(value)})" if secrets else value, private=False)
    return value


def _counts_as_text(value: Any, path: tuple[Any, ...]) -> bool:
    """A secret may look like a number on a command line; ``true`` and null are none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        words = re.split(r"[_.\-]+", str(path[-1]).lower())
        return path[:2] in _ENVIRONMENTS or "api" in words or words[-1] not in _ALSO_OF_NUMBERS
    return isinstance(value, str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def escape_references(values: Any) -> Any:
    """``values`` with text that was never a reference written so that it is read as none (``${x}`` of a prompt)."""
    if isinstance(values, Mapping):
        return {name: escape_references(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [escape_references(value) for value in values]
    plain_text = isinstance(values, str) and not isinstance(values, MaskedText)
    return values.replace("${", "\\${") if plain_text else values


def private_values(values: Any) -> Any:
    """Of nested values those that have to be kept, under their names or numbers; None if there are none."""
    if isinstance(values, MaskedText):
        return str(values) if values.private else None
    if isinstance(values, Mapping):
        entries: Iterator[tuple[Any, Any]] = iter(values.items())
    elif isinstance(values, list | tuple):
        entries = enumerate(values)
    else:
        return None
    found = {name: private_values(value) for name, value in entries}
    return {name: value for name, value in found.items() if value is not None} or None


def reveal(values: Any, private: Any) -> None:
    """Put ``private`` values back, in place, where ``values`` still show a mask."""
    for name, secret in private.items() if isinstance(private, Mapping) else ():
        there = name < len(values) if isinstance(values, list) and isinstance(name, int) else _has(values, name)
        if not there:
            continue
        if isinstance(secret, Mapping):
            reveal(values[name], secret)
        elif isinstance(values[name], str) and MASK in values[name]:
            values[name] = secret


def _has(values: Any, name: Any) -> bool:
    return isinstance(values, Mapping) and name in values


def masked_keys(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where values that were read still show a mask instead of what it stands for."""
    if isinstance(values, Mapping):
        return [found for name, value in values.items() for found in masked_keys(value, (*path, name))]
    if isinstance(values, list | tuple):
        return [found for index, value in enumerate(values) for found in masked_keys(value, (*path, index))]
    if not isinstance(values, str):
        return []
    secret = values == MASK and _is_secret(path)
    return [path] if secret or f"//{MASK}@" in values or re.search(rf"[?&][\w-]+={re.escape(MASK)}", values) else []
