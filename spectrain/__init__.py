"""spectrain: drafters for speculative decoding whose measured acceptance is the acceptance the server gives."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectrain.drafters.drafter_folder import load_drafter

__all__ = ["load_drafter"]
__version__ = "0.1.0"

# Threads that wait for their share of a matrix product sleep instead of spinning: on cores that something else uses as
# well, those who spin keep those who work from working (figures: eval/README.md). OpenMP reads it when torch is
# imported, so here is the place; children, vLLM's as well, inherit it. A value of the user's stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def __getattr__(name: str) -> Any:
    # Lazily, so that `spectrain --help` and configuration errors do not wait for torch.
    if name == "load_drafter":
        from spectrain.drafters.drafter_folder import load_drafter

        return load_drafter
    raise AttributeError(f"module 'spectrain' has no attribute {name!r}")
