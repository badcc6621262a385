"""Comparing rounds: what counts as equal, as a near-tie, as different, and how a wrong reading is named. No server is
needed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from drafter_tools import Options
from parity_tools import DRAFTS, Family, as_rounds, train

from spectrain.data.vocab import DraftVocab
from spectrain.decoding.acceptance import Round
from spectrain.drafters.autoregressive.eagle3_drafter import Eagle3
from spectrain.engines.vllm.requests import Completion, ReportedRound, placed_rounds
from spectrain.errors import RunError
from spectrain.evaluation.diagnosis import Hypothesis, explain, hypotheses
from spectrain.evaluation.parity import Played, compare

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
def ours(family: Family, drafter: Eagle3) -> list[Played]:
    return family.ours(drafter)


def changed(play: list[Played], prompt: int, number: int, **fields: object) -> list[Played]:
    """A copy in which one round is another."""
    rounds = list(play[prompt].rounds)
    rounds[number] = replace(rounds[number], **fields)  # type: ignore[arg-type]
    return [replace(one, rounds=rounds) if index == prompt else one for index, one in enumerate(play)]


# --- comparing -----------------------------------------------------------------------------------------------------


def test_the_same_rounds_are_equal(family: Family, drafter: Eagle3, ours: list[Played]) -> None:
    report = compare(family.model, drafter, ours, ours, DRAFTS)
    assert report.passed and report.rounds == report.equal > 50 and report.replayed == 0 and report.reason() == ""
    assert report.ours == report.theirs


def test_replayed_rounds_are_those_of_the_loop(family: Family, drafter: Eagle3, ours: list[Played]) -> None:
    """Without rounds of ours to hold against, the drafter led along the text drafts the same."""
    report = compare(family.model, drafter, [replace(played, rounds=[]) for played in ours], ours, DRAFTS)
    assert report.passed and report.replayed == report.rounds == report.equal > 50


@pytest.mark.parametrize("slot", range(DRAFTS))
def test_a_wrong_draft_is_a_difference_at_its_slot(
    family: Family, drafter: Eagle3, ours: list[Played], slot: int
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


def test_a_draft_that_ours_cannot_make_is_no_tie(family: Family, drafter: Eagle3, ours: list[Played]) -> None:
    outside = next(token for token in range(drafter.vocab.target_size) if token not in drafter.vocab.ids_D.tolist())
    report = compare(family.model, drafter, ours, changed(ours, 0, 0, drafts=(outside, 1, 1)), DRAFTS)
    assert report.different[0].gap == math.inf and "not able to say" in report.reason()


def test_a_tie_of_two_drafts_counts_apart(family: Family, ours: list[Played], drafter: Eagle3) -> None:
    """Two rows of the draft head are the same: either token may come, and what follows it in the round is not
    compared.
    """
    first = ours[0].rounds[0].drafts[0]
    vocab = drafter.vocab.ids_D.tolist()
    reference = next(
        token for token in vocab if all(token not in round_.drafts for played in ours for round_ in played.rounds)
    )
    references = Eagle3(drafter.shape, drafter.vocab, steps=DRAFTS)
    references.load_state_dict(drafter.state_dict())
    references.attach(drafter.head)
    with torch.no_grad():
        references.body.lm_head.weight[vocab.index(reference)] = references.body.lm_head.weight[vocab.index(first)] * (
            1 + 1e-6
        )
    own = family.ours(references.eval())
    number, round_ = next(
        (i, r) for i, r in enumerate(own[0].rounds) if r.drafts[0] in (first, reference) and r.accepted == 0
    )
    other = reference if round_.drafts[0] == first else first
    report = compare(family.model, references, own, changed(own, 0, number, drafts=(other, 0, 0)), DRAFTS)
    (tie,) = report.ties
    assert report.passed and not report.different and report.equal == report.rounds - 1
    assert (tie.what, tie.slot, tie.theirs) == ("draft", 1, other) and tie.gap <= tie.tolerance


@pytest.mark.parametrize("shift", [1, -1])
def test_another_number_of_accepted_drafts_is_a_difference(
    family: Family, drafter: Eagle3, ours: list[Played], shift: int
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
    family: Family, drafter: Eagle3, ours: list[Played]
) -> None:
    """Their target says another token in round 2; from there on our drafter follows their text."""
    played = ours[1]
    at = played.rounds[2].anchor + played.rounds[2].accepted + 1 - len(played.prompt)
    answer = list(played.answer)
    answer[at] = (answer[at] + 1) % 100 + 3
    rounds = list(played.rounds[:3])
    report = compare(family.model, drafter, [played], [replace(played, answer=answer, rounds=rounds)], DRAFTS)
    (difference,) = report.different
    assert (difference.round, difference.what, difference.slot) == (2, "target", played.rounds[2].accepted)
    assert (difference.ours, difference.theirs) == (played.answer[at], answer[at])
    assert explain(family.model, drafter, report, [played], DRAFTS)[0].startswith("the target itself answers otherwise")


def test_nothing_compared_is_no_parity(family: Family, drafter: Eagle3, ours: list[Played]) -> None:
    report = compare(family.model, drafter, ours[:1], [replace(ours[0], rounds=[])], DRAFTS)
    assert not report.passed and "nothing was compared" in report.reason()


# --- naming the cause ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [Options(taps=(1, 4, 6), reduced=True), ALL_ON], ids=lambda o: o.name)
def test_every_wrong_reading_is_named(family: Family, options: Options) -> None:
    """Played by our own loop under each hypothesis in turn, so none is explained by another alone."""
    drafter = train(family, options, steps=10)
    ours = family.ours(drafter, 5)
    tried = [
        hypothesis for hypothesis in hypotheses(drafter, family.model.spec.num_layers) if hypothesis.states is None
    ]
    assert len({hypothesis.hint for hypothesis in tried}) == len(tried) >= 12
    named = 0
    for hypothesis in one_of_each_kind(tried):
        theirs = _played_under(family, drafter, hypothesis)
        report = compare(family.model, drafter, ours, theirs, DRAFTS)
        if not report.different:  # such a reading makes no difference here, so there is nothing to name
            continue
        hints = explain(family.model, drafter, report, theirs, DRAFTS)
        assert any(hint.startswith(hypothesis.hint) for hint in hints), (hypothesis.hint, hints)
        named += 1
    assert named >= 3
    assert compare(family.model, drafter, ours, family.ours(drafter, 5), DRAFTS).passed  # nothing stayed changed


def one_of_each_kind(tried: list[Hypothesis]) -> list[Hypothesis]:
    """All that concern norms, and the first of each other kind."""
    kinds: dict[str, Hypothesis] = {}
    for hypothesis in tried:
        kind = hypothesis.hint.partition(":")[0]
        kinds.setdefault(hypothesis.hint if kind == "norm" else kind, hypothesis)
    return list(kinds.values())


def _played_under(family: Family, drafter: Eagle3, hypothesis: Hypothesis) -> list[Played]:
    taps = drafter.taps
    with hypothesis.applied():
        drafter.taps = hypothesis.taps or taps
        try:
            return family.ours(drafter, 5)
        finally:
            drafter.taps = taps


def test_what_a_drafter_does_not_have_is_not_tried(family: Family, drafter: Eagle3) -> None:
    hints = " ".join(hypothesis.hint for hypothesis in hypotheses(drafter, family.model.spec.num_layers))
    assert "d2t" in hints and "norm_output" in hints and "norm_before_fc" not in hints and "fc_norm" not in hints
    full = Eagle3(replace(drafter.shape, draft_vocab_size=304), DraftVocab(torch.arange(304), 304, 1.0), steps=DRAFTS)
    assert "d2t" not in " ".join(hypothesis.hint for hypothesis in hypotheses(full, 7))


def test_an_unknown_cause_is_said_to_be_unknown(family: Family, drafter: Eagle3, ours: list[Played]) -> None:
    wrong = [
        replace(one, rounds=[replace(r, drafts=(drafter.vocab.ids_D[0].item(),) * DRAFTS) for r in one.rounds])
        for one in ours
    ]
    report = compare(family.model, drafter, ours, wrong, DRAFTS)
    (hint,) = explain(family.model, drafter, report, wrong, DRAFTS)
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


def test_what_we_play_comes_back_from_what_vllm_would_report_of_it(ours: list[Played]) -> None:
    """As a server would report it, and back."""
    for played in ours:
        end = "length" if len(played.answer) == 24 else "stop"
        reported = Completion("a", played.answer, end, 1.0, as_rounds(played))
        assert placed_rounds(len(played.prompt), reported) == list(played.rounds)
