"""Whether an answer is right: what it ends with, against the right answer. So a broken engine path is seen at once:
speculation must not change what is answered.

Two rules, by what suites ask for: the last number of a text, and what ``\\boxed{}`` holds.
"""

from __future__ import annotations

import re

_THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def is_right(answer: str, right: str, grading: str) -> bool:
    """Whether ``answer`` gives the right one. ``grading``: number or boxed, as in ``suite.grading``.

    Numbers are compared as numbers, everything else as text without spaces and ``$``. The right answer may be a whole
    solution (GSM8K's ends with ``#### 42``).
    """
    given = _final(answer, grading)
    return given is not None and _plain(given) == _plain(_expected(right, grading))


def _expected(right: str, grading: str) -> str:
    """What a right answer, or a whole solution, says the answer is."""
    if "####" in right:
        return right.rpartition("####")[2]
    boxed = last_boxed(right)
    if boxed is not None:
        return boxed
    return (_final(right, grading) or right) if grading == "number" else right


def _final(text: str, grading: str) -> str | None:
    if grading == "boxed":
        boxed = last_boxed(text)
        if boxed is not None:
            return boxed
        if not _NUMBER.search(text):
            return None
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{…}`` of a text holds, braces inside it included; None where there is none or it is not
    closed.
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position]
    return None


def _plain(text: str) -> str | float:
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"[\s$]|\\[,;! ]|\\left|\\right|\\%|%", "", text).rstrip(".")
    fraction = re.fullmatch(r"(-?\d+)/(\d+)", re.sub(r"\\frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", text))
    try:
        if fraction and int(fraction.group(2)):
            return int(fraction.group(1)) / int(fraction.group(2))
        return float(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    except ValueError:
        return text
