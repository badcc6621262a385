"""Typed configuration of what a drafter's folder holds."""

from __future__ import annotations

from dataclasses import dataclass

from spectrain.config.keys import Section, key


@dataclass(frozen=True)
class ExportConfig(Section, name="export"):
    """What ``fit`` writes beside the weights."""

    stitch: bool = key(
        False,
        "a tuned head's folder (mtp) holds copies of the target's files instead of links to them, so that it can be "
        "moved anywhere; costs the target's size on disk",
    )
