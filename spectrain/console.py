"""The terminal: one console, and progress bars that show how fast it goes and what is left.

Names, templates and answers come from anybody, so nothing that is printed reaches the terminal as a control sequence:
the consoles here write such characters as escapes (``\\x1b``).

Progress goes to stderr so that stdout stays clean for results. Without a terminal (a log file, CI) a line is printed
every ``PLAIN_EVERY_S`` seconds at most instead of a moving bar, and one at the end.
"""

from __future__ import annotations

import time
import traceback
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.segment import Segment
from rich.text import Text

from spectrain import signals
from spectrain.files import bytes_text
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
    """Prints no control character of a text as it is, wherever the text comes from, and takes none of it for rich's
    markup: "[/red]" and ":x:" in a name are letters, in a table's cell as in a line.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

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
_WINDOW_S, _SAMPLE_S = 60.0, 0.5  # the rate is that of the last minute, of samples so far apart


def say(message: str) -> None:
    """One line for the user, without secrets."""
    console.print(mask_text(message), markup=False, soft_wrap=True)


def say_traceback() -> None:
    """The traceback of the error that is being handled."""
    say(traceback.format_exc().rstrip())


# --- quantities for people -------------------------------------------------------------------------------------------


def duration_text(seconds: float) -> str:
    """ "4.2 s", "95 s", "12 min", "3 h 20 min"."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60:,} h {minutes % 60} min"


def amount_text(done: float, total: float | None, unit: str) -> str:
    """ "37 of 200 responses"; without a total, "37 responses"."""
    if unit == "%":
        return f"{done:.0f} %"
    if unit == "bytes":
        return bytes_text(done) if total is None else f"{bytes_text(done)} of {bytes_text(total)}"
    return f"{done:,.0f} {unit}" if total is None else f"{done:,.0f} of {total:,.0f} {unit}"


def rate_text(per_s: float, unit: str) -> str:
    """ "12,345 tokens/s", "166 MB/s", and "1.8 s a step" where one takes longer than a second; nothing for shares."""
    if unit == "%" or per_s <= 0:
        return ""
    if unit == "bytes":
        return f"{bytes_text(per_s)}/s"
    if per_s < 1:
        return f"{duration_text(1 / per_s)} a {unit.removesuffix('s')}"
    return f"{per_s:,.0f} {unit}/s" if per_s >= 100 else f"{per_s:.1f} {unit}/s"


# --- bars ------------------------------------------------------------------------------------------------------------


class ProgressBar:
    """``with ProgressBar("capture", total=n, unit="tokens") as bar: bar.advance(k, note="loss 1.2")``.

    unit: a plural; "bytes" are shown in units that fit, "%" without a rate. done: how much was there before; it does
    not count for the rate. A bar may be opened inside another: it is shown below it, and gone when it is done.
    """

    def __init__(self, title: str, total: float, unit: str, done: float = 0, note: str = "") -> None:
        self._title = title
        self._total = total
        self._unit = unit
        self._done = self._first = done
        self._note = note
        self._printed = False
        self._end_s: float | None = None
        self._finished = False

    def __enter__(self) -> ProgressBar:
        self._start_s = time.monotonic()
        self._samples = deque([(self._start_s, self._done)])
        self._last = self._samples[0]  # answers of one batch end together: more may be done than at the last sample
        _open.append(self)
        if console.is_terminal:
            self._task = _display().add_task(self._title, total=self._total, completed=int(self._done), bar=self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(finished=kind is None)

    def advance(self, amount: float, note: str | None = None) -> None:
        self._done += amount
        self._note = self._note if note is None else note
        now_s = time.monotonic()
        if amount:
            self._last = now_s, self._done
            if now_s - self._samples[-1][0] > _SAMPLE_S:
                self._samples.append(self._last)
                while len(self._samples) > 2 and now_s - self._samples[1][0] > _WINDOW_S:
                    self._samples.popleft()
        if _progress is not None:
            _progress.update(self._task, completed=self._done)
        elif now_s - max(self._start_s, _printed_s) > PLAIN_EVERY_S:
            self._print()

    def words(self) -> list[str]:
        """Amount, rate, time, note; some may be empty. The time is what is left, and at the end what it took."""
        now_s = time.monotonic() if self._end_s is None else self._end_s
        (first_s, first), (last_s, last) = self._samples[0], self._last
        if self._end_s is not None or last == first:  # of the whole
            (first_s, first), (last_s, last) = (self._start_s, self._first), (now_s, self._done)
        per_s = (last - first) / max(last_s - first_s, 1e-3)
        remaining = self._total - self._done
        if self._end_s is not None:
            spent = f"{'took' if self._finished else 'after'} {duration_text(now_s - self._start_s)}"
        else:
            spent = f"{duration_text(max(1.0, remaining / per_s))} left" if per_s > 0 and remaining > 0 else ""
        total = None if self._finished else self._total  # a bar may end early: answers are shorter than they may be
        return [amount_text(self._done, total, self._unit), rate_text(per_s, self._unit), spent, self._note]

    def _close(self, finished: bool) -> None:
        if self not in _open:
            return
        _open.remove(self)
        self._end_s, self._finished = time.monotonic(), finished
        if _progress is not None:
            if finished:
                _progress.update(self._task, total=self._done, completed=self._done)
            _end_display(self._task, last=not _open)
        elif not _open or self._printed:  # of a bar inside another, only where it took long
            self._print()

    def _print(self) -> None:
        global _printed_s
        self._printed, _printed_s = True, time.monotonic()
        say(f"{self._title}: {', '.join(filter(None, self.words()))}")


_open: list[ProgressBar] = []  # the outermost first
_progress: Progress | None = None  # what shows them on a terminal
_printed_s = 0.0  # when the last line of a bar was printed


class _Words(ProgressColumn):
    """One of ``ProgressBar.words``."""

    def __init__(self, number: int, style: str = "") -> None:
        super().__init__()
        self._number = number
        self._style = style

    def render(self, task: Task) -> Text:
        return Text(task.fields["bar"].words()[self._number], style=self._style)


def _display() -> Progress:
    global _progress
    if _progress is None:
        columns = (_Words(0), _Words(1, "cyan"), _Words(2), _Words(3))
        _progress = Progress(TextColumn("{task.description:<9}", markup=False), BarColumn(), *columns, console=console)
        _progress.start()
    return _progress


def _end_display(task: TaskID, last: bool) -> None:
    global _progress
    assert _progress is not None
    if last:  # stays as it is
        progress, _progress = _progress, None
        progress.stop()
    else:
        _progress.remove_task(task)


def _close_all() -> None:
    for bar in reversed(_open.copy()):
        bar._close(finished=False)


signals.before_last_line(_close_all)


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
