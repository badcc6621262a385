"""``spectrain inspect responses``: print responses with their supervised tokens marked, the quickest way to see that a
loss mask is right.

With colour, supervised text is green and context grey; without (a pipe, a log, NO_COLOR) supervised spans are in
brackets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from spectrain.config.schema import SpectrainConfig
from spectrain.console import printable, stdout
from spectrain.data.responses import Response, ResponseStore
from spectrain.errors import InputError
from spectrain.stages.run_dir import RunDir

SUPERVISED_STYLE = "bold green"
CONTEXT_STYLE = "bright_black"


def inspect(config: SpectrainConfig, limit: int, split: str | None = None) -> None:
    """Print the first ``limit`` responses of a run directory. ``split``: train, heldout, or None for both."""
    from spectrain.target.folder_files import load_tokenizer
    from spectrain.target.resolve import resolve_target

    run_dir = RunDir(config.run.dir)
    run_dir.check({})
    responses = ResponseStore(run_dir.responses).load()
    if not responses:
        raise InputError(
            f"run.dir={run_dir.path} holds no responses: run spectrain generate first, or name another run.dir"
        )
    target = resolve_target(config.target)
    run_dir.check({"id": target.id, "revision": target.revision})
    tokenizer = load_tokenizer(target.folder, config.target.trust_remote_code)
    inspect_responses(responses, tokenizer, stdout, limit=limit, split=split)


def inspect_responses(
    responses: Sequence[Response], tokenizer: Any, console: Console, limit: int | None = None, split: str | None = None
) -> None:
    """Print the first ``limit`` responses (None: all) of ``split`` ("train", "heldout"; None: both), a legend before
    and totals after.

    Nothing in a response can reach the terminal as a control sequence or be taken for markup.
    """
    chosen = [response for response in responses if split is None or response.split == split]
    shown = chosen[:limit]
    brackets = _brackets(console)
    _print(console, _legend(brackets))
    for response in shown:
        _print(console, _header(response, console.encoding))
        _print(console, _document(response, tokenizer, brackets, console.encoding))
    tokens = sum(len(response.input_ids) for response in chosen)
    supervised = sum(int(response.loss_mask.sum()) for response in chosen)
    cut = sum(response.finish_reason == "length" for response in chosen)
    _print(
        console,
        Text(
            f"\n{len(shown)} of {len(chosen)} {split + ' ' if split else ''}responses shown; all together {tokens:,} "
            f"tokens, "
            f"{supervised:,} supervised ({_percent(supervised, tokens)}), {cut} truncated",
            style="bold",
        ),
    )


def _print(console: Console, text: Text) -> None:
    # soft_wrap: the terminal wraps, so that a pipe gets the text as it is.
    console.print(text, soft_wrap=True, highlight=False)


def _brackets(console: Console) -> tuple[str, str] | None:
    """What encloses supervised spans where colour cannot show them; None where it can."""
    if console.is_terminal and console.color_system is not None and not console.no_color:
        return None
    try:
        "⟦⟧".encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return "[[", "]]"
    return "⟦", "⟧"


def _legend(brackets: tuple[str, str] | None) -> Text:
    opening, closing = brackets or ("", "")
    return Text.assemble(
        "legend: ",
        (f"{opening}supervised{closing}", SUPERVISED_STYLE),
        " (the target produced it: loss mask 1)  ",
        ("context", CONTEXT_STYLE),
        " (prompt and template: loss mask 0)",
    )


def _header(response: Response, encoding: str) -> Text:
    tokens, supervised = len(response.input_ids), int(response.loss_mask.sum())
    finish = {"length": "length (truncated, no end token)"}.get(response.finish_reason, response.finish_reason)
    facts = [
        response.split,
        *([response.domain] if response.domain else []),
        f"{tokens:,} tokens",
        f"{supervised:,} supervised ({_percent(supervised, tokens)})",
        f"finish reason {finish}",
        f"key {response.key[:12]}",
    ]
    return Text("\n" + _printable(f"── {response.conversation.id} · {' · '.join(facts)}", encoding), style="bold cyan")


def _document(response: Response, tokenizer: Any, brackets: tuple[str, str] | None, encoding: str) -> Text:
    text = Text()
    for span, supervised in _spans(response, tokenizer, encoding):
        if supervised and brackets:
            span = f"{brackets[0]}{span}{brackets[1]}"
        text.append(span, style=SUPERVISED_STYLE if supervised else CONTEXT_STYLE)
    return text


def _spans(response: Response, tokenizer: Any, encoding: str) -> Iterator[tuple[str, bool]]:
    """Runs of tokens with one mask value, as printable text.

    A run is what it adds to the decoded text before it, because some tokenizers drop the blank before a word that they
    decode alone.
    """
    ids, end, before = response.input_ids.tolist(), 0, ""
    for mask, run in groupby(response.loss_mask.tolist()):
        start, end = end, end + len(list(run))
        whole = tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if whole.startswith(before):
            span = whole[len(before) :]
        else:  # a character whose bytes lie on both sides of the border
            span = tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        before = whole
        yield _printable(span, encoding), bool(mask)


def _printable(text: str, encoding: str) -> str:
    """Escapes instead of control and direction characters and of what ``encoding`` lacks; line feeds and tabs as they
    are.
    """
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"
