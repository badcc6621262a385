"""What a person sees of a response is its text, its mask, and nothing that the response itself could have made up."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling
from spectrain.stages.inspect import inspect_responses

GREEN, GREY, RESET = "\x1b[1;32m", "\x1b[90m", "\x1b[0m"


class Utf8Tokenizer:
    """One id a byte: characters may be torn apart between tokens."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


def make_response(
    spans: list[tuple[str | bytes, int]], finish_reason: str = "stop", split: str = "train", name: str = "doc"
) -> Response:
    pieces = [(text.encode() if isinstance(text, str) else text, mask) for text, mask in spans]
    return Response(
        conversation=Conversation(id=name, turns=("t",)),
        input_ids=np.array(list(b"".join(piece for piece, _ in pieces)), dtype=np.int32),
        loss_mask=np.array([mask for piece, mask in pieces for _ in piece], dtype=np.uint8),
        finish_reason=finish_reason,
        sampling=Sampling(0.0, 1.0, 0, 8, 0),
        domain="chat",
        split=split,
        key="0123456789abcdef",
    )


def show(
    responses: list[Response], colour: bool = False, tokenizer: Any = None, encoding: str = "utf-8", **options: Any
) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="")
    console = Console(
        file=file, force_terminal=colour, color_system="standard" if colour else None, no_color=not colour, width=40
    )
    inspect_responses(responses, tokenizer or Utf8Tokenizer(), console, **options)
    file.flush()
    return raw.getvalue().decode(encoding)


DOCUMENT = [("<user>2+2?<end>\n", 0), ("4.<end>", 1), ("\n<user>And?<end>", 0), ("Four.\nReally.<end>", 1), ("\n", 0)]


def test_supervised_spans_are_in_brackets_without_colour() -> None:
    shown = show([make_response(DOCUMENT)])
    assert "<user>2+2?<end>\n⟦4.<end>⟧\n<user>And?<end>⟦Four.\nReally.<end>⟧\n" in shown
    assert "legend: ⟦supervised⟧" in shown
    assert "\x1b" not in shown


def test_supervised_spans_are_coloured_in_a_terminal() -> None:
    shown = show([make_response(DOCUMENT)], colour=True)
    assert "⟦" not in shown
    spans = re.findall(r"\x1b\[([\d;]+)m([^\x1b]*)\x1b\[0m", shown)
    assert ("1;32", "4.<end>") in spans
    assert ("1;32", "supervised") in spans  # the legend
    assert ("90", "context") in spans
    document = "".join(text for style, text in spans if style == "1;32" and text != "supervised")
    assert document.replace("\n", "") == "4.<end>Four.Really.<end>"


def test_facts_of_a_response() -> None:
    shown = show([make_response(DOCUMENT, finish_reason="length", split="heldout", name="mt-81")])
    tokens = sum(len(text) for text, _ in DOCUMENT)
    header = next(line for line in shown.splitlines() if "mt-81" in line)
    assert f"{tokens} tokens" in header
    assert f"25 supervised ({100 * 25 / tokens:.0f} %)" in header
    for fact in ("heldout", "chat", "length (truncated, no end token)", "0123456789ab"):
        assert fact in header


def test_limit_split_and_totals() -> None:
    responses = [
        make_response([("ab", 0), (f"only {i}", 1)], split="heldout" if i % 2 else "train", name=f"d{i}")
        for i in range(6)
    ]
    responses.append(make_response([("ab", 0), ("cd", 1)], finish_reason="length", split="heldout", name="cut"))

    def names(shown: str) -> list[str]:
        return re.findall(r"── (\S+)", shown)

    assert names(show(responses)) == ["d0", "d1", "d2", "d3", "d4", "d5", "cut"]
    assert names(show(responses, limit=2)) == ["d0", "d1"]
    heldout = show(responses, limit=2, split="heldout")
    assert names(heldout) == ["d1", "d3"]
    assert "2 of 4 heldout responses shown; all together 28 tokens, 20 supervised (71 %), 1 truncated" in heldout
    assert "0 of 0 responses shown; all together 0 tokens, 0 supervised (0 %), 0 truncated" in show([])


@pytest.mark.parametrize("colour", [False, True])
def test_markup_and_control_characters_stay_text(colour: bool) -> None:
    nasty = "[red]no[/red] [/] :smile: \x1b[2J\x1b]0;title\x07 \r\x08\x9b \u202egnp.exe 🙂 42\ttab"
    shown = show([make_response([(nasty, 0), (nasty, 1)], name="[bold]id\x1b[1m")], colour=colour)
    for style in (GREEN, GREY, RESET, "\x1b[1m", "\x1b[1;36m"):
        shown = shown.replace(style, "")
    assert shown.count(r"[red]no[/red] [/] :smile: \x1b[2J\x1b]0;title\x07 \r\x08\x9b \u202egnp.exe 🙂 42") == 2
    assert r"[bold]id\x1b[1m" in shown
    assert not set(shown) & {"\x1b", "\x07", "\r", "\x08", "\x9b", "\u202e"}


def test_character_torn_between_context_and_answer() -> None:
    smile = "🙂".encode()
    shown = show([make_response([(b"a" + smile[:2], 0), (smile[2:] + b"b", 1)])])
    assert "a\ufffd⟦" in shown
    assert "b⟧" in shown


def test_output_that_cannot_show_every_character() -> None:
    shown = show([make_response([("caf\u00e9 ", 0), ("\u4f60", 1)])], encoding="latin-1")
    assert "caf\u00e9 [[\\u4f60]]" in shown
    assert "caf\\xe9 [[\\u4f60]]" in show([make_response([("caf\u00e9 ", 0), ("\u4f60", 1)])], encoding="ascii")


def test_blanks_that_a_tokenizer_drops_at_the_start_of_what_it_decodes() -> None:
    backend = Tokenizer(models.WordLevel({"▁two": 0, "▁words": 1}, unk_token="▁two"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([1]) == "words"
    response = make_response([(b"\x00", 0), (b"\x01", 1), (b"\x01", 0)])
    assert "two⟦ words⟧ words" in show([response], tokenizer=tokenizer)
