"""Hidden states that nobody captured before: asked of whoever runs the target when a trainer wants a document.

``ComputedHiddenStates`` is a ``HiddenStateSource`` over documents whose tokens are known. What a document's hidden
states are, an ``Asker`` finds out (the target in this process, or vLLM's servers); what is worth keeping for the next
time a ``Keep`` keeps, in memory or on disk. A reader sees what it would see of a store: the same numbers, the same
order of documents, every value as it would have been stored (``StoreMeta.dtype``). So batches, losses and weights are
those of a store whose documents were computed alike.

A document that fails is asked for again, ``retries`` times. Then the training ends with its key: another document in
its place would make a batch that nobody asked for.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spectrain.data.hidden_states import StoreMeta, TargetStates
from spectrain.data.responses import Response
from spectrain.data.state_types import as_stored
from spectrain.errors import ConfigError, InputError, NotFiniteError, RunError

_FIRST_WAIT_S = 0.5


class Asker(Protocol):
    """Who can tell the hidden states of a document."""

    def expect(self, responses: Sequence[Response]) -> None:
        """These will be asked for soon, in this order: a hint, to begin with them."""
        ...

    def ask(self, response: Response) -> Iterable[TargetStates]:
        """The target's hidden states, in its own type, of ``response`` and of all that was computed together with it.
        Raises ``RunError`` where they cannot be had.
        """
        ...


class Keep(Protocol):
    """Hidden states that were computed before."""

    def get(self, response: Response) -> TargetStates | None:
        """As a store would give them; None: they are not here (any more)."""
        ...

    def has(self, response: Response) -> bool:
        """Whether ``get`` most likely gives something: costs nothing."""
        ...

    def put(self, states: TargetStates) -> None:
        """Keep what an ``Asker`` told."""
        ...


def as_read(states: TargetStates, meta: StoreMeta) -> TargetStates:
    """What a store of ``meta`` would give of ``states``: each value rounded to its type, and the last hidden state the
    tap that it is, where it is one.
    """
    read: Callable[[Tensor], Tensor] = partial(as_stored, dtype=meta.dtype)
    taps, last = read(states.taps), meta.last_hidden_tap
    nan = torch.full(states.input_ids.shape, torch.nan)
    return dataclasses.replace(
        states,
        taps=taps,
        last_hidden=read(states.last_hidden) if last is None else taps[:, last],
        log_normalizer=nan if states.log_normalizer is None else states.log_normalizer,
        target_kv={layer: (read(keys), read(values)) for layer, (keys, values) in states.target_kv.items()},
    )


class ComputedHiddenStates:
    """A ``HiddenStateSource`` over ``responses``, in the order of their keys, as a store of them has them.

    It is not for other processes: whoever runs the target is this one's.
    """

    def __init__(self, responses: Sequence[Response], asker: Asker, keep: Keep, meta: StoreMeta, retries: int) -> None:
        self._responses = sorted(responses, key=lambda response: response.key)
        self._asker = asker
        self._keep = keep
        self._retries = retries
        self.meta = meta
        self.keys = [response.key for response in self._responses]
        self.splits = [response.split for response in self._responses]
        self.lengths = np.array([len(response.input_ids) for response in self._responses], dtype=np.int64)
        self.loss_counts = np.array([int(response.loss_mask.sum()) for response in self._responses], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> TargetStates:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        response = self._responses[index]
        kept = self._keep.get(response)
        return self._asked(response) if kept is None else kept

    def as_stored(self, index: int) -> TargetStates:
        """``source[index]``: what was computed just now is in its own type."""
        return self[index]

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Ids and loss mask of a document [S], for which nothing is computed."""
        response = self._responses[index]
        return torch.from_numpy(response.input_ids), torch.from_numpy(response.loss_mask)

    def expect(self, documents: Sequence[int]) -> None:
        """A hint: ``source[number]`` of these comes soon, in this order."""
        asked = (self._responses[number] for number in documents)
        self._asker.expect([response for response in asked if not self._keep.has(response)])

    def _asked(self, response: Response) -> TargetStates:
        """Raises ``RunError`` with the document's key when it has failed to the end."""
        reason = ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(_FIRST_WAIT_S * 2 ** (attempt - 1))
            try:
                return self._asked_once(response)
            except (NotFiniteError, ConfigError, InputError) as error:
                raise RunError(f"hidden states of document {response.key}: {error}") from error  # no chance
            except (RunError, OSError, RuntimeError) as error:
                reason = str(error) or type(error).__name__
        times = "once" if self._retries == 0 else f"{self._retries + 1} times"
        raise RunError(f"hidden states of document {response.key} were asked for {times} (states.retries): {reason}")

    def _asked_once(self, response: Response) -> TargetStates:
        wanted: TargetStates | None = None
        with torch.no_grad():
            for states in self._asker.ask(response):
                self._keep.put(states)
                if states.key == response.key:
                    wanted = states
        if wanted is None:
            raise RunError("the target answered with other documents")
        ids, mask = torch.from_numpy(response.input_ids), torch.from_numpy(response.loss_mask)
        if not torch.equal(wanted.input_ids, ids) or not torch.equal(wanted.loss_mask, mask):
            raise RunError("the target answered with other tokens")
        return as_read(wanted, self.meta)


class KeptInMemory:
    """The newest documents, as a reader sees them, of at most ``budget_bytes``."""

    def __init__(self, meta: StoreMeta, budget_bytes: int) -> None:
        self._meta = meta
        self._budget = budget_bytes
        self._documents: OrderedDict[str, TargetStates] = OrderedDict()
        self._bytes = 0

    def get(self, response: Response) -> TargetStates | None:
        return self._documents.get(response.key)

    def has(self, response: Response) -> bool:
        return response.key in self._documents

    def put(self, states: TargetStates) -> None:
        read = as_read(states, self._meta)
        self._drop(read.key)
        self._documents[read.key] = read
        self._bytes += _bytes(read)
        while self._bytes > self._budget and self._documents:
            self._drop(next(iter(self._documents)))

    def _drop(self, key: str) -> None:
        states = self._documents.pop(key, None)
        if states is not None:
            self._bytes -= _bytes(states)


def _bytes(states: TargetStates) -> int:
    tensors = [states.input_ids, states.loss_mask, states.taps, states.last_hidden, states.log_normalizer]
    tensors += [x for pair in states.target_kv.values() for x in pair]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
