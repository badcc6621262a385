"""``eval compare``: records of runs, folders or files side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from spectrain.console import say, stdout
from spectrain.drafters.hub_drafters import is_hub_id
from spectrain.errors import ConfigError, InputError
from spectrain.evaluation.compare_records import Comparison, Difference, compare, pairs, records_of
from spectrain.evaluation.records import EvaluationRecord
from spectrain.evaluation.report.tables import interval_text, measured_label, number


def compare_named(names: Sequence[str], anyway: bool = False) -> list[Comparison]:
    """Compares the first with each of the others, and prints a table."""
    if len(names) < 2:
        raise ConfigError("eval compare takes two or more runs, folders or records: spectrain eval compare A B")
    first = _records(names[0])
    found: list[Comparison] = []
    for other in names[1:]:
        matched = pairs(first, _records(other))
        if not matched:
            raise InputError(
                f"{names[0]} and {other} have no record of the same suite, method, number of drafts, temperature, "
                "engine and concurrency: name two records to compare others"
            )
        made = [compare(ours, theirs, anyway) for ours, theirs in matched]
        stdout.print(_table(names[0], other, made))
        for differing in dict.fromkeys(text for comparison in made for text in comparison.differing):
            say(f"note: measured under other conditions: {differing}")
        found += made
    return found


def _records(name: str) -> list[EvaluationRecord]:
    """Of a file, a folder or a run; or what was published with a drafter, ``ORG/NAME``, with ``@REVISION``."""
    repo, _, revision = name.partition("@")
    if os.path.exists(os.path.expanduser(name)) or not is_hub_id(repo):
        return records_of(name)
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repo, revision=revision or None, allow_patterns=["eval/*.json"])
    except Exception as error:  # network, disk and Hub errors of many types
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"{name} is neither a folder nor a record here, and the Hub does not hand it out ({reason})"
        ) from error
    if not os.path.isdir(os.path.join(folder, "eval")):
        raise InputError(
            f"{name} was published without evaluation records: measure it, spectrain eval drafter.path={name}"
        )
    return records_of(folder)


def _table(first: str, second: str, comparisons: Sequence[Comparison]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"A {first}  ·  B {second}", title_justify="left")
    for name in ("what", "figure", "A", "B", "B to A", "95 % interval"):
        table.add_column(name, justify="left" if name in ("what", "figure") else "right", overflow="fold")
    for comparison in comparisons:
        for row, difference in enumerate(comparison.differences):
            table.add_row(
                _what(comparison) if row == 0 else "",
                difference.name,
                number(difference.first, digits=3),
                number(difference.second, digits=3),
                Text(_change(difference), style="bold" if difference.certain else ""),
                interval_text(difference.interval, digits=3),
            )
        if comparison.same_output is not None:
            table.add_row("", "same output", "", f"{comparison.same_output} of {comparison.prompts}", "", "")
    return table


def _what(comparison: Comparison) -> str:
    second = comparison.second
    drafts = f", n = {second.num_speculative_tokens}" if second.num_speculative_tokens else ""
    several = f", {second.concurrency} at a time" if second.concurrency > 1 else ""
    return f"{second.suite}, {measured_label(second.method)}{drafts}{several} ({comparison.prompts} prompts)"


def _change(difference: Difference) -> str:
    return f"{difference.change:.3f}×" if difference.none else f"{difference.change:+.3f}"
