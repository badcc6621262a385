"""The figures of the report, as SVG that takes its colours and its type from the page around it.

matplotlib draws with placeholder colours, which become CSS variables afterwards: one drawing serves the light page, the
dark page and paper. Text stays text, so it can be searched and read aloud. Figures are drawn small and scaled up, so
that they stay legible on a phone.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from spectrain.evaluation.records import Interval

# Colours of a figure that has no page around it: they can be read on white and on black.
_ALONE = {"--ink": "#5b6570", "--muted": "#77828c", "--rule": "#aab2b9", "--accent": "#0b8f6c", "--plain": "#98a2ab"}
# Placeholder colours and the page's variables behind them (see the template's style sheet).
INK, MUTED, RULE, ACCENT, PLAIN = "#010101", "#020202", "#030303", "#040404", "#050505"
_VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", ACCENT: "--accent", PLAIN: "--plain"}

_WIDTH_IN, _ROW_IN = 4.2, 0.34
STYLE = {
    "font.size": 8.5,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Series:
    """One method's figures. ``main``: drawn in the accent colour, the others in grey."""

    name: str
    values: Sequence[float | None]
    main: bool


@dataclass(frozen=True)
class Measured:
    """One method's single figure with its interval."""

    name: str
    value: float
    interval: Interval | None
    main: bool


def interval_figure(rows: Sequence[Measured], reference: float) -> Markup:
    """A dot with its interval per method, from ``reference`` (what decoding without speculation gives) on."""
    with mpl.rc_context(STYLE):
        figure, axes = canvas(height_in=0.5 + _ROW_IN * len(rows))
        for y, row in enumerate(rows):
            colour = ACCENT if row.main else PLAIN
            low, high = row.interval or (row.value, row.value)
            axes.plot([low, high], [y, y], color=colour, linewidth=5, alpha=0.3, solid_capstyle="round")
            axes.plot(row.value, y, "o", color=colour, markersize=6)
            axes.annotate(
                f"{row.value:.2f}",
                (max(high, row.value), y),
                (7, 0),
                textcoords="offset points",
                va="center",
                fontweight=_weight(row),
            )
        right = max(max(row.value, *(row.interval or (row.value,))) for row in rows)
        axes.set_xlim(reference - 0.04 * (right - reference + 0.1), right + 0.16 * (right - reference + 0.1))
        axes.axvline(reference, color=MUTED, linewidth=0.8)
        _name_rows(axes, rows)
        axes.grid(axis="x")
        return page_svg(figure, "Acceptance length by method: " + _spoken(rows))


def bar_figure(rows: Sequence[Measured], unit: str) -> Markup:
    """A horizontal bar per method, from zero."""
    with mpl.rc_context(STYLE):
        figure, axes = canvas(height_in=0.3 + _ROW_IN * len(rows))
        for y, row in enumerate(rows):
            axes.barh(y, row.value, height=0.56, color=ACCENT if row.main else PLAIN)
            axes.annotate(
                f"{row.value:,.1f}",
                (row.value, y),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontweight=_weight(row),
            )
        axes.set_xlim(0, 1.18 * max(row.value for row in rows) or 1)
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)
        _name_rows(axes, rows)
        return page_svg(figure, f"Throughput in {unit}: " + _spoken(rows))


def survival_figure(series: Sequence[Series]) -> Markup:
    """Bars per draft position: the share of rounds in which the drafts were accepted up to and with this one."""
    with mpl.rc_context(STYLE):
        figure, axes = canvas(height_in=2.3)
        width = 0.78 / len(series)
        for index, one in enumerate(series):
            offset = (index - (len(series) - 1) / 2) * width
            for position, share in enumerate(one.values, start=1):
                if share is None:
                    continue
                axes.bar(position + offset, share, width=width * 0.9, color=ACCENT if one.main else PLAIN)
                if one.main:
                    axes.annotate(
                        share_label(share),
                        (position + offset, share),
                        (0, 3),
                        textcoords="offset points",
                        ha="center",
                        fontweight="bold",
                    )
        _position_axes(axes, series)
        return page_svg(
            figure, "Share of rounds in which the drafts were accepted, by position: " + _spoken_series(series)
        )


