"""The target beside the drafter: hidden states computed when a trainer asks for a document.

The last bits of a hidden state depend on what is computed together. So a document is computed in the batch in which
``capture`` would compute it (``hf.capture_batches``), and all of the batch is handed out: what a trainer gets is what a
store would have held, bit for bit. What comes along with a document is wasted unless it is kept; with
``engine.capture_tokens=1`` each document is a batch by itself, and nothing comes along.

What captures, and checks its first batch, is what ``capture`` uses, too (``hf.BatchCapture``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch

from spectrain.data.hidden_states import TargetStates
from spectrain.data.responses import Response
from spectrain.engines.hf import BatchCapture, capture_batches
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel
from spectrain.target.resolve import ResolvedTarget


class InProcessStates:
    """``Asker`` that runs the target here. ``responses``: all documents that may be asked for, from which the batches
    are made.
    """

    def __init__(
        self,
        target: TargetModel,
        resolved: ResolvedTarget,
        responses: Sequence[Response],
        tap_ids: tuple[int, ...],
        kv_layers: tuple[int, ...],
        batch_tokens: int,
        states_dtype: str,
    ) -> None:
        self._target = target
        self._resolved = resolved
        self._asked = (tap_ids, kv_layers, states_dtype)
        self._batches = list(capture_batches(target, responses, batch_tokens))
        self._batch_of = {response.key: number for number, batch in enumerate(self._batches) for response in batch}

    def expect(self, responses: Sequence[Response]) -> None:
        """Nothing can begin before it is asked for: the device is the trainer's."""

    def ask(self, response: Response) -> Iterable[TargetStates]:
        return self._capture(self._batches[self._batch_of[response.key]])

    @cached_property
    def _capture(self) -> BatchCapture:
        # As in capture: the log-normalizer must be that of the logits the trainer will compute.
        target = self._target
        head = TargetHead.from_checkpoint(self._resolved.folder, torch.float32, target.device, target.has_own_code)
        return BatchCapture(self._target, head, *self._asked)
