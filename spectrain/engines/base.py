"""What runs the target for the stages ``generate`` and ``capture``.

An engine yields each result when it is done, in whatever order suits it: responses and hidden states are known by
their keys, so the order in which they are finished never matters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from spectrain.data.hidden_states import TargetStates
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling


class Engine(Protocol):
    """Who runs the target."""

    @property
    def stored_together(self) -> int:
        """Conversations that share batches, in the order in which they are asked; the last ones may be fewer.

        The last bits of a logit depend on the batch, and a drawn token sometimes on them. Stored together, such a group
        is whole or missing after a kill, and is answered in the same batches again. 1: batches are not the engine's to
        choose, so answers that are drawn again are equal in distribution only.
        """
        ...

    def response_key(self, conversation: Conversation, sampling: Sampling) -> str:
        """The key of the response that ``generate`` would give; known beforehand, so that finished ones need not be
        asked for again.
        """
        ...

    def generate(
        self,
        conversations: Sequence[tuple[Conversation, str]],
        sampling: Sampling,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[Response]:
        """Answer conversations, each given with its split. Those that have answers already are rendered, not generated.

        A conversation may give several documents; the last one yielded of each has the conversation's key. What it is
        answered depends on its prompt and ``sampling`` alone, but for rounding, see ``stored_together``.
        Prompts are checked before the first token is generated; ``InputError`` names one that leaves no room.
        ``on_tokens`` hears of new tokens as they come.
        """
        ...

    def capture(
        self,
        responses: Sequence[Response],
        tap_ids: Sequence[int],
        states_dtype: str = "float32",
        stored: Collection[str] = (),
        kv_layers: Sequence[int] = (),
    ) -> Iterator[TargetStates]:
        """The target's hidden states over responses: taps, last hidden state, log-normalizer, and keys and values of
        the layers ``kv_layers``, one document at a time.

        They have the target's own type. ``states_dtype`` is what they will be stored as, for the log-normalizer must
        belong to the hidden states as they will be read. ``stored``: keys of responses that are left out, because they
        were captured before; an engine that decides itself what runs together runs the others as it would have run them
        then. Raises ``RunError`` before the first document if they are not
        the target's.
        """
        ...
