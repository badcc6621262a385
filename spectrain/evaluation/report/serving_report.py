"""What servers' clients saw, for a person: a table in the terminal, rows and figures of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table

from spectrain.evaluation.records import EvaluationRecord
from spectrain.evaluation.report.sweep_plots import Drawing, Line, lines
from spectrain.evaluation.report.tables import MISSING, interval_text, measured_label, number
from spectrain.evaluation.serving_figures import ServingFigures, Spread

# Of the terminal, which is narrow: the page has ITL, too.
_COLUMNS = ("load", "method", "tokens/s", "speed-up", "TTFT ms", "TPOT ms", "good/s")


def serving_rows(records: Sequence[EvaluationRecord]) -> Iterator[dict[str, Any]]:
    """By load, then by method. Waits are median and 99th percentile, in milliseconds."""
    for record in records:
        figures = record.serving
        if figures is None:
            continue
        drafts = f", n = {record.num_speculative_tokens}" if record.num_speculative_tokens else ""
        yield {
            "load": load_text(record),
            "method": f"{measured_label(record.method)}{drafts}",
            "main": record.is_drafter,
            "tokens_per_s": number(record.output_tokens_per_s, digits=1),
            "speedup": number(record.speedup, "×"),
            "speedup_interval": interval_text(record.speedup_interval),
            "ttft": _milliseconds(figures.ttft_s),
            "tpot": _milliseconds(figures.tpot_s),
            "itl": _milliseconds(figures.itl_s),
            "goodput": number(figures.goodput_requests_per_s),
            "requests": f"{figures.requests}",
        }


def load_text(record: EvaluationRecord) -> str:
    """``8 at a time``, or ``0.5 a second``."""
    if record.request_rate is None:
        return f"{record.concurrency} at a time"
    return f"{record.request_rate:g} a second"


def limits_text(records: Sequence[EvaluationRecord]) -> str:
    """What makes an answer good, in words; empty where nothing does."""
    figures = next((record.serving for record in records if record.serving is not None), None)
    if figures is None:
        return ""
    parts = (
        ("the first token within", figures.limit_ttft_s),
        ("each further one within", figures.limit_tpot_s),
        ("all of it within", figures.limit_latency_s),
    )
    return ", ".join(f"{words} {limit:g} s" for words, limit in parts if limit is not None)


def serving_table(records: Sequence[EvaluationRecord]) -> Table:
    """For the terminal."""
    limits = limits_text(records)
    shown = _COLUMNS if limits else _COLUMNS[:-1]
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption=f"Waits: median and 99th percentile.{f' Good: {limits}.' if limits else ''}",
        caption_justify="left",
    )
    for name in shown:
        table.add_column(name, justify="left" if name in ("load", "method") else "right", overflow="fold")
    for row in serving_rows(records):
        interval = f"\n({row['speedup_interval']})" if row["speedup_interval"] else ""
        cells = (row["load"], row["method"], row["tokens_per_s"], row["speedup"] + interval, row["ttft"], row["tpot"])
        table.add_row(*cells, *([row["goodput"]] if limits else []), style="bold" if row["main"] else "")
    return table


def _milliseconds(spread: Spread | None) -> str:
    return MISSING if spread is None else f"{1000 * spread.p50:,.0f} / {1000 * spread.p99:,.0f}"


def serving_drawings(records: Sequence[EvaluationRecord]) -> list[Drawing]:
    """Throughput and waits against concurrency, and against the rate of requests, where there are several."""
    served = [record for record in records if record.serving is not None]
    groups = (
        ("concurrency", "requests at a time", [r for r in served if r.request_rate is None]),
        ("rate", "requests a second", [r for r in served if r.request_rate is not None]),
    )
    figures: list[Drawing] = []
    for name, axis, group in groups:
        loads = {_load(record) for record in group}
        if len(loads) < 2:
            continue
        figures.append(
            _drawing(
                f"tokens-{name}",
                "Throughput",
                "output tokens a second",
                axis,
                group,
                lambda r, f: r.output_tokens_per_s,
            )
        )
        figures.append(
            _drawing(f"ttft-{name}", "Time to the first token", "milliseconds, median", axis, group, _median("ttft_s"))
        )
        figures.append(
            _drawing(
                f"tpot-{name}", "Time for each further token", "milliseconds, median", axis, group, _median("tpot_s")
            )
        )
        if all(r.serving and r.serving.goodput_requests_per_s is not None for r in group):
            figures.append(_drawing(f"goodput-{name}", "Goodput", "good answers a second", axis, group, _goodput))
    return figures


Value = Callable[[EvaluationRecord, ServingFigures], float | None]


def _median(field: str) -> Value:
    def value(record: EvaluationRecord, figures: ServingFigures) -> float | None:
        spread = getattr(figures, field)
        return None if spread is None else 1000 * spread.p50

    return value


def _goodput(record: EvaluationRecord, figures: ServingFigures) -> float | None:
    return figures.goodput_requests_per_s


def _load(record: EvaluationRecord) -> float:
    return float(record.concurrency if record.request_rate is None else record.request_rate)


def _drawing(name: str, title: str, note: str, axis: str, records: Sequence[EvaluationRecord], value: Value) -> Drawing:
    series = []
    for method in dict.fromkeys(record.method for record in records):
        points = [
            (_load(record), found, None)
            for record in records
            if record.method == method and record.serving and (found := value(record, record.serving)) is not None
        ]
        if points:
            series.append(
                Line(measured_label(method), sorted(points), any(r.is_drafter for r in records if r.method == method))
            )
    return lines(f"serving-{name}", f"{title}, served", note, axis, series, log=True)
