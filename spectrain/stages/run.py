"""Stage ``run``: the whole pipeline. Stages whose inputs have not changed are skipped and say so."""

from __future__ import annotations

from spectrain.stages.context import Context
from spectrain.stages.eval import evaluate
from spectrain.stages.fit import fit


def run(context: Context) -> float | None:
    """Generate, capture, fit and evaluate. Returns the acceptance length that the loop measured."""
    fit(context)  # brings responses and hidden states up to date first
    return context.ranks.from_first(lambda: evaluate(context))
