"""Comparing rounds: what counts as equal, as a near-tie, as different, and how a misreading is named. Without vLLM."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from drafter_tools import Options
from parity_tools import DRAFTS, Family, as_rounds, train

from spectrain.data.vocab import DraftVocab
from spectrain.decoding.acceptance import Round, acceptance
from spectrain.decoding.proposers import Observation, Proposal
from spectrain.drafters.autoregressive.eagle3 import Eagle3
from spectrain.engines.vllm.requests import Completion, ReportedRound, placed_rounds
from spectrain.errors import RunError
from spectrain.evaluation.diagnosis import Misreading, diagnose, misreadings
from spectrain.evaluation.parity import DecodedPrompt, Difference, ParityReport, compare
from spectrain.evaluation.replay import Follower, Text

ALL_ON = Options(
    "qwen3", (1, 3, 5), 1, True, norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True
)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family.make("llama", tmp_path_factory.mktemp("parity") / "llama")


@pytest.fixture(scope="module")
def drafter(family: Family) -> Eagle3:
    return train(family, Options(taps=(1, 4, 6), reduced=True), steps=15)


@pytest.fixture(scope="module")
def ours(family: Family, drafter: Eagle3) -> list[DecodedPrompt]:
    return family.ours(drafter)


def changed(prompts: list[DecodedPrompt], prompt: int, number: int, **fields: object) -> list[DecodedPrompt]:
    """A copy in which one round is another."""
    rounds = list(prompts[prompt].rounds)
    rounds[number] = replace(rounds[number], **fields)  # type: ignore[arg-type]
    return [replace(one, rounds=rounds) if index == prompt else one for index, one in enumerate(prompts)]


# --- comparing -----------------------------------------------------------------------------------------------------


def test_the_same_rounds_are_equal(family: Family, drafter: Eagle3, ours: list[DecodedPrompt]) -> None:
    report = compare(family.model, drafter, ours, ours, DRAFTS)
    assert report.passed and report.rounds == report.equal > 50 and report.replayed == 0 and report.reason() == ""
    assert report.ours == report.theirs


def test_replayed_rounds_are_those_of_the_loop(family: Family, drafter: Eagle3, ours: list[DecodedPrompt]) -> None:
    """Without rounds of ours to compare with, the drafter led along the text drafts the same."""
    report = compare(family.model, drafter, [replace(decoded, rounds=[]) for decoded in ours], ours, DRAFTS)
    assert report.passed and report.replayed == report.rounds == report.equal > 50


@pytest.mark.parametrize("slot", range(DRAFTS))
def test_a_wrong_draft_is_a_difference_at_its_slot(
    family: Family, drafter: Eagle3, ours: list[DecodedPrompt], slot: int
) -> None:
    drafts = list(ours[2].rounds[1].drafts)
    wrong = next(token for token in drafter.vocab.ids_D.tolist() if token != drafts[slot])
    theirs = changed(ours, 2, 1, drafts=(*drafts[:slot], wrong, *drafts[slot + 1 :]))
    report = compare(family.model, drafter, ours, theirs, DRAFTS)
    (difference,) = report.different
    assert (difference.prompt, difference.round, difference.what, difference.slot) == (2, 1, "draft", slot + 1)
    assert (difference.ours, difference.theirs, difference.anchor) == (drafts[slot], wrong, ours[2].rounds[1].anchor)
    assert difference.tolerance < difference.gap < math.inf
    assert not report.passed and report.equal == report.rounds - 1
    assert (
        f"prompt 2, round 1, anchor at {difference.anchor}, draft {slot + 1}: vLLM {wrong}, ours {drafts[slot]}"
        in report.reason()
    )


def test_a_draft_that_ours_cannot_make_is_no_tie(family: Family, drafter: Eagle3, ours: list[DecodedPrompt]) -> None:
    outside = next(token for token in range(drafter.vocab.target_size) if token not in drafter.vocab.ids_D.tolist())
    report = compare(family.model, drafter, ours, changed(ours, 0, 0, drafts=(outside, 1, 1)), DRAFTS)
    assert report.different[0].gap == math.inf and "not able to say" in report.reason()


def test_a_tie_of_two_drafts_counts_apart(family: Family, ours: list[DecodedPrompt], drafter: Eagle3) -> None:
    """Two rows of the draft head are the same: either token may come, and what follows it in the round is not
    compared.
    """
    first = ours[0].rounds[0].drafts[0]
    vocab = drafter.vocab.ids_D.tolist()
    equal_id = next(
        token for token in vocab if all(token not in round_.drafts for decoded in ours for round_ in decoded.rounds)
    )
    tied = Eagle3(drafter.shape, drafter.vocab, drafter.config)
    tied.load_state_dict(drafter.state_dict())
    tied.attach(drafter.head)
    with torch.no_grad():
        tied.body.lm_head.weight[vocab.index(equal_id)] = tied.body.lm_head.weight[vocab.index(first)] * (1 + 1e-6)
    own = family.ours(tied.eval())
    number, round_ = next(
        (i, r) for i, r in enumerate(own[0].rounds) if r.drafts[0] in (first, equal_id) and r.accepted == 0
    )
    other = equal_id if round_.drafts[0] == first else first
    report = compare(family.model, tied, own, changed(own, 0, number, drafts=(other, 0, 0)), DRAFTS)
    (tie,) = report.ties
    assert report.passed and not report.different and report.equal == report.rounds - 1
    assert (tie.what, tie.slot, tie.theirs) == ("draft", 1, other) and tie.gap <= tie.tolerance


@pytest.mark.parametrize("shift", [1, -1])
def test_another_number_of_accepted_drafts_is_a_difference(
    family: Family, drafter: Eagle3, ours: list[DecodedPrompt], shift: int
) -> None:
    """The round's drafts are right, but the text does not bear out what was accepted."""
    wanted = 0 if shift > 0 else 1
    prompt, number = next(
        (p, i)
        for p, one in enumerate(ours)
        for i, r in enumerate(one.rounds[:-1])
        if r.accepted == wanted and not r.cut
    )
    round_ = ours[prompt].rounds[number]
    report = compare(
        family.model, drafter, ours, changed(ours, prompt, number, accepted=round_.accepted + shift), DRAFTS
    )
    (difference,) = report.different
    assert (difference.what, difference.slot) == ("target", min(round_.accepted, round_.accepted + shift))


