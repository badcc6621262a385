"""The simulation on hand-made texts, its expectation against full enumeration, and its sampled form against both."""

import itertools
import math

import numpy as np
import pytest
import torch

from spectrain.data.packing import PackedBatch
from spectrain.decoding.acceptance import Round, acceptance
from spectrain.decoding.simulate import (
    Span,
    acceptance_probability,
    expected_acceptance,
    expected_acceptance_by_length,
    simulate,
)
from spectrain.drafters.drafter import DraftScores
from spectrain.training.simulated_acceptance import document_spans


def truths(rows):
    return np.array([[c == "1" for c in row] for row in rows])


def test_rounds_of_a_hand_simulated_answer():
    # Six tokens. Anchor 0 accepts two of three and jumps to 3, which accepts the remaining two: the third slot is
    # beyond the text.
    accept = truths(["110", "000", "000", "111", "000", "000"])
    assert simulate(Span(10, accept, stopped=True), 3) == [Round(10, 3, 2), Round(13, 3, 2)]
    assert simulate(Span(10, accept, stopped=False), 3) == [Round(10, 3, 2), Round(13, 3, 2, cut=True)]
    # With two drafts the last round is complete: everything it drafted was seen.
    assert simulate(Span(10, accept, stopped=False), 2) == [Round(10, 2, 2), Round(13, 2, 2)]
    # With one draft a rejection ends a round wherever it is.
    assert simulate(Span(0, accept, stopped=False), 1) == [Round(0, 1, 1), Round(2, 1, 0), Round(3, 1, 1)]


def test_a_failure_at_the_last_token_is_no_cut():
    accept = truths(["111", "000", "000"])
    accept[0, 1] = False
    assert simulate(Span(0, accept, stopped=False), 3) == [Round(0, 3, 1)]


@pytest.mark.parametrize("length", [0, 1])
def test_an_answer_of_one_token_has_no_rounds(length):
    span = Span(5, np.zeros((length, 2)), stopped=False)
    assert simulate(span, 2) == []
    assert expected_acceptance([span], 2).rounds == 0
    assert math.isnan(expected_acceptance([span], 2).acceptance_length)


def random_spans(seed, lengths, slots):
    rng = np.random.default_rng(seed)
    return [Span(int(rng.integers(0, 9)), rng.random((length, slots)), bool(rng.integers(0, 2))) for length in lengths]


def enumerate_simulations(span, n):
    """(probability, rounds) of every possible simulate, by deciding all entries of the table in all ways."""
    length = len(span.accept)
    cells = [(i, j) for i in range(length) for j in range(min(n, length - 1 - i))]
    for bits in itertools.product((0, 1), repeat=len(cells)):
        table = np.zeros((length, n))
        probability = 1.0
        for (i, j), bit in zip(cells, bits, strict=True):
            table[i, j] = bit
            probability *= span.accept[i, j] if bit else 1 - span.accept[i, j]
        yield probability, simulate(Span(span.start, table, span.stopped), n)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_expectation_equals_full_enumeration(n):
    spans = [*random_spans(1, [2, 4, 5], 3), *random_spans(7, [5], 3)]
    assert {span.stopped for span in spans} == {True, False}
    rounds, survival = 0.0, np.zeros(n)
    for span in spans:
        for probability, outcome in enumerate_simulations(span, n):
            complete = [r for r in outcome if not r.cut]
            rounds += probability * len(complete)
            survival += probability * np.array([sum(r.accepted > j for r in complete) for j in range(n)])
    expected = expected_acceptance(spans, n)
    assert expected.rounds == pytest.approx(rounds, rel=1e-12)
    assert expected.survival == pytest.approx(survival, rel=1e-12)


