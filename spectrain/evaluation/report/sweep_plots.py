"""The figures of a sweep: acceptance by method and position, speed-up by number of drafts, throughput by concurrency,
and where the time of a round goes.

Each is drawn once more for files (SVG and PNG, on paper's colours). Nothing is told by hue alone: series differ by
marker and dashes and carry their names, cells of a heatmap their figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from spectrain.evaluation.records import Interval
from spectrain.evaluation.report.plots import (
    ACCENT,
    INK,
    MUTED,
    PLAIN,
    RULE,
    STYLE,
    canvas,
    page_svg,
    share_label,
    standalone,
)

# What a page's variables are on white paper.
PAPER = {INK: "#171a1d", MUTED: "#5c656e", RULE: "#e2e5e8", ACCENT: "#08775a", PLAIN: "#8a939b"}
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", "--", ":", "-.")
_HATCHES = ("", "///", "...")
_MOST_LETTERS = 46  # of a row of labels, each given as much room as the longest
_LABEL_POINTS = 11.0  # from one name to the next


@dataclass(frozen=True)
class Line:
    """A series: points (x, y, interval). ``main``: in the accent colour."""

    name: str
    points: Sequence[tuple[float, float, Interval | None]]
    main: bool = False


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn for the page and for files."""

    name: str  # of its files
    title: str
    note: str
    description: str
    draw: Callable[[], Figure]

    def page(self) -> Markup:
        with mpl.rc_context(STYLE):
            return page_svg(self.draw(), self.description)

    def write(self, folder: Path) -> None:
        """``NAME.svg`` and ``NAME.png``, for documents."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.svg").write_text(standalone(self.page()), encoding="utf-8")
        with mpl.rc_context(STYLE):
            figure = self.draw()
            for artist in figure.findobj():
                _recolour(artist)
            figure.savefig(folder / f"{self.name}.png", facecolor="#ffffff", dpi=200, metadata={"Software": None})


def _recolour(artist: object) -> None:
    """Placeholder colours as paper's."""
    known = {mpl.colors.to_rgb(placeholder): colour for placeholder, colour in PAPER.items()}
    for kind in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
        get, put = getattr(artist, f"get_{kind}", None), getattr(artist, f"set_{kind}", None)
        if get is None or put is None:
            continue
        try:
            found = mpl.colors.to_rgba(get())
        except (ValueError, TypeError):  # several colours, or none
            continue
        if found[:3] in known:
            put((*mpl.colors.to_rgb(known[found[:3]]), found[3]))


@dataclass(frozen=True)
class HeatCell:
    """``share``: how much of the accent colour, from 0 to 1. ``below``: a second line, smaller."""

    text: str
    share: float
    below: str = ""
    bold: bool = False


def heatmap_figure(
    columns: Sequence[str], rows: Sequence[tuple[str, Sequence[HeatCell | None]]], x_label: str
) -> Figure:
    """Cells by row and column: the more of the accent colour, the greater, and the figure in the cell."""
    two_lines = any(cell is not None and cell.below for _, cells in rows for cell in cells)
    slanted = len(columns) * max(map(len, columns)) > _MOST_LETTERS
    figure, axes = canvas(height_in=(0.8 if slanted else 0.55) + (0.46 if two_lines else 0.32) * len(rows))
    for y, (_, cells) in enumerate(rows):
        for x, cell in enumerate(cells):
            if cell is None:
                continue
            alpha = 0.06 + 0.6 * cell.share
            axes.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, facecolor=ACCENT, alpha=alpha, linewidth=0))
            weight = "bold" if cell.bold else "normal"
            axes.text(x, y - 0.14 if cell.below else y, cell.text, ha="center", va="center", fontweight=weight)
            axes.text(x, y + 0.24, cell.below, ha="center", va="center", fontsize=6.5)
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xticks(range(len(columns)), columns, rotation=25 if slanted else 0, ha="right" if slanted else "center")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    for label in axes.get_yticklabels():
        label.set_color(INK)
    axes.set_xlabel(x_label)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    return figure


def heatmap(name: str, title: str, rows: Sequence[tuple[str, Sequence[float | None]]]) -> Drawing:
    """Shares by row and draft position."""
    positions = [str(number) for number in range(1, 1 + max(len(values) for _, values in rows))]

    def cell(value: float | None) -> HeatCell | None:
        return None if value is None or math.isnan(value) else HeatCell(share_label(value), value)

    def draw() -> Figure:
        return heatmap_figure(
            positions, [(label, [cell(value) for value in values]) for label, values in rows], "draft position"
        )

    words = "; ".join(
        f"{label} " + " ".join("–" if v is None else share_label(v) for v in values) for label, values in rows
    )
    return Drawing(
        name, title, "share of rounds in which the drafts up to this one were accepted", f"{title}: {words}", draw
    )


