"""Nothing that is printed controls the terminal, whoever wrote it."""

import io

import pytest
from rich.table import Table
from rich.text import Text

from spectrain.console import SafeConsole, printable

# Colour, title of the window, cursor, bell, carriage return, backspace, C1 control, right-to-left override.
HOSTILE = "a\x1b[31mb\x1b]0;t\x07c\x1b[2Jd\re\x08f\x9b1mg\u202eh"
CONTROLS = set("\x1b\x07\r\x08\x9b\u202e")


def printed(what, **settings):
    stream = io.StringIO()
    SafeConsole(file=stream, width=200, **settings).print(what, markup=False, soft_wrap=isinstance(what, str))
    return stream.getvalue()


def table():
    made = Table(title=HOSTILE)
    made.add_column(HOSTILE)
    made.add_row(HOSTILE)
    made.add_row(Text(HOSTILE, style="bold"))
    return made


@pytest.mark.parametrize("make", [lambda: HOSTILE, lambda: Text(HOSTILE), table], ids=["text", "styled text", "table"])
def test_control_characters_are_shown_as_escapes(make):
    text = printed(make())
    assert not CONTROLS & set(text)
    for shown in (r"a\x1b[31mb", r"c\x1b[2Jd", r"\x9b1mg\u202eh"):
        assert shown in text


@pytest.mark.parametrize("name", ["a[/red]b", "runs/[bold]x", "to:smile:", "[link=x]y[/link]"])
def test_a_name_is_no_markup(name):
    """Rich would end with an error, leave letters out, or draw a picture."""
    made = Table(title=f"A {name}", title_justify="left", show_header=False)
    made.add_row(name)
    stream = io.StringIO()
    SafeConsole(file=stream, width=200).print(made, name)
    assert stream.getvalue().count(name) == 3


def test_columns_are_as_wide_as_what_they_show():
    made = Table(show_header=False)
    made.add_row("\x1b\x1b\x1b", "|")
    made.add_row("plain", "|")
    lines = [line for line in printed(made).splitlines() if "|" in line]
    assert len({line.rindex("|") for line in lines}) == 1


def test_colours_of_our_own_reach_a_terminal():
    text = printed(Text("red\x1b[32m", style="red"), force_terminal=True, color_system="standard")
    assert "\x1b[31m" in text
    assert "\x1b[32m" not in text


@pytest.mark.parametrize("text", ["plain", "two\nlines\tand tabs", "τ = 2.1, Zürich, 日本, 🙂"])
def test_other_text_stays_as_it_is(text):
    assert printable(text) == text
