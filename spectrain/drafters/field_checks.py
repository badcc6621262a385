"""What the fields of a drafter's description must satisfy. A drafter's shape is checked where it is made, so that
nobody computes with one that makes no sense, whoever wrote it.

Each raises ValueError that names the field as a drafter's ``config.json`` does, and says what it must be.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectrain.drafters.drafter import DrafterShape


def whole(value: Any, name: str, least: int = 1) -> int:
    """A whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, it must be a whole number of at least {least}")
    return value


def positive(value: Any, name: str) -> float:
    """A finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} is {value!r}, it must be a positive number")
    return float(value)


def flag(value: Any, name: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, it must be true or false")
    return value


def check_sizes(shape: DrafterShape, num_layers: int) -> None:
    """Taps, layers and vocabularies of a drafter that reads taps."""
    whole(num_layers, "num_hidden_layers")
    whole(shape.target_vocab_size, "vocab_size")
    if whole(shape.draft_vocab_size, "draft_vocab_size") > shape.target_vocab_size:
        raise ValueError(
            f"draft_vocab_size is {shape.draft_vocab_size}, more than the target's {shape.target_vocab_size}"
        )
    taps = [whole(tap, "a layer that is read", least=0) for tap in shape.taps]
    if not taps or taps != sorted(set(taps)):
        raise ValueError(f"the layers that are read are {taps}, there must be some, and they must ascend")


def check_token(value: Any, name: str, vocab_size: int) -> None:
    """A token of the target's vocabulary."""
    if whole(value, name, least=0) >= vocab_size:
        raise ValueError(f"{name} is {value}, outside the target's vocabulary of {vocab_size}")
