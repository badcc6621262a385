"""Parity: does the server draft, and accept, what our own decoding does?

Both decode the same prompts greedily with the same drafter. Their rounds are compared one by one: the drafts, how many
of them were accepted, and the token behind. While both texts agree, a server's round is held against our loop's round
at the same anchor. Rounding may part them:

* two tokens tie for the argmax of a draft slot: the round counts as a near-tie, and so do later drafts of the same
  round;
* two tokens tie for the target's argmax: from there on the texts differ.

Wherever our loop has no round at the server's anchor, because one of these happened before, our drafter is led along
the server's own text (``replay.py``) and drafts there, so no round goes uncompared. What is a tie is looked up: the two
logits must lie closer together than rounding explains, ``TIE`` times the spread of that slot's logits. Everything else
is a difference, and one is enough to fail.

Nothing here knows how the drafter works. Figures of both sides count the same rounds, so they are equal if all rounds
are.

Legend: V vocabulary of the target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
class Played:
    """One prompt decoded greedily: ids of prompt and answer (the end token included), and the rounds, with their
    drafts.
    """

    prompt: list[int]
    answer: list[int]
    rounds: Sequence[Round]


@dataclass(frozen=True)
class Difference:
    """Where one round parted. ``what``: "draft" (slot is the draft's, from 1) or "target" (the token behind so many
    accepted drafts).

    ours, theirs: the two tokens. gap: how far our logit of theirs lies below that of ours; inf where we could not have
    chosen theirs.
    tolerance: the widest gap that counts as a near-tie.
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
        place = f"prompt {self.prompt}, round {self.round}, anchor at {self.anchor}"
        if self.what == "draft":
            place += f", draft {self.slot}"
        else:
            place += f", the target's token after {self.slot} accepted drafts"
        if math.isinf(self.gap):
            return f"{place}: vLLM {self.theirs}, ours {self.ours}; ours is not able to say {self.theirs}"
        explained = f"whose logit is {self.gap:.2g} higher (rounding explains {self.tolerance:.2g})"
        return f"{place}: vLLM {self.theirs}, ours {self.ours}, {explained}"


@dataclass(frozen=True)
class ParityReport:
    """Outcome of a comparison. ``replayed``: rounds that were held against the drafter led along the server's text; all
    others were held against our loop. ``ours`` and ``theirs``: figures over all complete rounds of each side."""

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
            return "the server played no round with drafts, so nothing was compared"
        return (
            f"only {self.equal} of {self.rounds} rounds are equal, the others are near-ties: too many to call it parity"
        )


def compare(
    target: TargetModel, drafter: Drafter, ours: Sequence[Played], theirs: Sequence[Played], num_drafts: int
) -> ParityReport:
    """Compare the server's rounds, prompt by prompt, with our loop's. ``num_drafts``: what both sides were to draft in
    a round.
    """
    equal = replayed = total = 0
    found: list[Difference] = []
    for number, (own, served) in enumerate(zip(ours, theirs, strict=True)):
        comparison = _Comparison(target, drafter, number, own, served, num_drafts)
        differences = [difference for difference in comparison.differences() if difference is not None]
        found += differences
        total += len(served.rounds)
        equal += len(served.rounds) - len(differences)
        replayed += comparison.replayed
    return ParityReport(
        rounds=total,
        equal=equal,
        replayed=replayed,
        ties=tuple(difference for difference in found if difference.tie),
        different=tuple(difference for difference in found if not difference.tie),
        ours=acceptance([played.rounds for played in ours], num_drafts),
        theirs=acceptance([played.rounds for played in theirs], num_drafts),
    )


class _Comparison:
    """One prompt."""

    def __init__(
        self, target: TargetModel, drafter: Drafter, number: int, own: Played, served: Played, num_drafts: int
    ) -> None:
        self.number = number
        self.served = served
        self.num_drafts = num_drafts
        self.own_ids = [*own.prompt, *own.answer]
        self.own_at = {round_.anchor: round_ for round_ in own.rounds}
        self.text = Text(target, [*served.prompt, *served.answer], drafter.taps)
        self.drafter = drafter
        self.rel = TIE[target.dtype]
        self.replayed = 0
        self._follower: Follower | None = None
        self.agreed = _common_prefix(self.own_ids, self.text.ids)  # tokens from the front that both texts share

    def differences(self) -> Iterator[Difference | None]:
        for number, round_ in enumerate(self.served.rounds):
            yield self._difference(number, round_)

    @property
    def follower(self) -> Follower:
        if self._follower is None:
            self._follower = Follower(self.drafter, self.text, self.text.taps(self.drafter.taps), self.num_drafts)
        return self._follower

    def _difference(self, number: int, served: Round) -> Difference | None:
        own = self.own_at.get(served.anchor) if served.anchor < self.agreed else None
        if own is None or len(own.drafts) < len(served.drafts):
            self.replayed += 1
            drafts = self.follower.draft(served.anchor)
        else:
            drafts = own.drafts
        slot = _common_prefix(drafts, served.drafts)
        if slot < len(served.drafts):
            logits_V = self.follower.logits_after(served.anchor, served.drafts[:slot])
            found = self._tokens(number, served.anchor, "draft", slot + 1, drafts[slot], served.drafts[slot], logits_V)
            return (self._target_difference(number, served) or found) if found.tie else found
        return self._target_difference(number, served)

    def _target_difference(self, number: int, served: Round) -> Difference | None:
        """Each of the round's tokens in the text must be the target's argmax there, and the accepted drafts must be
        those tokens.
        """
        last = min(served.anchor + served.accepted, len(self.text.ids) - 2)
        same = (
            last + 1 < self.agreed
            and served.anchor in self.own_at
            and self.own_at[served.anchor].accepted == served.accepted
        )
        if same:
            return None
        for position in range(served.anchor, last + 1):
            slot = position - served.anchor
            logits_V = self.text.target_logits(position)
            ours, theirs = int(logits_V.argmax()), self.text.ids[position + 1]
            if ours != theirs:
                return self._tokens(number, served.anchor, "target", slot, ours, theirs, logits_V)
        # The account against the text: what is said to stand must be in it, and a draft that is in it must not have
        # been refused.
        behind = self.text.ids[served.anchor + 1 :]
        for slot, (draft, token) in enumerate(zip(served.drafts[: served.accepted + 1], behind, strict=False)):
            stands = slot < served.accepted
            if stands != (draft == token) and not (served.cut and not stands):
                return Difference(self.number, number, served.anchor, "target", slot, token, draft, math.inf, 0.0)
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
