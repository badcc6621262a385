"""What a check found, and the table of all of them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
_LONGEST = 160  # characters of an error in the table


class Skipped(Exception):  # noqa: N818  (no error)
    """What a check needs is not here."""


@dataclass(frozen=True)
class Row:
    """A line of the table. ``figure``: what was measured, with its unit; or why there is none."""

    name: str
    status: str
    figure: str


Check = Callable[[str], Iterator[Row]]  # of a device, as torch calls it


def judged(name: str, good: bool, figure: str) -> Row:
    return Row(name, OK if good else FAILED, figure)


def rows_of(checks: Sequence[tuple[str, Check]], device: str, seconds: float) -> Iterator[Row]:
    """Rows of all checks, in order. One that fails stops none of the others; when ``seconds`` are over, the rest are
    skipped.
    """
    end = time.monotonic() + seconds
    for name, check in checks:
        if time.monotonic() >= end:
            yield Row(name, SKIPPED, f"{seconds:.0f} s were over")
            continue
        try:
            yield from check(device)
        except Skipped as reason:
            yield Row(name, SKIPPED, str(reason))
        except Exception as error:
            traceback.print_exc()
            yield Row(name, FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST])


def markdown(rows: Sequence[Row]) -> str:
    """To paste into an issue."""
    lines = [f"| {row.name} | {row.status} | {row.figure.replace('|', '/')} |" for row in rows]
    return "\n".join(["| check | result | figure |", "|---|---|---|", *lines])