def test_a_text_of_another_target_is_the_targets_difference(
    family: Family, drafter: Eagle3, ours: list[DecodedPrompt]
) -> None:
    """Their target says another token in round 2; from there on our drafter follows their text."""
    decoded = ours[1]
    at = decoded.rounds[2].anchor + decoded.rounds[2].accepted + 1 - len(decoded.prompt)
    answer = list(decoded.answer)
    answer[at] = (answer[at] + 1) % 100 + 3
    rounds = list(decoded.rounds[:3])
    report = compare(family.model, drafter, [decoded], [replace(decoded, answer=answer, rounds=rounds)], DRAFTS)
    (difference,) = report.different
    assert (difference.round, difference.what, difference.slot) == (2, "target", decoded.rounds[2].accepted)
    assert (difference.ours, difference.theirs) == (decoded.answer[at], answer[at])
    hint = diagnose(family.model, drafter, report, [decoded], DRAFTS)[0]
    assert hint.startswith("the target itself answers otherwise")


def test_nothing_compared_is_no_parity(family: Family, drafter: Eagle3, ours: list[DecodedPrompt]) -> None:
    report = compare(family.model, drafter, ours[:1], [replace(ours[0], rounds=[])], DRAFTS)
    assert not report.passed and "nothing was compared" in report.reason()


