"""Simulated acceptance of stored answers, cut in every way that decides how to serve: by the number of drafts, by
position, by kind of text, by language, by place in the answer, by length of context.

All of it comes from the same rounds of ``decoding/simulate.py``, so the parts add up to the whole: a round belongs to
the place and to the context of its anchor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spectrain.decoding.acceptance import Round, acceptance

_PLACE_TOKENS = (16, 32, 64, 128, 256, 512, 1024)
_CONTEXT_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class SimulatedText:
    """One stored answer as it was simulated. starts: where its answers begin; rounds: with the drafts asked for."""

    key: str
    domain: str | None
    language: str | None
    split: str
    starts: tuple[int, ...]
    rounds: Sequence[Round]


@dataclass(frozen=True)
class Figures:
    """One line of a table. first: of a range of tokens, its first one."""

    name: str
    first: int | None
    texts: int
    rounds: int
    acceptance_length: float | None
    interval: tuple[float, float] | None
    acceptance_per_position: tuple[float | None, ...]


def figures(name: str, rounds_per_text: Sequence[Sequence[Round]], n: int, first: int | None = None) -> Figures:
    """Acceptance of these rounds of each text."""
    stats = acceptance(rounds_per_text, n)
    return Figures(
        name,
        first,
        sum(bool(rounds) for rounds in rounds_per_text),
        stats.rounds,
        stats.acceptance_length if stats.rounds else None,
        stats.interval,
        tuple(share if stats.rounds else None for share in stats.acceptance_per_position),
    )


def tables(texts: Sequence[SimulatedText], n: int) -> dict[str, list[Figures]]:
    """By split, by kind of text, by language where some prompt says its own, by place in the answer (tokens before the
    anchor) and by context (position of the anchor in the text)."""
    languages = {"language": _by(texts, n, lambda text, round_: text.language or "none")}
    return {
        "split": _by(texts, n, lambda text, round_: text.split),
        "domain": _by(texts, n, lambda text, round_: text.domain or "none"),
        **(languages if any(text.language for text in texts) else {}),
        "place in the answer": _by(texts, n, lambda text, round_: _range(_place(text, round_), _PLACE_TOKENS)),
        "context": _by(texts, n, lambda text, round_: _range(round_.anchor, _CONTEXT_TOKENS)),
    }


def _by(texts: Sequence[SimulatedText], n: int, kind: Callable[[SimulatedText, Round], Any]) -> list[Figures]:
    parts: dict[Any, list[list[Round]]] = defaultdict(lambda: [[] for _ in texts])
    for index, text in enumerate(texts):
        for round_ in text.rounds:
            parts[kind(text, round_)][index].append(round_)
    found = []
    for name in sorted(parts):
        label = name if isinstance(name, str) else f"{name[0]}–{name[1]}" if name[1] else f"{name[0]} and more"
        found.append(figures(label, parts[name], n, None if isinstance(name, str) else name[0]))
    return found


def _place(text: SimulatedText, round_: Round) -> int:
    """Tokens of the answer before the anchor."""
    return round_.anchor - max((start for start in text.starts if start <= round_.anchor), default=0)


def _range(value: int, bounds: Sequence[int]) -> tuple[int, int]:
    """(first, last) of the range that a number lies in; last 0: without an end."""
    low = 0
    for bound in bounds:
        if value < bound:
            return low, bound - 1
        low = bound
    return low, 0


def as_json(value: dict[str, list[Figures]]) -> dict[str, Any]:
    return {name: [asdict(line) for line in lines] for name, lines in value.items()}
