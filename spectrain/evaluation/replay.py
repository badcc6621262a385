"""Replay of a finished text: what a drafter proposes, and what the target predicts, at any position of it.

One pass of the target over prompt and answer gives every tap and every prediction along the text, so a drafter can be
shown exactly what vLLM showed its own, round by round, without decoding again. That is how rounds are compared after
two texts parted at a tie, how close two tokens were is looked up, and how a misreading of a drafter's folder is tried
out.

Legend: S tokens of the text, A taps, H hidden, V vocabulary of the target, n drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from spectrain.decoding.proposers import Observation, read_hidden
from spectrain.decoding.sampling import GREEDY, SamplingParams
from spectrain.drafters.drafter import Drafter
from spectrain.target.model import TargetModel, TargetOutput

# Drafts drawn so cold are argmax, unless two tokens tie within rounding; the distribution that comes with them holds
# the logits, divided by it.
_COLD = SamplingParams(temperature=1e-3)
# Draws, until the drafts before a slot are the wanted ones: one is enough but where such a tie lies before it.
_TRIES = 16


class Text:
    """Prompt and answer as one sequence of ids, run once through the target when something of it is asked for."""

    def __init__(
        self, target: TargetModel, ids: Sequence[int], tap_ids: Sequence[int], kv_layers: Sequence[int] = ()
    ) -> None:
        self.target = target
        self.ids = list(ids)
        self.tap_ids = tuple(tap_ids)
        self.kv_layers = tuple(kv_layers)

    @cached_property
    def _output(self) -> TargetOutput:
        ids_1S = torch.tensor([self.ids], device=self.target.device)
        positions_1S = torch.arange(len(self.ids), device=self.target.device)[None]
        return self.target.run(ids_1S, positions_1S, tap_ids=self.tap_ids, kv_layers=self.kv_layers)

    @property
    def target_kv(self) -> Mapping[int, tuple[Tensor, Tensor]] | None:
        """Keys and values [1, G, S, d] of ``kv_layers``."""
        return self._output.target_kv

    def taps(self, ids: Sequence[int]) -> Tensor | None:
        """Hidden states [1, S, A, H] of some of ``tap_ids``, in the order asked for; ``None`` for none."""
        taps_1SAH = self._output.taps_BSAH
        return None if taps_1SAH is None or not ids else taps_1SAH[:, :, [self.tap_ids.index(tap) for tap in ids]]

    def last_hidden(self, drafter: Drafter) -> Tensor:
        """The target's last hidden states [1, S, H], after its final norm."""
        return read_hidden(drafter, self.target, self._output.last_hidden_BSH)

    def target_logits(self, position: int) -> Tensor:
        """The target's logits [V] of the token after ``position``."""
        return self.target.logits(self._output.last_hidden_BSH[0, position]).float()


class Follower:
    """A drafter that is led along a text. Anchors must ascend; what lies before an anchor is shown to the drafter when
    it gets there.

    ``n`` drafts are asked for every time, whatever is wanted of them: those of a block may depend on its length.
    """

    def __init__(self, drafter: Drafter, text: Text, taps_1SAH: Tensor | None, n: int) -> None:
        self._drafter = drafter
        self._taps_1SAH = taps_1SAH
        self._last_hidden_1SH = text.last_hidden(drafter) if drafter.reads_last_hidden else None
        self._target_kv = text.target_kv if drafter.kv_layers else None
        self._n = n
        self._ids_1S = torch.tensor([text.ids], device=text.target.device)
        self._cache = drafter.new_cache(1)
        self._seen = 0

    def draft(self, anchor: int) -> tuple[int, ...]:
        """The n argmax drafts for the positions after ``anchor``."""
        self._show(anchor)
        return tuple(self._drafter.propose(self._cache, self._ids_1S[:, anchor], self._n, GREEDY).ids[0].tolist())

    def logits_after(self, anchor: int, drafts: Sequence[int]) -> Tensor | None:
        """The drafter's logits [V] of the slot after these drafts, relative to the largest; -inf where it cannot draft
        a token. ``None`` if the drafter does not draft these.
        """
        self._show(anchor)
        slot = len(drafts)
        for seed in range(_TRIES):
            generator = torch.Generator().manual_seed(seed)
            proposal = self._drafter.propose(self._cache, self._ids_1S[:, anchor], self._n, _COLD, [generator])
            if proposal.log_probs is not None and proposal.ids[0, :slot].tolist() == list(drafts):
                logits_V = proposal.log_probs[0, slot] * _COLD.temperature
                return logits_V - logits_V.max()
        return None

    def _show(self, anchor: int) -> None:
        """The anchor itself is committed, but its own taps do not exist when its drafts are made."""
        if anchor > self._seen:
            part = slice(self._seen, anchor)
            taps_1SAH, hidden_1SH = self._taps_1SAH, self._last_hidden_1SH
            observation = Observation(
                ids_BT=self._ids_1S[:, part],
                lengths_B=torch.tensor([anchor - self._seen], device=self._ids_1S.device),
                taps_BTAH=None if taps_1SAH is None else taps_1SAH[:, part],
                last_hidden_BTH=None if hidden_1SH is None else hidden_1SH[:, part],
                target_kv=None
                if self._target_kv is None
                else {layer: (k[:, :, part], v[:, :, part]) for layer, (k, v) in self._target_kv.items()},
            )
            self._drafter.observe(self._cache, observation)
            self._seen = anchor