def conditional_figure(series: Sequence[Series]) -> Markup:
    """A line per method: the share of drafts accepted at each position, given that all before them were."""
    with mpl.rc_context(STYLE):
        figure, axes = canvas(height_in=2.3)
        for one in sorted(series, key=lambda one: one.main):
            positions = range(1, len(one.values) + 1)
            values = [math.nan if share is None else share for share in one.values]
            axes.plot(positions, values, "o-", color=ACCENT if one.main else PLAIN, markersize=5)
            for position, share in zip(positions, values, strict=True):
                if one.main and not math.isnan(share):
                    axes.annotate(
                        share_label(share),
                        (position, share),
                        (0, 6),
                        textcoords="offset points",
                        ha="center",
                        fontweight="bold",
                    )
        _position_axes(axes, series)
        return page_svg(figure, "Conditional acceptance by position: " + _spoken_series(series))


def loss_figure(steps: Sequence[float], losses: Sequence[float]) -> Markup:
    """The training loss, each step faintly and a running mean over a thirtieth of the run."""
    with mpl.rc_context(STYLE):
        figure, axes = canvas(height_in=2.3)
        half = max(1, len(losses) // 60)
        windows = [losses[max(0, i - half) : i + half + 1] for i in range(len(losses))]
        means = [sum(window) / len(window) for window in windows]
        axes.plot(steps, losses, color=PLAIN, linewidth=0.8, alpha=0.7)
        axes.plot(steps, means, color=ACCENT)
        axes.annotate(
            f"{means[-1]:.2f}",
            (steps[-1], means[-1]),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
        )
        _step_axis(axes)
        return page_svg(figure, f"Training loss over {steps[-1]:,.0f} steps, from {means[0]:.3g} to {means[-1]:.3g}")


def simulated_acceptance_figure(
    steps: Sequence[float], lengths: Sequence[float], intervals: Sequence[Interval | None]
) -> Markup:
    """Simulated acceptance length over the training steps: its interval as a band, the best evaluation marked."""
    with mpl.rc_context(STYLE):
        figure, axes = canvas(height_in=2.3)
        lows = [
            length if interval is None else interval[0] for length, interval in zip(lengths, intervals, strict=True)
        ]
        highs = [
            length if interval is None else interval[1] for length, interval in zip(lengths, intervals, strict=True)
        ]
        axes.fill_between(steps, lows, highs, color=ACCENT, alpha=0.16, linewidth=0)
        axes.plot(steps, lengths, "o-", color=ACCENT, markersize=3)
        best = max(range(len(lengths)), key=lengths.__getitem__)
        axes.plot(steps[best], lengths[best], "o", color=ACCENT, markersize=7)
        label = f"{lengths[best]:.2f}"
        axes.annotate(
            label, (steps[best], lengths[best]), (0, 8), textcoords="offset points", ha="center", fontweight="bold"
        )
        axes.margins(y=0.2)
        _step_axis(axes)
        return page_svg(figure, f"Simulated acceptance length over the steps; best {label} at step {steps[best]:,.0f}")


def draft_length_figure(by_n: Sequence[tuple[int, float]]) -> Markup:
    """Simulated acceptance length by the number of draft tokens of a round."""
    with mpl.rc_context(STYLE):
        figure, axes = canvas(height_in=2.3)
        counts, lengths = zip(*by_n, strict=True)
        axes.plot(counts, lengths, "o-", color=ACCENT, markersize=5)
        for count, length in by_n:
            axes.annotate(
                f"{length:.2f}", (count, length), (0, 6), textcoords="offset points", ha="center", fontweight="bold"
            )
        axes.set_xticks(counts)
        axes.set_xlabel("draft tokens per round")
        axes.margins(x=0.08, y=0.2)
        return page_svg(
            figure,
            "Simulated acceptance length by draft tokens: " + ", ".join(f"{n}: {length:.2f}" for n, length in by_n),
        )


def reliability_figure(
    calibrated: Sequence[tuple[float, float, int]], raw: Sequence[tuple[float, float, int]]
) -> Markup:
    """Predicted chance against the share that came true, one dot a bin, its area by the number of predictions; right is
    on the diagonal.
    """
    with mpl.rc_context(STYLE):
        figure, axes = canvas(height_in=3.0)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
        for bins, colour, width in ((raw, PLAIN, 1.0), (calibrated, ACCENT, 1.6)):
            if not bins:
                continue
            most = max(count for _, _, count in bins)
            predicted, happened, _ = zip(*bins, strict=True)
            axes.plot(predicted, happened, color=colour, linewidth=width)
            axes.scatter(predicted, happened, s=[8 + 72 * count / most for _, _, count in bins], color=colour)
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.03, 1.03)
        axes.set_aspect("equal")
        ticks = [0, 0.25, 0.5, 0.75, 1]
        axes.set_xticks(ticks, ["0", ".25", ".5", ".75", "1"])
        axes.set_yticks(ticks, ["0", ".25", ".5", ".75", "1"])
        axes.set_xlabel("predicted chance of being accepted")
        words = ", ".join(
            f"{share_label(predicted)} came true {share_label(happened)}" for predicted, happened, _ in calibrated
        )
        return page_svg(figure, f"Predicted survival and the share that was accepted: {words}")


