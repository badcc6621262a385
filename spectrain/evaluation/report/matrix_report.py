"""The matrix of runs × suites: in the terminal, as Markdown, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from rich.text import Text

from spectrain.evaluation.data_matrix import DataMatrix, MatrixCell
from spectrain.evaluation.records import EvaluationRecord
from spectrain.evaluation.report.sweep_plots import Drawing, HeatCell, heatmap, heatmap_figure
from spectrain.evaluation.report.tables import MISSING, interval_text, measured_label, number, shared_conditions
from spectrain.files import write_atomically

_CAPTION = (
    "acceptance length (tau) with its 95 % interval; bold: the greatest of its column; ≈: not certainly less than that "
    "(differences prompt by prompt)"
)
NAME = "data-matrix"  # of the files
POSITIONS = "positions"  # what names of the heatmaps begin with


def conditions_line(matrix: DataMatrix) -> str:
    """What all cells share, and the prompts of each suite."""
    counts = {
        suite: next(cells[suite].prompts for cells in matrix.cells.values() if suite in cells)
        for suite in matrix.suites
    }
    prompts = ", ".join(f"{count} prompts of {suite}" for suite, count in counts.items())
    shared = shared_conditions([matrix.shared]).split(" · ")
    return " · ".join(
        [*(part for part in shared if not part.startswith("suite ") and not part.endswith(" prompts")), prompts]
    )


def terminal_table(matrix: DataMatrix) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.title, table.title_justify = conditions_line(matrix), "left"
    table.caption, table.caption_justify = _CAPTION, "left"
    table.add_column("run", overflow="fold")
    for suite in matrix.suites:
        table.add_column(suite, justify="right")
    for run in matrix.runs:
        cells = [matrix.cells[run].get(suite) for suite in matrix.suites]
        table.add_row(
            run, *(Text(_cell(cell, "\n{}"), style="bold" if cell is not None and cell.best else "") for cell in cells)
        )
    return table


def markdown(matrix: DataMatrix) -> str:
    lines = [f"| run | {' | '.join(matrix.suites)} |", "|---" * (1 + len(matrix.suites)) + "|"]
    for run in matrix.runs:
        texts = []
        for suite in matrix.suites:
            cell = matrix.cells[run].get(suite)
            text = _cell(cell)
            texts.append(f"**{text}**" if cell is not None and cell.best else text)
        lines.append(f"| {run} | {' | '.join(texts)} |")
    return "\n".join([conditions_line(matrix), "", *lines, "", _CAPTION + ".", ""])


def _cell(cell: MatrixCell | None, interval_as: str = " ({})") -> str:
    """tau, whether it is level with the best, and its interval."""
    if cell is None:
        return MISSING
    interval = interval_as.format(interval_text(cell.interval)) if cell.interval else ""
    return f"{number(cell.tau)}{' ≈' if cell.level else ''}{interval}"


def drawing(matrix: DataMatrix, name: str = NAME) -> Drawing:
    """A heatmap whose colours compare the cells of a column."""

    def heat(suite: str, cell: MatrixCell | None) -> HeatCell | None:
        if cell is None:
            return None
        taus = [cells[suite].tau for cells in matrix.cells.values() if suite in cells]
        share = (cell.tau - min(taus)) / (max(taus) - min(taus)) if max(taus) > min(taus) else 1.0
        text = f"{cell.tau:.2f}{' ≈' if cell.level else ''}"
        return HeatCell(text, share, interval_text(cell.interval), cell.best)

    def draw() -> Figure:
        rows = [(run, [heat(suite, matrix.cells[run].get(suite)) for suite in matrix.suites]) for run in matrix.runs]
        return heatmap_figure(matrix.suites, rows, "suite")

    words = "; ".join(
        f"{run} " + ", ".join(f"{suite} {cell.tau:.2f}" for suite, cell in matrix.cells[run].items())
        for run in matrix.runs
    )
    title = "Acceptance length by training run and suite"
    return Drawing(name, title, conditions_line(matrix), f"{title}: {words}", draw)


def position_drawings(runs: Mapping[str, Sequence[EvaluationRecord]], suites: Sequence[str]) -> Iterator[Drawing]:
    """For each suite a heatmap target × method × draft position of all runs' drafters, whatever their conditions: each
    with its longest rounds. ``suites``: those that are drawn; none: all.
    """
    longest = {
        (run, record.suite, record.method): record
        for run, record in _by_drafts(runs)
        if not suites or record.suite in suites
    }
    for suite in dict.fromkeys(suite for _, suite, _ in longest):
        column = [(run, record) for (run, other, _), record in longest.items() if other == suite]
        names = [f"{Path(r.target).name}, {measured_label(r.method).removesuffix(' drafter')}" for _, r in column]
        rows = [
            (name if names.count(name) == 1 else f"{name}, {run}", record.acceptance_per_position)
            for name, (run, record) in sorted(zip(names, column, strict=True), key=lambda pair: pair[0])
        ]
        yield heatmap(f"{POSITIONS}-{suite}", f"Acceptance by target, method and position, {suite}", rows)


def _by_drafts(runs: Mapping[str, Sequence[EvaluationRecord]]) -> Iterator[tuple[str, EvaluationRecord]]:
    """The records of drafters with their runs, those with fewer drafts first."""
    for run, records in runs.items():
        drafters = [record for record in records if record.is_drafter and record.acceptance_per_position]
        for record in sorted(drafters, key=lambda record: record.num_speculative_tokens):
            yield run, record


def write_files(matrix: DataMatrix, folder: Path, name: str = NAME) -> None:
    """``NAME.md``, ``NAME.svg`` and ``NAME.png``."""
    drawing(matrix, name).write(folder)
    write_atomically(folder / f"{name}.md", markdown(matrix))