@pytest.mark.parametrize(("equal", "passed"), [(90, True), (89, False)])
def test_near_ties_are_no_parity_where_there_are_too_many(equal: int, passed: bool) -> None:
    figures = acceptance([[Round(0, 3, 1)]])
    tie = Difference(0, 0, 5, "draft", 1, ours=7, theirs=8, gap=0.1, tolerance=0.2)
    report = ParityReport(100, equal, 0, (tie,) * (100 - equal), (), figures, figures)
    assert tie.tie and report.passed is passed
    assert (f"only {equal} of 100 rounds are equal" in report.reason()) is not passed


class HiddenReader:
    """Drafts the likeliest tokens by the last hidden state that it was shown, so it drafts otherwise if that is another
    position's, or not normed.
    """

    taps: tuple[int, ...] = ()
    kv_layers: tuple[int, ...] = ()
    reads_last_hidden = True

    def __init__(self, family: Family) -> None:
        self.head = family.model.model.get_output_embeddings()
        self.shown: list[Observation] = []

    def new_cache(self, batch_size: int) -> list[torch.Tensor]:
        return [torch.empty(0)] * batch_size

    def observe(self, cache: list[torch.Tensor], observation: Observation) -> None:
        assert observation.last_hidden_BTH is not None and observation.taps_BTAH is None
        self.shown.append(observation)
        for row, length in enumerate(observation.lengths_B.tolist()):
            cache[row] = observation.last_hidden_BTH[row, length - 1]

    def propose(self, cache: list[torch.Tensor], anchor_B, n, sampling, generators=None) -> Proposal:
        with torch.no_grad():
            return Proposal(self.head(torch.stack(cache)).topk(n).indices)

    def select(self, cache: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
        return [cache[row] for row in rows.tolist()]


def test_a_drafter_that_reads_the_last_hidden_state_is_shown_it_in_replay(family: Family) -> None:
    ours = family.ours(HiddenReader(family))
    assert any(r.accepted for one in ours for r in one.rounds)
    reader = HiddenReader(family)
    report = compare(family.model, reader, [replace(decoded, rounds=[]) for decoded in ours], ours, DRAFTS)
    assert report.passed and report.replayed == report.equal == report.rounds > 50

    reader.shown.clear()
    follower = Follower(reader, Text(family.model, ids := [*ours[0].prompt, *ours[0].answer], ()), None, DRAFTS)
    for anchor in (3, 4, 9):
        follower.draft(anchor)
    with torch.no_grad():
        expected = family.model.model.model(torch.tensor([ids])).last_hidden_state[:, :9]  # after the final norm
    torch.testing.assert_close(torch.cat([one.last_hidden_BTH for one in reader.shown], dim=1), expected)
    assert torch.cat([one.ids_BT for one in reader.shown], dim=1).tolist() == [ids[:9]]


# --- naming the cause ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [Options(taps=(1, 4, 6), reduced=True), ALL_ON], ids=lambda o: o.name)
def test_every_misreading_is_named(family: Family, options: Options) -> None:
    """Decoded by our own loop under each misreading in turn, so none is explained by another alone."""
    drafter = train(family, options, steps=10)
    ours = family.ours(drafter, 5)
    tried = [
        misreading for misreading in misreadings(drafter, family.model.spec.num_layers) if misreading.states is None
    ]
    assert len({misreading.hint for misreading in tried}) == len(tried) >= 12
    named = 0
    for misreading in one_of_each_kind(tried):
        theirs = _decoded_under(family, drafter, misreading)
        report = compare(family.model, drafter, ours, theirs, DRAFTS)
        if not report.different:  # such a misreading makes no difference here, so there is nothing to name
            continue
        hints = diagnose(family.model, drafter, report, theirs, DRAFTS)
        assert any(hint.startswith(misreading.hint) for hint in hints), (misreading.hint, hints)
        named += 1
    assert named >= 3
    assert compare(family.model, drafter, ours, family.ours(drafter, 5), DRAFTS).passed  # nothing stayed changed


def one_of_each_kind(tried: list[Misreading]) -> list[Misreading]:
    """All that concern norms, and the first of each other kind."""
    kinds: dict[str, Misreading] = {}
    for misreading in tried:
        kind = misreading.hint.partition(":")[0]
        kinds.setdefault(misreading.hint if kind == "norm" else kind, misreading)
    return list(kinds.values())


def _decoded_under(family: Family, drafter: Eagle3, misreading: Misreading) -> list[DecodedPrompt]:
    taps = drafter.taps
    with misreading.applied():
        drafter.taps = misreading.taps or taps
        try:
            return family.ours(drafter, 5)
        finally:
            drafter.taps = taps


def test_what_a_drafter_does_not_have_is_not_tried(family: Family, drafter: Eagle3) -> None:
    hints = " ".join(misreading.hint for misreading in misreadings(drafter, family.model.spec.num_layers))
    assert "d2t" in hints and "norm_output" in hints and "norm_before_fc" not in hints and "fc_norm" not in hints
    full = Eagle3(replace(drafter.shape, draft_vocab_size=304), DraftVocab(torch.arange(304), 304, 1.0), drafter.config)
    assert "d2t" not in " ".join(misreading.hint for misreading in misreadings(full, 7))


def test_an_unknown_cause_is_said_to_be_unknown(family: Family, drafter: Eagle3, ours: list[DecodedPrompt]) -> None:
    wrong = [
        replace(one, rounds=[replace(r, drafts=(drafter.vocab.ids_D[0].item(),) * DRAFTS) for r in one.rounds])
        for one in ours
    ]
    report = compare(family.model, drafter, ours, wrong, DRAFTS)
    (hint,) = diagnose(family.model, drafter, report, wrong, DRAFTS)
    assert hint.startswith("none of the known causes")


# --- vLLM's account -------------------------------------------------------------------------------------------------


def completion(tokens: int, reason: str, *rounds: tuple[int, int]) -> Completion:
    return Completion("a", list(range(tokens)), reason, 1.0, [ReportedRound(*counts) for counts in rounds])


def test_rounds_lie_where_their_tokens_are() -> None:
    placed = placed_rounds(10, completion(7, "stop", (3, 2), (3, 0), (3, 1)))
    assert placed == [Round(10, 3, 2), Round(13, 3, 0), Round(14, 3, 1)]


def test_drafts_beyond_the_limit_did_not_become_text_and_the_round_is_cut() -> None:
    assert placed_rounds(4, completion(6, "length", (3, 2), (3, 3))) == [Round(4, 3, 2), Round(7, 3, 2, cut=True)]
    # All three became text and nothing was left to decide: complete.
    assert placed_rounds(4, completion(7, "length", (3, 2), (3, 3))) == [Round(4, 3, 2), Round(7, 3, 3)]


def test_an_end_token_among_the_drafts_ends_a_complete_round() -> None:
    assert placed_rounds(4, completion(6, "stop", (3, 2), (3, 3))) == [Round(4, 3, 2), Round(7, 3, 2)]


def test_tokens_without_drafts_are_rounds_too() -> None:
    placed = placed_rounds(4, completion(6, "stop", (2, 1)))
    assert [round_.drafted for round_ in placed] == [0, 0, 0, 2] and sum(round_.accepted + 1 for round_ in placed) == 5


def test_rounds_that_the_text_does_not_hold_are_an_error() -> None:
    with pytest.raises(RunError, match="3 rounds with 3 tokens for a completion of 2"):
        placed_rounds(4, completion(2, "stop", (3, 0), (3, 0), (3, 0)))


def test_our_own_rounds_survive_a_servers_report(ours: list[DecodedPrompt]) -> None:
    """As a server would report it, and back."""
    for decoded in ours:
        end = "length" if len(decoded.answer) == 24 else "stop"
        reported = Completion("a", decoded.answer, end, 1.0, as_rounds(decoded))
        assert placed_rounds(len(decoded.prompt), reported) == list(decoded.rounds)
