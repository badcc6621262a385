"""Progress in units for people, on a log file and on a terminal."""

import io
import re

import pytest
from rich.console import Console

from spectrain import console
from spectrain.console import ProgressBar, amount_text, duration_text, rate_text


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (duration_text(4.21), "4.2 s"),
        (duration_text(95.4), "95 s"),
        (duration_text(12.4 * 60), "12 min"),
        (duration_text(3 * 3600 + 20 * 60), "3 h 20 min"),
        (amount_text(37, 200, "responses"), "37 of 200 responses"),
        (amount_text(83.2e6, 167e6, "bytes"), "83 MB of 167 MB"),
        (amount_text(45.2, 100, "%"), "45 %"),
        (rate_text(166_492_969.6, "bytes"), "166 MB/s"),
        (rate_text(12345.6, "tokens"), "12,346 tokens/s"),
        (rate_text(7.06, "responses"), "7.1 responses/s"),
        (rate_text(0.25, "steps"), "4.0 s a step"),
        (rate_text(1 / 300, "steps"), "5 min a step"),
        (rate_text(23.1, "%"), ""),
    ],
)
def test_quantities(found, expected):
    assert found == expected


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now_s = 1000.0

        def monotonic(self):
            return self.now_s

    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    monkeypatch.setattr(console, "_printed_s", 0.0)
    return clock


@pytest.fixture
def log(monkeypatch, clock):
    """Lines that are printed, each with the second it came at."""
    lines = []
    monkeypatch.setattr(console, "say", lambda text: lines.append((clock.now_s - 1000.0, text)))
    monkeypatch.setattr(console, "console", Console(file=io.StringIO(), force_terminal=False))
    return lines


def test_a_log_gets_a_line_every_ten_seconds_and_one_at_the_end(clock, log):
    """Bars inside others do not add to it."""
    with ProgressBar("fit", total=50, unit="steps", done=10) as bar:
        for step in range(40):
            with ProgressBar("simulate", total=8, unit="documents") as inner:
                for _ in range(8):
                    clock.now_s += 0.05
                    inner.advance(1)
            clock.now_s += 1.1
            bar.advance(1, note=f"loss {step}")
    *during, last = log
    assert all(later - earlier > 10 for (earlier, _), (later, _) in zip([(0, ""), *during], during, strict=False))
    assert 4 <= len(during) <= 6
    assert last == (pytest.approx(60), "fit: 50 steps, 1.5 s a step, took 60 s, loss 39")
    assert re.fullmatch(r"fit: 17 of 50 steps, 1.5 s a step, (49|50) s left, loss 6", during[0][1])


def test_what_ends_together_counts_for_the_rate(clock, log):
    """Answers of a batch end together, in a moment, after many seconds."""
    with ProgressBar("generate", total=40, unit="responses") as bar:
        clock.now_s += 20
        for _ in range(20):
            bar.advance(1)
        clock.now_s += 11
        bar.advance(0)
    assert [text for _, text in log][1] == "generate: 20 of 40 responses, 1.0 responses/s, 20 s left"


def test_a_bar_inside_another_has_lines_of_its_own_where_it_takes_long(clock, log):
    with ProgressBar("fit", total=1, unit="steps"), ProgressBar("simulate", total=4, unit="documents") as inner:
        for _ in range(4):
            clock.now_s += 6
            inner.advance(1)
    assert [text for _, text in log] == [
        "simulate: 2 of 4 documents, 6.0 s a document, 12 s left",
        "simulate: 4 of 4 documents, 6.0 s a document",
        "simulate: 4 documents, 6.0 s a document, took 24 s",
        "fit: 0 steps, took 24 s",
    ]


@pytest.mark.parametrize(("total", "done"), [(0, 0), (100, 0), (100, 100), (100, 100.0000001), (1e12, 1)])
def test_nothing_is_said_of_what_is_not_known(clock, log, total, done):
    """Nothing done yet, no time passed, more done than was expected."""
    with ProgressBar("eval", total=total, unit="tokens") as bar:
        clock.now_s += 10.5 if total else 0.0
        bar.advance(done)
    for _, text in log:
        assert not re.search(r"-\d|\?|inf|nan|:--", text), text


def test_an_error_ends_the_line_as_well(clock, log):
    def fail():
        with ProgressBar("generate", total=10, unit="responses") as bar:
            clock.now_s += 4
            bar.advance(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [text for _, text in log] == ["generate: 2 of 10 responses, 2.0 s a response, after 4.0 s"]


def test_a_terminal_shows_both_bars_and_keeps_the_outer_one(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(console, "console", Console(file=screen, force_terminal=True, width=120))
    with ProgressBar("fit", total=2, unit="steps") as bar:
        with ProgressBar("simulate", total=4, unit="documents") as inner:
            inner.advance(3)
            console._progress.refresh()
            assert re.search(r"simulate .*3 of 4 documents", screen.getvalue())
        bar.advance(1)
        with ProgressBar("simulate", total=4, unit="documents"):
            pass
        bar.advance(1)
    last = screen.getvalue().rstrip().rsplit("\r", 1)[-1]
    assert re.search(r"fit .*2 steps", last) and "simulate" not in last
    assert console._progress is None
    assert screen.getvalue().endswith("\x1b[?25h")  # the cursor is back
