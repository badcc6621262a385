"""Typed configuration of ``convert``: which layout a drafter's folder is written in, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spectrain.config.keys import Section, key


@dataclass(frozen=True)
class ConvertConfig(Section, name="convert"):
    """A drafter's folder in the layout of another project. It is read from ``drafter.path``."""

    to: Literal["speculators", "zlab", "deepspec", "eagle"] | None = key(
        None,
        "layout to write: speculators (vLLM's, what fit writes), zlab (DFlash, DFlash2), deepspec (DSpark), eagle "
        "(EAGLE-3 of EAGLE, SpecForge and SGLang); null: none is chosen",
    )
    out: str = key("", "folder to write; it must not be there yet", example="drafter-eagle")
    max_shard_bytes: int | None = key(
        None,
        "weights of more bytes are written as several files with an index; null: one file",
        at_least=1,
        at_most=1 << 40,
        example="5000000000",
    )
