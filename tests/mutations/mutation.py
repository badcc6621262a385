"""What a mutation is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """``old`` must occur exactly once in ``file`` and becomes ``new``. ``tests``: files or single tests, one of which
    should fail then.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
