"""What a mutation is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """``old`` must occur exactly once in ``file`` and becomes ``new``. ``tests``: what should fail then, files or single
    tests.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
