"""The terminal: one console, and progress bars that show rate and ETA.

Names, templates and answers come from anybody, so nothing that is printed reaches the terminal as a control sequence:
the consoles here write such characters as escapes (``\\x1b``).

Progress goes to stderr so that stdout stays clean for results. Without a terminal (a log file, CI) a line is printed
every ``PLAIN_EVERY_S`` seconds instead of a moving bar.
"""

from __future__ import annotations

import time
import traceback
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from spectrain.masking import mask_text

# They reorder what follows them, the end of a message included.
_DIRECTIONS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """Escapes instead of characters that control a terminal or the direction of writing; line feeds and tabs as they
    are.
    """
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(ascii(letter)[1:-1] if _controls(letter) else letter for letter in text)


def _controls(letter: str) -> bool:
    return letter not in "\n\t" and (unicodedata.category(letter) in ("Cc", "Cs") or letter in _DIRECTIONS)


class SafeConsole(Console):
    """Prints no control character of a text as it is, wherever the text comes from."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Before anything is laid out, so that columns are as wide as what they show."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Whatever was not a plain text; rich's own control sequences are segments of their own kind."""
        for segment in super().render(renderable, options):
            safe = segment.text if segment.control else printable(segment.text)
            yield segment if safe == segment.text else Segment(safe, segment.style)


console = SafeConsole(stderr=True, highlight=False)
stdout = SafeConsole(highlight=False)

PLAIN_EVERY_S = 10.0


def say(message: str) -> None:
    """One line for the user, without secrets."""
    console.print(mask_text(message), markup=False, soft_wrap=True)


def say_traceback() -> None:
    """The traceback of the error that is being handled."""
    say(traceback.format_exc().rstrip())


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.1f} {task.fields['unit']}/s", style="cyan")


class ProgressBar:
    """``with ProgressBar("capture", total=n, unit="tokens") as bar: bar.advance(k, note="loss 1.2")``."""

    def __init__(self, title: str, total: float, unit: str, done: float = 0) -> None:
        self._title = title
        self._total = total
        self._unit = unit
        self._done = done
        self._note = ""
        self._start_done = done
        self._start_s = time.monotonic()
        self._last_s = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description:<9}"),
                BarColumn(),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
                _Rate(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
                speed_estimate_period=60,
            )
            self._task = self._bar.add_task(title, total=total, completed=int(done), unit=unit, note="")

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._print_line()

    def advance(self, amount: float, note: str | None = None) -> None:
        self._done += amount
        self._note = self._note if note is None else note
        if self._bar is not None:
            self._bar.update(self._task, advance=amount, note=self._note)
        elif time.monotonic() - self._last_s > PLAIN_EVERY_S:
            self._print_line()

    def _print_line(self) -> None:
        now = time.monotonic()
        self._last_s = now
        rate = (self._done - self._start_done) / max(now - self._start_s, 1e-9)
        left = (self._total - self._done) / rate if rate > 0 else float("inf")
        eta = f"{left:,.0f} s left" if left < 1e7 else "?"
        say(
            f"{self._title}: {self._done:,.0f}/{self._total:,.0f} {self._unit}, {rate:,.1f} {self._unit}/s, {eta} "
            f"{self._note}".rstrip()
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside: no bars, errors only. Settings are put back as they were."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
