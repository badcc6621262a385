"""Running what others wrote, in bounded time and memory: chat templates are programs.

A template may loop for ever, or ask for a text of many gigabytes. transformers' sandbox keeps it from the machine's
files, not from its time. Timer and limit cost some microseconds, so every rendering has them.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import jinja2

_PAGE_BYTES = resource.getpagesize()
_AGAIN_S = 1.0  # between two signals, in case that one was lost


class OutOfTimeError(BaseException):
    """The time is over. No Exception: what is bounded may catch those and go on."""


@contextmanager
def bounded(seconds: float, more_bytes: int) -> Iterator[None]:
    """Inside, Python code ends after so many seconds with OutOfTimeError, and memory may grow by so many bytes, beyond
    which it ends with MemoryError. Only the main thread can be interrupted; elsewhere nothing is bounded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, _out_of_time)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    _limit_memory(limits, more_bytes)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, handler)
        if left_s:  # somebody else's timer goes on
            signal.setitimer(signal.ITIMER_REAL, left_s)


def _out_of_time(number: int, frame: FrameType | None) -> NoReturn:
    raise OutOfTimeError


def _limit_memory(limits: tuple[int, int], more_bytes: int) -> None:
    """Where the system says how much address space is in use."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)  # a pathlib.Path takes longer than all the rest
    except OSError:
        return
    try:
        pages = int(os.read(statm, 32).split()[0])
    finally:
        os.close(statm)
    wanted = pages * _PAGE_BYTES + more_bytes
    bounds = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *bounds]), limits[1]))


# --- templates -----------------------------------------------------------------------------------------------------

# Rendering takes a millisecond. Its text is at most a few times what it is made of.
RENDER_S, _RENDER_BYTES, _MOST_CHARS = 10.0, 1 << 31, 1 << 25


class RejectedError(Exception):
    """What a template raised, by its own word or by stumbling, in words."""


def render_template(
    tokenizer: Any,
    messages: Sequence[tuple[str, str]],
    tools: list[Any] | None,
    generation_prompt: bool,
    parts: bool,
    variables: Mapping[str, Any],
) -> str:
    """The text of messages (role, text) by the target's own chat template. Raises RejectedError, and OutOfTimeError.

    parts: it is shown each text as a list of one part, as templates of targets that see images want it. variables:
    others that it reads (``target.template_kwargs``).
    """
    shown = [{"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in messages]
    try:
        with bounded(RENDER_S, _RENDER_BYTES):
            rendered = tokenizer.apply_chat_template(
                shown, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **variables
            )
    except jinja2.TemplateError as error:  # in its own words
        raise RejectedError(str(error)) from error
    except Exception as error:  # a template is a program of anybody's: dividing by zero is one of many ways
        by_its_own_word = type(error) is jinja2.TemplateError
        kind, reason = type(error).__name__, str(error)
        raise RejectedError(reason if by_its_own_word and reason else f"{kind}: {reason}".rstrip(": ")) from error
    if not isinstance(rendered, str) or len(rendered) > _MOST_CHARS:
        raise RejectedError(f"it gives more than {_MOST_CHARS:,} characters")
    return rendered
