"""A run's prompts, drawn from data sets: read row by row, cleaned, and divided into training and held-out.

Which prompts are drawn, and on which side they are, depends on each prompt's own digest and ``data.seed`` alone, as of
prompt files. What is kept in memory is what is drawn, with a little to spare for near copies that are left out later,
and a digest of every prompt that was read. Every row that is not drawn for another reason than the draw is counted
under that reason.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spectrain.data.hub_sets import HubSet
from spectrain.data.near_copies import NearDuplicates, SuiteOverlap
from spectrain.data.prompts import Conversation, chance
from spectrain.data.row_forms import UnusableRowError, conversation_of
from spectrain.errors import InputError

_SPARE = 1.25  # prompts that are kept for each that is wanted, and a few
_SPARE_FEW = 16


@dataclass(frozen=True)
class PromptSource:
    """A set, and how many of its prompts are wanted; None: all."""

    name: str
    found: HubSet
    columns: Mapping[str, str]
    license: str | None
    train: int | None
    heldout: int | None


@dataclass
class SourceReport:
    """What became of the rows of one source. ``rows`` were read; ``unusable``: reason -> rows; ``overlapping``: suite
    -> prompts that share words with one of its.
    """

    name: str
    path: str
    subset: str | None
    split: str
    revision: str
    license: str | None
    rows: int = 0
    unusable: dict[str, int] = field(default_factory=dict)
    repeated: int = 0
    near_duplicates: int = 0
    overlapping: dict[str, int] = field(default_factory=dict)
    train: int = 0
    heldout: int = 0

    def note(self) -> str:
        """A line for the user."""
        licence = f", licence {self.license}" if self.license else ""
        reasons = [
            *(f"{count:,} {reason}" for reason, count in sorted(self.unusable.items())),
            *([f"{self.repeated:,} equal to another prompt"] if self.repeated else []),
            *([f"{self.near_duplicates:,} nearly another prompt"] if self.near_duplicates else []),
            *(f"{count:,} overlapping with suite {suite}" for suite, count in sorted(self.overlapping.items())),
        ]
        return (
            f"prompts of {self.name} ({self.path} at {self.revision[:12]}{licence}): {self.rows:,} rows read, "
            f"{self.train:,} training, {self.heldout:,} held out; left out: {'; '.join(reasons) or 'none'}"
        )


@dataclass(frozen=True)
class Selection:
    """The prompts that were drawn, in the order of their sets, and what became of the rest."""

    train: list[Conversation]
    heldout: list[Conversation]
    reports: list[SourceReport]

    def record(self) -> list[dict[str, Any]]:
        """For the manifest."""
        return [asdict(report) for report in self.reports]


@dataclass
class _Drawn:
    """Prompts of one side of one source: those of least chance, at most ``most`` of them."""

    most: int | None
    heap: list[tuple[float, int, Conversation]] = field(default_factory=list)  # the greatest chance first, negated

    def add(self, number: int, conversation: Conversation, draw: float) -> None:
        entry = (-draw, -number, conversation)
        if self.most is None or len(self.heap) < self.most:
            heapq.heappush(self.heap, entry)
        else:
            heapq.heappushpop(self.heap, entry)

    def by_chance(self) -> list[tuple[int, Conversation]]:
        return [(-number, conversation) for _, number, conversation in sorted(self.heap, key=lambda e: (-e[0], -e[1]))]


def select_prompts(
    sources: Sequence[PromptSource],
    heldout_fraction: float,
    seed: int,
    max_rows: int | None = None,
    near_duplicates: float | None = None,
    overlap: SuiteOverlap | None = None,
) -> Selection:
    """Draw the prompts of all sources. Raises InputError where a source gives no training or no held-out prompt, or
    lacks a column that was named.
    """
    seen: set[bytes] = set()
    sides = [_read(source, heldout_fraction, seed, max_rows, overlap, seen) for source in sources]
    resembling = None if near_duplicates is None else NearDuplicates(near_duplicates)
    chosen: dict[str, list[Conversation]] = {}
    for side in ("heldout", "train"):  # so that a training prompt that resembles a held-out one is the one left out
        chosen[side] = [
            conversation
            for source, (report, drawn) in zip(sources, sides, strict=True)
            for conversation in _kept(drawn[side], getattr(source, side), side, report, resembling)
        ]
    for report, _ in sides:
        if not report.train or not report.heldout:
            raise InputError(f"{report.note()}: too few prompts are left: name another split or columns, or more rows")
    return Selection(chosen["train"], chosen["heldout"], [report for report, _ in sides])


def _read(
    source: PromptSource,
    heldout_fraction: float,
    seed: int,
    max_rows: int | None,
    overlap: SuiteOverlap | None,
    seen: set[bytes],
) -> tuple[SourceReport, dict[str, _Drawn]]:
    found = source.found
    report = SourceReport(source.name, found.path, found.subset, found.split, found.revision, source.license)
    drawn = {"train": _Drawn(_with_spare(source.train)), "heldout": _Drawn(_with_spare(source.heldout))}
    unusable, overlapping = Counter[str](), Counter[str]()
    for number, row in enumerate(found.rows(), start=1):
        if max_rows is not None and number > max_rows:
            break
        report.rows = number
        where = f"{found.path}, row {number}"
        try:
            conversation = conversation_of(row, source.columns, f"{source.name}-{number}", where)
        except UnusableRowError as error:
            unusable[str(error)] += 1
            continue
        except KeyError as error:
            raise InputError(
                f"data.columns: {found.path} has no column {error}: its columns are {', '.join(map(str, row))}"
            ) from None
        digest = conversation.prompt_digest()
        if (key := bytes.fromhex(digest)) in seen:
            report.repeated += 1
            continue
        seen.add(key)
        suite = None if overlap is None else overlap.suite_of("\n".join(conversation.turns))
        if suite is not None:
            overlapping[suite] += 1
            continue
        side = "heldout" if chance(digest, seed, "heldout") < heldout_fraction else "train"
        drawn[side].add(number, conversation, chance(digest, seed, "draw"))
    report.unusable, report.overlapping = dict(unusable), dict(overlapping)
    if not drawn["heldout"].heap and len(drawn["train"].heap) > 1:  # at least one on either side
        last = min(drawn["train"].heap, key=lambda entry: chance(entry[2].prompt_digest(), seed, "heldout"))
        drawn["train"].heap.remove(last)
        drawn["heldout"].heap.append(last)
    return report, drawn


def _with_spare(wanted: int | None) -> int | None:
    return None if wanted is None else int(wanted * _SPARE) + _SPARE_FEW


def _kept(
    drawn: _Drawn, wanted: int | None, side: str, report: SourceReport, resembling: NearDuplicates | None
) -> list[Conversation]:
    """The first ``wanted`` by chance that resemble no other, in the order of the set."""
    kept: list[tuple[int, Conversation]] = []
    for number, conversation in drawn.by_chance():
        if wanted is not None and len(kept) == wanted:
            break
        if resembling is not None and resembling.add("\n".join(conversation.turns)):
            report.near_duplicates += 1
            continue
        kept.append((number, conversation))
    setattr(report, side, len(kept))
    return [conversation for _, conversation in sorted(kept, key=lambda pair: pair[0])]