def lines(
    name: str,
    title: str,
    note: str,
    x_label: str,
    series: Sequence[Line],
    reference: float | None = None,
    log: bool = False,
) -> Drawing:
    """Series with their intervals as bars; ``reference``: a line across, such as 1 for no gain."""

    def draw() -> Figure:
        figure, axes = canvas(height_in=2.5)
        if reference is not None:
            axes.axhline(reference, color=MUTED, linewidth=0.8)
        for number, line in enumerate(series):
            colour = ACCENT if line.main else PLAIN
            xs, ys = [point[0] for point in line.points], [point[1] for point in line.points]
            mark, dash = _MARKS[number % len(_MARKS)], _DASHES[number % len(_DASHES)]
            axes.plot(xs, ys, color=colour, markersize=5, marker=mark, linestyle=dash)
            for x, _, interval in line.points:
                if interval is not None:
                    axes.plot([x, x], interval, color=colour, linewidth=4, alpha=0.25, solid_capstyle="round")
        _x_axis(axes, sorted({point[0] for line in series for point in line.points}), log)
        axes.set_xlabel(x_label)
        _name_ends(axes, series)
        return figure

    words = "; ".join(f"{line.name} " + ", ".join(f"{x:g}: {y:.2f}" for x, y, _ in line.points) for line in series)
    return Drawing(name, title, note, f"{title}: {words}", draw)


def _name_ends(axes: Axes, series: Sequence[Line]) -> None:
    """Each line's name behind its last point, moved up as far as the name below it asks for."""
    points_a_pixel = 72.0 / axes.figure.dpi
    ends = [(line, line.points[-1][:2]) for line in series]
    heights = {line.name: float(axes.transData.transform(end)[1]) * points_a_pixel for line, end in ends}
    lowest = -math.inf
    for line, end in sorted(ends, key=lambda pair: heights[pair[0].name]):
        place = max(heights[line.name], lowest)
        lowest = place + _LABEL_POINTS
        axes.annotate(
            line.name,
            end,
            (6, place - heights[line.name]),
            textcoords="offset points",
            va="center",
            fontweight="bold" if line.main else "normal",
            color=INK if line.main else MUTED,
        )


def _x_axis(axes: Axes, values: Sequence[float], log: bool) -> None:
    if log:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks(values)
    axes.minorticks_off()
    # Room for the names at the right end.
    low, high = values[0], values[-1]
    axes.set_xlim(
        *((low / 1.15, high * (high / low) ** 0.45 * 1.3) if log else (low - 0.3, high + 0.45 * (high - low) + 0.7))
    )


def bars(name: str, title: str, note: str, x_label: str, rows: Sequence[tuple[str, float, bool]]) -> Drawing:
    """A bar a row (label, value, whether in the accent colour), its figure behind it."""

    def draw() -> Figure:
        figure, axes = canvas(height_in=0.7 + 0.34 * len(rows))
        for y, (_, value, main) in enumerate(rows):
            axes.barh(y, value, height=0.56, color=ACCENT if main else PLAIN)
            axes.annotate(f"{value:.2f}", (value, y), (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1.15 * max(value for _, value, _ in rows) or 1)
        axes.set_xlabel(x_label)
        axes.grid(visible=False, axis="y")
        return figure

    words = "; ".join(f"{label} {value:.2f}" for label, value, _ in rows)
    return Drawing(name, title, note, f"{title}, {x_label}: {words}", draw)


def stacked_rounds(name: str, title: str, rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str]) -> Drawing:
    """Milliseconds of a round by what takes them, told apart by hatching."""

    def draw() -> Figure:
        figure, axes = canvas(height_in=0.9 + 0.34 * len(rows))
        for y, (_, seconds) in enumerate(rows):
            left = 0.0
            for number, value in enumerate(seconds):
                axes.barh(
                    *(y, 1000 * value),
                    left=left,
                    height=0.56,
                    color=ACCENT if number == 0 else PLAIN,
                    alpha=1.0 if number < 2 else 0.45,
                    hatch=_HATCHES[number % len(_HATCHES)],
                    edgecolor=RULE,
                    linewidth=0.4,
                    label=parts[number] if y == 0 else None,
                )
                left += 1000 * value
            axes.annotate(f"{left:.0f}", (left, y), (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(rows)), [label for label, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1.15 * max(1000 * sum(seconds) for _, seconds in rows) or 1)
        axes.set_xlabel("milliseconds of a round")
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside upper left", ncols=len(parts), frameon=False)
        return figure

    words = "; ".join(
        f"{label} " + ", ".join(f"{part} {1000 * value:.1f}" for part, value in zip(parts, seconds, strict=True))
        for label, seconds in rows
    )
    return Drawing(name, title, ", ".join(parts), f"{title}, milliseconds: {words}", draw)