def cost_figure(points: Sequence[tuple[int, float]], label: str) -> Markup:
    """Steps a second by the number of tokens in the target's pass."""
    with mpl.rc_context(STYLE):
        figure, axes = canvas(height_in=2.3)
        tokens, rates = zip(*points, strict=True)
        axes.plot(tokens, rates, "o-", color=ACCENT, markersize=4)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(0, 1.1 * max(rates))
        axes.set_xlabel("tokens in the target's pass")
        return page_svg(
            figure, f"Steps per second, {label}: " + ", ".join(f"{count}: {rate:.1f}" for count, rate in points)
        )


def canvas(height_in: float) -> tuple[Figure, Axes]:
    """A figure of the page's width and its axes."""
    # A Figure of our own, not pyplot's: no global state and no display.
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    return figure, figure.subplots()


def _name_rows(axes: Axes, rows: Sequence[Measured]) -> None:
    axes.set_yticks(range(len(rows)), [_wrap(row.name) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set(color=INK, fontweight=_weight(row))


def _position_axes(axes: Axes, series: Sequence[Series]) -> None:
    most = max(len(one.values) for one in series)
    axes.set_xticks(range(1, most + 1))
    axes.set_xlim(0.45, most + 0.55)
    axes.set_ylim(0, 1.06)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
    axes.set_xlabel("draft position")


def _step_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.margins(x=0.06)
    axes.set_xlabel("optimiser step")


def _wrap(name: str) -> str:
    """Details of a name (``EAGLE-3 drafter, n = 3``) go to a second line."""
    return name.replace(", ", "\n", 1)


def _weight(row: Measured) -> str:
    return "bold" if row.main else "normal"


def share_label(share: float) -> str:
    """``.48``, as drawn."""
    return f"{share:.2f}".removeprefix("0")


def _spoken(rows: Sequence[Measured]) -> str:
    return ", ".join(f"{row.name} {row.value:.2f}" for row in rows)


def _spoken_series(series: Sequence[Series]) -> str:
    return "; ".join(
        f"{one.name} " + " ".join("–" if v is None else share_label(v) for v in one.values) for one in series
    )


def standalone(figure: str) -> str:
    """A figure as a file of its own, which a page shows as a picture."""
    for variable, colour in _ALONE.items():
        figure = figure.replace(f"var({variable})", colour)
    style = ' xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"'
    return str(figure).replace("<svg", f"<svg{style}", 1) + "\n"


def page_svg(figure: Figure, description: str) -> Markup:
    """The figure as an SVG element for the inside of a page: sizeless, described, and without identifiers, dates or
    addresses.
    """
    buffer = io.StringIO()
    # The salt keeps identifiers of different figures apart, and those of the same figure equal from run to run.
    with mpl.rc_context({"svg.hashsalt": description}):
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>|<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (xmlns|xmlns:xlink|version)="[^"]*"', "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1))
