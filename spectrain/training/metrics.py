"""``metrics.jsonl``: a line a step, a line an evaluation, one of the calibration; ``step`` is in all of them.

What an evaluation logs, and which lines of an interrupted training are made again when it goes on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spectrain.decoding.confidence import Calibration, error_per_position
from spectrain.files import append_line, check_guarded, plain, read_json_lines, write_atomically
from spectrain.training.simulated_acceptance import SimulatedAcceptance

_OF_EVALUATIONS = "simulation_s"


def append_metrics(path: Path, step: int, values: dict[str, Any]) -> None:
    """Add a line."""
    check_guarded(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, json.dumps(plain({"step": step, **values})))


def simulation_metrics(result: SimulatedAcceptance, seconds: float) -> dict[str, Any]:
    """What an evaluation logs."""
    return {
        "simulated_acceptance_length": result.stats.acceptance_length,
        "simulated_interval": result.stats.interval,
        "simulated_acceptance_per_position": list(result.stats.acceptance_per_position),
        "simulated_rounds": result.stats.rounds,
        "simulated_acceptance_length_by_n": {str(n): length for n, length in enumerate(result.length_by_n, start=1)},
        _OF_EVALUATIONS: seconds,
        **(
            {}
            if result.confidence is None
            else {"confidence_error": error_per_position(result.confidence, Calibration())}
        ),
    }


def keep_metrics_up_to(path: Path, step: int, evaluated: bool) -> None:
    """Drop lines of what will run again after a resume (later steps, the evaluation after this one unless it was made,
    the calibration), and a last line that a kill cut short.
    """
    if not path.exists():
        return
    kept = []
    for entry in read_json_lines(path):
        if not isinstance(entry.get("step"), int):
            continue
        again = entry["step"] == step and not evaluated and _OF_EVALUATIONS in entry
        if entry["step"] <= step and "confidence_temperatures" not in entry and not again:
            kept.append(entry)
    write_atomically(path, "".join(json.dumps(entry) + "\n" for entry in kept))
