"""What vLLM is asked and what comes back: token ids in, token ids out, never text.

A ``VLLMClient`` is a vLLM in a child process (``process.py``) or a pool of servers (``servers.py``). Whoever has
requests hands them to ``completions``, the one place that keeps a client supplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from spectrain import signals
from spectrain.decoding.acceptance import Round
from spectrain.errors import RunError

_WAIT_S = 1.0


@dataclass(frozen=True)
class Request:
    """One prompt to complete. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off.

    stop_ids: ids that end the completion, and belong to it. states: what the capture connector is to know of this
    document, or None if its hidden states are not wanted.
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
    """One round of speculation as vLLM reports it. drafts: ids proposed, empty where only their number is known."""

    drafted: int
    accepted: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """What came back. ids: generated ids, the end token included. finish_reason: "stop" or "length". rounds: of
    speculation, if any.
    """

    id: str  # of the request
    ids: list[int]
    finish_reason: str
    seconds: float
    rounds: list[ReportedRound] = field(default_factory=list)
    states_path: str | None = None  # of the stock connector: the file that holds this request's hidden states


class VLLMClient(Protocol):
    """A target that vLLM runs; as a context manager, it is closed at the end. ``RunError`` from any method quotes the
    last error lines of its log.
    """

    @property
    def capacity(self) -> int:
        """Requests that may be under way together without one waiting for long; falls when a server is given up on."""
        ...

    def submit(self, request: Request) -> None: ...

    def collect(self, timeout_s: float) -> list[Completion]:
        """What was finished since the last call; waits for the first one at most so long. Raises RunError if vLLM is
        dead.
        """
        ...

    def close(self) -> None:
        """Stop what was started. Safe to call twice."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# Opens a vLLM for a purpose (a word, for the name of its log) with further engine arguments.
OpenVLLM = Callable[[str, Mapping[str, Any]], AbstractContextManager[VLLMClient]]


# --- requests in, completions out ----------------------------------------------------------------------------------


def completions(client: VLLMClient, requests: Iterable[Request | None]) -> Iterator[Completion]:
    """Keep ``client`` supplied up to its capacity, and hand out completions as they come, in any order.

    A request is taken from ``requests`` only when it can be sent, so they may depend on completions handed out before:
    None means that there is none at the moment, and is asked for again after the next completion. The end is reached
    when there is none and nothing is under way.
    """
    source, under_way = iter(requests), 0
    while True:
        while under_way < client.capacity and (request := next(source, None)) is not None:
            client.submit(request)
            under_way += 1
        if under_way == 0:
            return
        found = client.collect(_WAIT_S)
        with signals.held():  # what has come reaches whoever keeps it
            for completion in found:
                under_way -= 1
                yield completion


def completions_in_order(
    client: VLLMClient, requests: Sequence[Request], on_completion: Callable[[Completion], None] | None = None
) -> list[Completion]:
    """The completions of all requests, in their order. ``on_completion`` hears of each as it comes."""
    found = {}
    for completion in completions(client, requests):
        found[completion.id] = completion
        if on_completion is not None:
            on_completion(completion)
    return [found[request.id] for request in requests]


# --- rounds of speculation -----------------------------------------------------------------------------------------


def placed_rounds(prompt_length: int, completion: Completion) -> list[Round]:
    """The rounds of a completion in the terms of our own loop: as it would have reported them for the same text.

    vLLM counts every draft that its target accepted, also those that no longer fit into the completion; here a draft
    counts as accepted only if it became text. vLLM reports no round for a token decoded without drafts (n-gram lookup
    without a match, no room left for drafts): such rounds are added in front, since their positions are not known, so
    that tokens per pass of the target stays what it is.

    Raises RunError if the rounds hold more than the text.
    """
    tokens = len(completion.ids)
    reported = sum(min(round_.accepted, round_.drafted) + 1 for round_ in completion.rounds)
    silent = max(0, tokens - 1 - reported)  # the prefill made the first token
    rounds = [Round(anchor=prompt_length + i, drafted=0, accepted=0) for i in range(silent)]
    made = 1 + silent
    for round_ in completion.rounds:
        kept = min(round_.accepted + 1, tokens - made)
        if kept < 1:
            raise RunError(
                f"vLLM reports {len(completion.rounds)} rounds with {reported} tokens for a completion of {tokens}: no "
                f"such text"
            )
        accepted = min(kept, round_.accepted)
        cut = completion.finish_reason == "length" and made + kept == tokens and kept == accepted < round_.drafted
        rounds.append(Round(prompt_length + made - 1, round_.drafted, accepted, cut, round_.drafts))
        made += kept
    return rounds
