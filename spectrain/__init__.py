"""spectrain: drafters for speculative decoding whose measured acceptance is the acceptance the server gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectrain.drafters.drafter_folder import load_drafter

__all__ = ["load_drafter"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazily, so that `spectrain --help` and configuration errors do not wait for torch.
    if name == "load_drafter":
        from spectrain.drafters.drafter_folder import load_drafter

        return load_drafter
    raise AttributeError(f"module 'spectrain' has no attribute {name!r}")
