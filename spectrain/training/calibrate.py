"""Calibration of a finished drafter's confidence head, on all held-out documents: once, with the weights that will be
used.

Evaluations during training simulate a few documents; temperatures fitted on so few would be worse than none on the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spectrain.config.evaluation_schema import DecodingConfig
from spectrain.console import ProgressBar
from spectrain.data.hidden_states import HiddenStateSource
from spectrain.decoding.confidence import Calibration, error_per_position, fit_calibration
from spectrain.drafters.drafter_folder import add_metadata, load_drafter
from spectrain.target.head import TargetHead
from spectrain.training.served_drafter import SIXTEEN_BITS
from spectrain.training.simulated_acceptance import simulate_heldout


def calibrate_folder(
    folder: Path,
    head: TargetHead,
    device: torch.device,
    dtype: torch.dtype,
    source: HiddenStateSource,
    documents: Sequence[int],
    decoding: DecodingConfig,
    eos_ids: Sequence[int],
    packed_length: int,
) -> dict[str, Any]:
    """Fit one temperature a draft slot of a drafter with a confidence head, served in ``dtype``, write them into its
    folder and return what to log.
    """
    drafter = load_drafter(folder).attach(head).to(device, dtype if dtype in SIXTEEN_BITS else None)
    with ProgressBar("calibrate", total=len(documents), unit="documents") as bar:
        said = simulate_heldout(
            drafter, source, documents, decoding, eos_ids, packed_length, advance=bar.advance
        ).confidence
    if said is None:
        return {}
    fitted = fit_calibration(said)
    add_metadata(folder, {"confidence_temperatures": list(fitted.temperatures)})
    return {
        "confidence_documents": len(documents),
        "confidence_error": error_per_position(said, Calibration()),
        "confidence_error_calibrated": error_per_position(said, fitted),
        "confidence_temperatures": list(fitted.temperatures),
    }
