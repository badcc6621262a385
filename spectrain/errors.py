"""Errors a user can act on.

Each carries one sentence that says what is wrong, which field or file, and what to do. The command line prints that
sentence and exits with ``exit_code``; ``--debug`` adds the traceback. Anything that is not a ``SpectrainError`` is a
bug of ours.
"""

from __future__ import annotations


class SpectrainError(Exception):
    """Base of all errors with a message for the user."""

    exit_code = 1


class ConfigError(SpectrainError):
    """A configuration key, value or combination that cannot work. Raised before work starts."""

    exit_code = 2


class InputError(SpectrainError):
    """A file or folder that is missing, broken or belongs to something else."""

    exit_code = 2


class RunError(SpectrainError):
    """A failure while running: a non-finite loss, an empty loss mask, hidden states that are not the target's."""

    exit_code = 1


class NotFiniteError(RunError):
    """Numbers of the target that are not finite. ``what`` they are, the type they were computed in where that is known,
    and ``where``.
    """

    def __init__(self, what: str, dtype: str | None = None, where: str = "") -> None:
        wider = "use target.dtype=bfloat16 or float32, whose range is wider"
        advice = {None: f"in float16 that is its range, {wider}", "float16": wider}.get(
            dtype, "its weights are broken, or it needs another target.dtype"
        )
        kind = f" in {dtype}" if dtype else ""
        super().__init__(f"the target computed {what} that are not finite{kind}{where}: {advice}")


EXCERPT_CHARS = 40  # of a text, in an error


def text_difference(expected: str, found: str) -> str:
    """Where two texts part, with a little of both, for an error."""
    place = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found))
    )
    context = f"after {expected[max(0, place - EXCERPT_CHARS) : place]!r}" if place else "at the start"
    wanted, written = (
        repr(text[place : place + EXCERPT_CHARS]) if place < len(text) else "the end" for text in (expected, found)
    )
    return f"{context} it writes {written} where {wanted} was expected"
