"""What a served target is asked and what it answers: token ids in, token ids out, never text.

A ``VLLMClient`` is a vLLM in a process of its own (``host.py``) or a pool of servers (``endpoints.py``). Whoever uses
one keeps it supplied: ``submit`` up to ``capacity`` requests, ``collect`` answers as they are finished, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Request:
    """One prompt to answer. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off.

    stop_ids: ids that end the answer, and belong to it. states: what the capture connector is to know of this document,
    or None if its states are not wanted.
    """

    id: str
    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    states: dict[str, Any] | None = None


@dataclass(frozen=True)
class ReportedRound:
    """One round of speculation as the server reports it. drafts: ids proposed, empty where only their number
    is known.
    """

    drafted: int
    accepted: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What came back. ids: generated ids, the end token included. finish_reason: "stop" or "length". rounds: of
    speculation, if any.
    """

    id: str
    ids: list[int]
    finish_reason: str
    seconds: float
    rounds: list[ReportedRound] = field(default_factory=list)
    states_path: str | None = None  # of the stock connector: the file that holds this request's states


class VLLMClient(Protocol):
    """A running target. ``RunError`` from any method quotes the last error lines of its log."""

    @property
    def capacity(self) -> int:
        """Requests that may be under way together without one waiting for long; falls when a part of the service is
        lost.
        """
        ...

    def submit(self, request: Request) -> None: ...

    def collect(self, timeout_s: float) -> list[Answer]:
        """Answers finished since the last call; waits for the first one at most so long. Raises RunError if the service
        has died.
        """
        ...

    def close(self) -> None:
        """Stop what was started. Safe to call twice."""
        ...
