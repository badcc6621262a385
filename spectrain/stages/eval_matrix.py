"""``eval matrix``: runs that were trained on other data, on several suites."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spectrain.config.loading import compose
from spectrain.config.overrides import quoted
from spectrain.config.schema import SpectrainConfig
from spectrain.console import say, stdout
from spectrain.drafters.drafter_folder import read_method
from spectrain.errors import ConfigError, InputError
from spectrain.evaluation.compare_records import records_of
from spectrain.evaluation.data_matrix import DataMatrix, data_matrices
from spectrain.evaluation.report.matrix_report import NAME, position_drawings, terminal_table, write_files

_OVERRIDE = re.compile(r"[a-z][a-z_.]*=")


def runs_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Folders, and settings of the measurement. Folders of a multirun look like settings: what is there is a folder."""
    overrides = [word for word in words if _OVERRIDE.match(word) and not Path(word).exists()]
    return [word for word in words if word not in overrides], overrides


def named_runs(names: Sequence[str]) -> dict[str, Path]:
    """Name of a row -> run directory. A folder of runs, as ``-m`` makes it, stands for those that have a drafter."""
    found: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if not path.is_dir():
            raise InputError(f"{name} is no folder: name run directories, or the folder of a multirun")
        inside = [] if (path / "drafter").is_dir() else sorted(p.parent for p in path.glob("*/drafter") if p.is_dir())
        found += inside or [path]
    found = list(dict.fromkeys(path.resolve() for path in found))
    if len(found) < 2:
        raise ConfigError(
            "eval matrix takes two or more runs, or the folder of a multirun: spectrain eval matrix RUN RUN …"
        )
    short = [path.name for path in found]
    return {path.name if short.count(path.name) == 1 else str(path): path for path in found}


def measuring_config(run: Path, suites: Sequence[str], overrides: Sequence[str]) -> SpectrainConfig:
    """The sweep that measures the drafter of ``run`` on the suites, with as many drafts as it was trained for unless
    ``overrides`` say otherwise.
    """
    if not (run / "drafter").is_dir():
        raise InputError(f"{run} has no drafter: train it first, with `spectrain fit`")
    config = compose([*overrides, f"run.dir={quoted(str(run))}"])
    drafts = config.decoding.num_speculative_tokens
    cells = replace(
        config.sweep,
        suites=tuple(suites),
        methods=(read_method(run / "drafter"),),
        drafters=(),
        engines=(),
        num_speculative_tokens=(drafts,),
        concurrency=(config.suite.concurrency,),
        temperatures=(),
        context_tokens=(),
        shares={},
    )
    return replace(config, sweep=cells)


def show_matrix(runs: dict[str, Path], suites: Sequence[str], out: str | None) -> list[DataMatrix]:
    """Prints the matrix of what was measured, and writes it to ``out``."""
    records = {name: records_of(str(path)) for name, path in runs.items()}
    named = [_suite_name(entry) for entry in suites]
    if out is not None:
        for drawing in position_drawings(records, named):
            drawing.write(Path(out).expanduser())
            say(f"matrix: {Path(out) / drawing.name}.svg and .png")
        if len({record.target for found in records.values() for record in found}) == len(runs):
            say("matrix: each run has a target of its own, so their figures are drawn, not compared")
            return []
    matrices = data_matrices(records, named)
    for number, matrix in enumerate(matrices, start=1):
        stdout.print(terminal_table(matrix))
        for suite in matrix.own_prompts:
            say(f"matrix: {suite} is left out: the runs answered other prompts of it")
        for run in runs.keys() - set(matrix.runs):
            say(f"matrix: {run} is left out: it was not measured under these conditions")
        if out is not None:
            name = NAME if len(matrices) == 1 else f"{NAME}-{number}"
            write_files(matrix, Path(out).expanduser(), name)
            say(f"matrix: {Path(out) / name}.md, .svg and .png")
    return matrices


def _suite_name(entry: str) -> str:
    """As records name what ``sweep.suites`` asks for: ``NAME``, ``NAME:FILE`` or a file."""
    name, _, path = entry.partition(":")
    return name if path or not Path(name).expanduser().is_file() else Path(name).stem
