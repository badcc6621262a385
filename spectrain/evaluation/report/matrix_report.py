"""The matrix of runs × suites: in the terminal, as Markdown, and as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich import box
from rich.table import Table
from rich.text import Text

from spectrain.evaluation.data_matrix import DataMatrix, MatrixCell
from spectrain.evaluation.report.plots import ACCENT, INK, canvas
from spectrain.evaluation.report.sweep_plots import Drawing
from spectrain.evaluation.report.tables import MISSING, interval_text, number, shared_conditions
from spectrain.files import write_atomically

_CAPTION = (
    "acceptance length (tau) with its 95 % interval; bold: the greatest of its column; ≈: not certainly less than that "
    "(differences prompt by prompt)"
)
NAME = "data-matrix"  # of the files


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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=conditions_line(matrix), title_justify="left")
    table.caption, table.caption_justify = _CAPTION, "left"
    table.add_column("run", overflow="fold")
    for suite in matrix.suites:
        table.add_column(suite, justify="right")
    for run in matrix.runs:
        cells = [matrix.cells[run].get(suite) for suite in matrix.suites]
        table.add_row(
            run, *(Text(_cell(cell), style="bold" if cell is not None and cell.best else "") for cell in cells)
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


def _cell(cell: MatrixCell | None) -> str:
    if cell is None:
        return MISSING
    interval = f" ({interval_text(cell.interval)})" if cell.interval else ""
    return f"{number(cell.tau)}{interval}{' ≈' if cell.level else ''}"


def drawing(matrix: DataMatrix, name: str = NAME) -> Drawing:
    """A heatmap: within a column, the more of the accent colour, the greater; the figure is in the cell."""

    def draw() -> Figure:
        figure, axes = canvas(height_in=0.6 + 0.46 * len(matrix.runs))
        for x, suite in enumerate(matrix.suites):
            column = {
                y: cell for y, run in enumerate(matrix.runs) if (cell := matrix.cells[run].get(suite)) is not None
            }
            low, high = min(c.tau for c in column.values()), max(c.tau for c in column.values())
            for y, cell in column.items():
                share = (cell.tau - low) / (high - low) if high > low else 1.0
                patch = Rectangle(
                    (x - 0.48, y - 0.46), 0.96, 0.92, facecolor=ACCENT, alpha=0.06 + 0.5 * share, linewidth=0
                )
                axes.add_patch(patch)
                text = f"{cell.tau:.2f}{' ≈' if cell.level else ''}"
                weight = "bold" if cell.best else "normal"
                axes.text(x, y - 0.14 if cell.interval else y, text, ha="center", va="center", fontweight=weight)
                axes.text(x, y + 0.24, interval_text(cell.interval), ha="center", va="center", fontsize=6.5)
        axes.set_xlim(-0.6, len(matrix.suites) - 0.4)
        axes.set_ylim(len(matrix.runs) - 0.4, -0.6)
        axes.set_xticks(range(len(matrix.suites)), matrix.suites)
        axes.set_yticks(range(len(matrix.runs)), matrix.runs)
        for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            label.set_color(INK)
        axes.set_xlabel("suite")
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)
        return figure

    words = "; ".join(
        f"{run} " + ", ".join(f"{suite} {cell.tau:.2f}" for suite, cell in matrix.cells[run].items())
        for run in matrix.runs
    )
    title = "Acceptance length by training run and suite"
    return Drawing(name, title, conditions_line(matrix), f"{title}: {words}", draw)


def write_files(matrix: DataMatrix, folder: Path, name: str = NAME) -> None:
    """``NAME.md``, ``NAME.svg`` and ``NAME.png``."""
    drawing(matrix, name).write(folder)
    write_atomically(folder / f"{name}.md", markdown(matrix))
