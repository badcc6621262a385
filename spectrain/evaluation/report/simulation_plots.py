"""The figures of a simulation: acceptance length by number of drafts, by place in the answer and by length of context,
and acceptance by kind of text, or language, and position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from spectrain.evaluation.report.sweep_plots import Drawing, Line, heatmap, lines
from spectrain.evaluation.simulation_tables import Figures

_AXES = {
    "place in the answer": ("place", "Acceptance length by place in the answer", "tokens of the answer before"),
    "context": ("context", "Acceptance length by length of context", "tokens of context"),
}


def simulation_drawings(
    method: str, whole: Figures, parts: Mapping[str, Sequence[Figures]], by_n: Sequence[float]
) -> Iterator[Drawing]:
    """Figures of one drafter; those that would have a single point are left out."""
    lengths = [(n, length, None) for n, length in enumerate(by_n, start=1) if math.isfinite(length)]
    if len(lengths) > 1:
        title = "Acceptance length by number of drafts"
        yield lines(f"{method}-drafts", title, "simulated", "drafts a round", [Line(method, lengths, True)])
    for part, (name, title, axis) in _AXES.items():
        points = [
            # On a logarithmic axis the first range, which begins at 0, is drawn where half of its end is.
            (float(line.first or max(1, (parts[part][1].first or 2) // 2)), line.acceptance_length, line.interval)
            for line in parts[part]
            if line.acceptance_length is not None and line.first is not None and len(parts[part]) > 1
        ]
        if len(points) > 1:
            note = "simulated, with 95 % interval; each point begins a range"
            yield lines(
                f"{method}-{name}", title, note, axis, [Line(method, points, True)], whole.acceptance_length, True
            )
    for part, name, kind in (("domain", "domains", "kind of text"), ("language", "languages", "language")):
        rows = [(line.name, line.acceptance_per_position) for line in parts.get(part, ())]
        if len(rows) > 1:
            yield heatmap(f"{method}-{name}", f"Acceptance by {kind} and position, {method}", rows)
