"""Parity: does vLLM draft, and accept, what our own decoding does?

Both decode the same prompts greedily with the same drafter. Their rounds are compared one by one: the drafts, how many
of them were accepted, and the token after those. While both texts agree, a round of vLLM is compared with our loop's
round at the same anchor. Rounding may part them:

* two tokens tie for the argmax of a draft slot: the round counts as a near-tie, and so do later drafts of the same
  round;
* two tokens tie for the target's argmax: from there on the texts differ.

Wherever our loop has no round at vLLM's anchor, because one of these happened before, our drafter is led along vLLM's
own text (``replay.py``) and drafts there, so no round goes uncompared. What is a tie is looked up: the two logits must
lie closer together than rounding explains, ``TIE`` times the spread of that slot's logits. Everything else is a
difference, and one is enough to fail.

Nothing here knows how the drafter works. Figures of both sides count the same rounds, so they are equal if all rounds
are.

Legend: V vocabulary of the target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from spectrain.decoding.acceptance import AcceptanceStats, Round, acceptance
from spectrain.drafters.drafter import Drafter
from spectrain.evaluation.replay import Follower, Text
from spectrain.target.model import TargetModel

# Two logits that lie this far apart, as a share of the slot's spread, may change places by rounding.
TIE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LEAST_EQUAL = 0.9  # share of rounds that must be equal: with more ties than that, nothing was compared


@dataclass(frozen=True)
class DecodedPrompt:
    """A prompt and its greedy answer: their ids (the end token included), and the rounds, with their drafts."""

    prompt: list[int]
    answer: list[int]
    rounds: Sequence[Round]


@dataclass(frozen=True)
class Difference:
    """Where one round differs. ``what``: "draft" (slot is the draft's, from 1) or "target" (the token after ``slot``
    accepted drafts).

    ours, theirs: the two tokens, of our loop and of vLLM. gap: how far our logit of theirs lies below that of ours; inf
    where ours could not have been theirs. tolerance: the widest gap that counts as a near-tie.
    """

    prompt: int
    round: int
    anchor: int
    what: str
    slot: int
    ours: int
    theirs: int
    gap: float
    tolerance: float

    @property
    def tie(self) -> bool:
        return self.gap <= self.tolerance

    def __str__(self) -> str:
        where = f"prompt {self.prompt}, round {self.round}, anchor at {self.anchor}"
        if self.what == "draft":
            where += f", draft {self.slot}"
        else:
            where += f", the target's token after {self.slot} accepted drafts"
        if math.isinf(self.gap):
            return f"{where}: vLLM {self.theirs}, ours {self.ours}; ours is not able to say {self.theirs}"
        explained = f"whose logit is {self.gap:.2g} higher (rounding explains {self.tolerance:.2g})"
        return f"{where}: vLLM {self.theirs}, ours {self.ours}, {explained}"


@dataclass(frozen=True)
class ParityReport:
    """Outcome of a comparison. ``replayed``: rounds that were compared with the drafter led along vLLM's text; all
    others were compared with our loop's. ``ours`` and ``theirs``: figures over all complete rounds of each side.
    ``hints``: likely causes of differences (``diagnosis.py``).
    """

    rounds: int
    equal: int
    replayed: int
    ties: tuple[Difference, ...]
    different: tuple[Difference, ...]
    ours: AcceptanceStats
    theirs: AcceptanceStats
    hints: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return self.rounds > 0 and not self.different and self.equal >= LEAST_EQUAL * self.rounds

    def reason(self) -> str:
        """Why it failed, in one sentence without a full stop; empty if it passed."""
        if self.passed:
            return ""
        if self.different:
            return f"{len(self.different)} of {self.rounds} rounds differ; the first: {self.different[0]}"
        if not self.rounds:
            return "vLLM reports no round with drafts, so nothing was compared"
        return (
            f"only {self.equal} of {self.rounds} rounds are equal, the others are near-ties: too many to call it parity"
        )


def compare(
    target: TargetModel,
    drafter: Drafter,
    ours: Sequence[DecodedPrompt],
    theirs: Sequence[DecodedPrompt],
    num_drafts: int,
) -> ParityReport:
    """Compare vLLM's rounds, prompt by prompt, with our loop's. ``num_drafts``: what both sides were asked for in a
    round.
    """
    equal = replayed = total = 0
    found: list[Difference] = []
    for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        comparison = _Comparison(target, drafter, number, own, other, num_drafts)
        differences = [difference for difference in comparison.differences() if difference is not None]
        found += differences
        total += len(other.rounds)
        equal += len(other.rounds) - len(differences)
        replayed += comparison.replayed
    return ParityReport(
        rounds=total,
        equal=equal,
        replayed=replayed,
        ties=tuple(difference for difference in found if difference.tie),
        different=tuple(difference for difference in found if not difference.tie),
        ours=acceptance([decoded.rounds for decoded in ours], num_drafts),
        theirs=acceptance([decoded.rounds for decoded in theirs], num_drafts),
    )


class _Comparison:
    """One prompt, decoded by both sides. ``agreed``: tokens from the front that both texts share."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        number: int,
        ours: DecodedPrompt,
        theirs: DecodedPrompt,
        num_drafts: int,
    ) -> None:
        self.number = number
        self.theirs = theirs
        self.num_drafts = num_drafts
        self.ours_at = {round_.anchor: round_ for round_ in ours.rounds}
        self.text = Text(target, [*theirs.prompt, *theirs.answer], drafter.taps, drafter.kv_layers)
        self.drafter = drafter
        self.rel = TIE[target.dtype]
        self.replayed = 0
        self.agreed = _common_prefix([*ours.prompt, *ours.answer], self.text.ids)

    def differences(self) -> Iterator[Difference | None]:
        """Of every round of vLLM, in order; ``None`` where it is equal."""
        for number, round_ in enumerate(self.theirs.rounds):
            yield self._difference(number, round_)

    @cached_property
    def follower(self) -> Follower:
        return Follower(self.drafter, self.text, self.text.taps(self.drafter.taps), self.num_drafts)

    def _difference(self, number: int, theirs: Round) -> Difference | None:
        ours = self.ours_at.get(theirs.anchor) if theirs.anchor < self.agreed else None
        if ours is None or len(ours.drafts) < len(theirs.drafts):
            self.replayed += 1
            drafts = self.follower.draft(theirs.anchor)
        else:
            drafts = ours.drafts
        slot = _common_prefix(drafts, theirs.drafts)
        if slot < len(theirs.drafts):
            logits_V = self.follower.logits_after(theirs.anchor, theirs.drafts[:slot])
            found = self._tokens(number, theirs.anchor, "draft", slot + 1, drafts[slot], theirs.drafts[slot], logits_V)
            return (self._target_difference(number, theirs) or found) if found.tie else found
        return self._target_difference(number, theirs)

    def _target_difference(self, number: int, theirs: Round) -> Difference | None:
        """Each of the round's tokens in the text must be the target's argmax there, and the accepted drafts must be
        those tokens.
        """
        last = min(theirs.anchor + theirs.accepted, len(self.text.ids) - 2)
        same = (
            last + 1 < self.agreed
            and theirs.anchor in self.ours_at
            and self.ours_at[theirs.anchor].accepted == theirs.accepted
        )
        if same:
            return None
        for position in range(theirs.anchor, last + 1):
            slot = position - theirs.anchor
            logits_V = self.text.target_logits(position)
            ours_id, theirs_id = int(logits_V.argmax()), self.text.ids[position + 1]
            if ours_id != theirs_id:
                return self._tokens(number, theirs.anchor, "target", slot, ours_id, theirs_id, logits_V)
        # The reported counts against the text: drafts that were accepted must be in it, and a draft that is in it must
        # not have been rejected.
        after = self.text.ids[theirs.anchor + 1 :]
        for slot, (draft, token) in enumerate(zip(theirs.drafts[: theirs.accepted + 1], after, strict=False)):
            accepted = slot < theirs.accepted
            if accepted != (draft == token) and not (theirs.cut and not accepted):
                return Difference(self.number, number, theirs.anchor, "target", slot, token, draft, math.inf, 0.0)
        return None

    def _tokens(
        self, number: int, anchor: int, what: str, slot: int, ours: int, theirs: int, logits_V: Tensor | None
    ) -> Difference:
        gap, tolerance = math.inf, 0.0
        if logits_V is not None:
            finite = logits_V[logits_V.isfinite()]
            tolerance = self.rel * float(finite.max() - finite.min())
            gap = float(logits_V[ours] - logits_V[theirs])
        return Difference(self.number, number, anchor, what, slot, ours, theirs, gap, tolerance)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens from the front are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