def test_expectation_equals_the_simulation_where_nothing_is_random():
    rng = np.random.default_rng(2)
    spans = [
        Span(0, rng.random((length, 7)) < 0.7, bool(rng.integers(0, 2))) for length in rng.integers(1, 60, size=40)
    ]
    for n, expected in enumerate(expected_acceptance_by_length(spans, 7), start=1):
        stats = acceptance([simulate(span, n) for span in spans], num_positions=n)
        assert (expected.rounds, expected.accepted_tokens) == (stats.rounds, stats.accepted_tokens)
        assert expected.acceptance_length == pytest.approx(stats.acceptance_length, rel=1e-12)
        assert expected.survival / expected.rounds == pytest.approx(stats.acceptance_per_position, rel=1e-12)


def test_sampled_simulation_has_the_expected_sums():
    spans = random_spans(3, [9, 14], 4)
    rng = np.random.default_rng(0)
    draws = [acceptance([simulate(span, 4, rng) for span in spans]) for _ in range(3000)]
    expected = expected_acceptance(spans, 4)
    for field, value in (("rounds", expected.rounds), ("accepted_tokens", expected.accepted_tokens)):
        sums = np.array([getattr(stats, field) for stats in draws])
        assert abs(sums.mean() - value) < 4 * sums.std() / math.sqrt(len(sums))


def test_entries_beyond_the_answer_do_not_matter():
    (span,) = random_spans(4, [6], 3)
    scribbled = span.accept.copy()
    for i in range(6):
        scribbled[i, max(0, 5 - i) :] = 1.0 - scribbled[i, max(0, 5 - i) :]
    other = Span(span.start, scribbled, span.stopped)
    assert expected_acceptance([span], 3).survival == pytest.approx(expected_acceptance([other], 3).survival, rel=1e-14)
    assert simulate(span, 3, np.random.default_rng(1)) == simulate(other, 3, np.random.default_rng(1))


def test_probabilities_need_a_generator_and_slots_must_be_known():
    (span,) = random_spans(5, [4], 2)
    with pytest.raises(ValueError, match="random generator"):
        simulate(span, 2)
    for call in (lambda: simulate(span, 3), lambda: expected_acceptance([span], 3), lambda: simulate(span, 0)):
        with pytest.raises(ValueError, match="2 slots"):
            call()


def test_acceptance_probability_is_the_capped_ratio():
    p, q = torch.tensor([0.1, 0.5, 0.0, 0.3]).log(), torch.tensor([0.4, 0.2, 0.5, 0.0]).log()
    assert acceptance_probability(p, q).tolist() == pytest.approx([0.25, 1.0, 0.0, 0.0])
    assert acceptance_probability(torch.tensor([-math.inf]), torch.tensor([-math.inf])).tolist() == [0.0]


# --- spans of a packed batch ---------------------------------------------------------------------------------------


def packed(ids, mask, documents):
    """What ``document_spans`` reads of a batch."""
    nothing = torch.empty(len(ids), 0)
    columns = (torch.tensor(column) for column in (ids, mask, [0] * len(ids), documents))
    return PackedBatch(*columns, nothing, nothing, None)


@pytest.mark.parametrize("with_confidence", [True, False])
def test_spans_are_the_answers_of_each_document(with_confidence):
    """Two documents, the first with two answers, the second with one that the length limit ended."""
    batch = packed([1, 2, 9, 3, 4, 9, 1, 5, 6], [0, 1, 1, 0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1, 1])
    anchors = torch.tensor([7, 1, 2, 4, 5])  # of no particular order; position 8 is no anchor
    accept = torch.arange(10.0).reshape(5, 2)
    scores = DraftScores(anchors, accept, accept + 100 if with_confidence else None)
    first, second = document_spans(batch, scores, eos_ids=(9,))
    assert [(span.start, span.stopped) for span in first] == [(1, True), (4, True)]
    assert [(span.start, span.stopped) for span in second] == [(1, False)]
    assert [span.accept.tolist() for span in (*first, *second)] == [
        [[2, 3], [4, 5]],
        [[6, 7], [8, 9]],
        [[0, 1], [0, 0]],
    ]
    if with_confidence:
        assert [span.confidence.tolist() for span in first] == [[[102, 103], [104, 105]], [[106, 107], [108, 109]]]
        assert second[0].confidence.tolist() == [[100, 101], [0, 0]]
    else:
        assert all(span.confidence is None for span in (*first, *second))
