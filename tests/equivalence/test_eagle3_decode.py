"""Our own cache drafts what the reference implementation drafts without one, however the cache was filled, and drafting
leaves no trace in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from drafter_tools import (
    HIDDEN,
    VARIANTS,
    VOCAB,
    Options,
    Texts,
    packed,
    random_document,
    random_drafter,
    reference_of,
    students,
)
from torch import Tensor

from spectrain.decoding.proposers import Observation, Proposal
from spectrain.decoding.sampling import GREEDY, SamplingParams
from spectrain.drafters.autoregressive.eagle3 import Eagle3

SAMPLED = SamplingParams(temperature=1.0)
N = 4


def draw(drafter: Eagle3, cache: object, anchors: Tensor, n: int = N, sampling: SamplingParams = SAMPLED) -> Proposal:
    return drafter.propose(
        cache, anchors, n, sampling, [torch.Generator().manual_seed(50 + b) for b in range(len(anchors))]
    )


def filled(drafter: Eagle3, texts: Texts, pieces: Sequence[Sequence[int]]) -> object:
    """A cache filled in several calls: ``pieces[i][b]`` tokens of row b in call i; each row gets all tokens but its
    anchor.
    """
    cache = drafter.new_cache(len(texts.ids))
    first = [0] * len(texts.ids)
    for counts in pieces:
        texts.observe(drafter, cache, first, counts)
        first = [start + count for start, count in zip(first, counts, strict=True)]
    assert first == texts.observed
    return cache


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: options.name)
def test_sampled_drafts_and_their_distributions_are_the_reference(options: Options) -> None:
    drafter, texts = random_drafter(options), Texts(options, [9, 5, 12])
    reference = reference_of(drafter)
    proposal = draw(drafter, filled(drafter, texts, [[8, 4, 11]]), texts.anchors)
    assert proposal.log_probs is not None and proposal.log_probs.shape == (3, N, VOCAB)
    for b, ids in enumerate(texts.ids):
        drafts = proposal.ids[b].tolist()
        with torch.no_grad():
            chain = reference.chain(ids.tolist(), texts.taps[b], N, drafts=drafts)
        for k in range(N):
            expected = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
            expected[reference.draft_ids] = torch.log_softmax(chain.logits[k], -1)
            torch.testing.assert_close(proposal.log_probs[b, k], expected, rtol=1e-9, atol=1e-9)
            assert drafts[k] in reference.draft_ids
    assert len({tuple(row) for row in proposal.ids.tolist()}) == 3


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: options.name)
def test_greedy_drafts_are_the_reference(options: Options) -> None:
    drafter, texts = random_drafter(options), Texts(options, [7, 10])
    reference = reference_of(drafter)
    proposal = drafter.propose(filled(drafter, texts, [[6, 9]]), texts.anchors, 6, GREEDY)  # deeper than it was trained
    assert proposal.log_probs is None
    with torch.no_grad():
        assert proposal.ids.tolist() == [
            reference.chain(ids.tolist(), taps, 6).tokens for ids, taps in zip(texts.ids, texts.taps, strict=True)
        ]


@pytest.mark.parametrize(
    "options", [Options(), Options(num_layers=2, layer_type="qwen3", norm_output=True)], ids=lambda o: o.name
)
def test_filling_in_pieces_is_filling_at_once(options: Options) -> None:
    """Rows advance by different counts, with drafts between the pieces; the buffers grow on the way (70 tokens)."""
    drafter, texts = random_drafter(options), Texts(options, [70, 9, 41])
    at_once = draw(drafter, filled(drafter, texts, [[69, 8, 40]]), texts.anchors)
    pieces = [[5, 1, 30], [1, 2, 1], [20, 1, 4], [42, 3, 1], [1, 1, 4]]
    in_pieces = draw(drafter, filled(drafter, texts, pieces), texts.anchors)
    assert torch.equal(at_once.ids, in_pieces.ids)
    torch.testing.assert_close(in_pieces.log_probs, at_once.log_probs, rtol=1e-10, atol=1e-10)

    # The same with a draft before each piece: what it wrote must be gone.
    cache = drafter.new_cache(3)
    first = [0, 0, 0]
    for counts in pieces:
        texts.observe(drafter, cache, first, counts)
        first = [start + count for start, count in zip(first, counts, strict=True)]
        draw(drafter, cache, torch.tensor([1, 2, 3]), n=7)
    disturbed = draw(drafter, cache, texts.anchors)
    assert torch.equal(disturbed.log_probs, in_pieces.log_probs) and torch.equal(disturbed.ids, in_pieces.ids)


def test_proposing_twice_gives_the_same_bits() -> None:
    options = Options(reduced=True)
    drafter, texts = random_drafter(options), Texts(options, [9, 5])
    cache = filled(drafter, texts, [[8, 4]])
    once, twice = draw(drafter, cache, texts.anchors), draw(drafter, cache, texts.anchors)
    assert torch.equal(once.ids, twice.ids) and torch.equal(once.log_probs, twice.log_probs)
    other = draw(drafter, cache, (texts.anchors + 1) % VOCAB)
    assert not torch.equal(other.log_probs[:, 0], once.log_probs[:, 0])  # the anchor enters at the first step


def test_rows_do_not_know_each_other() -> None:
    options = Options(num_layers=2)
    drafter, texts = random_drafter(options), Texts(options, [9, 5, 12])
    together = draw(drafter, filled(drafter, texts, [[3, 4, 1], [5, 0, 10]]), texts.anchors)
    for b in range(3):
        alone = Texts(options, [9, 5, 12])
        alone.ids, alone.taps = [texts.ids[b]], [texts.taps[b]]
        cache = filled(drafter, alone, [alone.observed])
        proposal = drafter.propose(cache, alone.anchors, N, SAMPLED, [torch.Generator().manual_seed(50 + b)])
        assert torch.equal(proposal.ids[0], together.ids[b])
        torch.testing.assert_close(proposal.log_probs[0], together.log_probs[b], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [[2, 0], [1], [0, 1, 2], [2, 2, 0]])
def test_selected_rows_go_on_as_before(rows: list[int]) -> None:
    options = Options()
    drafter, texts = random_drafter(options), Texts(options, [9, 5, 12])
    pieces = [[3, 1, 6], [5, 3, 5]]
    whole = drafter.propose(filled(drafter, texts, pieces), texts.anchors, N, GREEDY)
    cache = drafter.new_cache(3)
    texts.observe(drafter, cache, [0, 0, 0], pieces[0])
    cache = drafter.select(cache, torch.tensor(rows))
    kept = Texts(options, [1])
    kept.ids, kept.taps = [texts.ids[b] for b in rows], [texts.taps[b] for b in rows]
    kept.observe(drafter, cache, [pieces[0][b] for b in rows], [pieces[1][b] for b in rows])
    proposal = drafter.propose(cache, kept.anchors, N, GREEDY)
    assert proposal.ids.tolist() == whole.ids[rows].tolist()


@pytest.mark.parametrize("options", [VARIANTS[1], VARIANTS[6]], ids=lambda options: options.name)
def test_training_and_decoding_agree_without_the_reference(options: Options) -> None:
    """Teacher-forced unroll = drafting from the cache, when the draft happens to be the text (identity 5 within the
    package).
    """
    drafter = random_drafter(options)
    states = random_document("000111111", len(options.taps), seed=2)
    found = students(drafter, packed([states]))
    ids = states.input_ids.long()
    for t in (2, 4):
        cache = drafter.new_cache(1)
        drafter.observe(cache, Observation(ids[None, : t + 1], torch.tensor([t + 1]), states.taps[None, : t + 1]))
        proposal = draw(drafter, cache, ids[t + 1][None], n=1)
        logits = found[t, 0] @ drafter.lm_head_DH.T
        kept = drafter.vocab.ids_D
        torch.testing.assert_close(
            proposal.log_probs[0, 0, kept], torch.log_softmax(logits, -1).detach(), rtol=1e-9, atol=1e-9
        )


def test_a_truncated_distribution_is_what_drafts_are_drawn_from() -> None:
    options = Options(reduced=True)
    drafter, texts = random_drafter(options), Texts(options, [9, 5])
    cache = filled(drafter, texts, [[8, 4]])
    full = draw(drafter, cache, texts.anchors, n=1).log_probs
    cut = draw(drafter, cache, texts.anchors, n=1, sampling=SamplingParams(temperature=0.5, top_k=3)).log_probs
    for b in range(2):
        kept = full[b, 0].topk(3).indices
        expected = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
        expected[kept] = torch.log_softmax(full[b, 0, kept] / 0.5, -1)
        torch.testing.assert_close(cut[b, 0], expected, rtol=1e-9, atol=1e-9)


def test_what_is_missing_is_said() -> None:
    drafter = random_drafter()
    with pytest.raises(RuntimeError, match="observe"):
        drafter.propose(drafter.new_cache(1), torch.tensor([1]), 2, GREEDY)
    with pytest.raises(ValueError, match="taps"):
        drafter.observe(drafter.new_cache(1), Observation(torch.tensor([[1]]), torch.tensor([1])))
    cache = drafter.new_cache(1)
    taps = torch.zeros(1, 1, 3, HIDDEN, dtype=torch.float64)
    drafter.observe(cache, Observation(torch.tensor([[1]]), torch.tensor([1]), taps))
    with pytest.raises(ValueError, match="generator"):
        drafter.propose(cache, torch.tensor([1]), 2, SAMPLED)
    detached = type(drafter)(drafter.shape, drafter.vocab)
    with pytest.raises(RuntimeError, match="attach"):
        _ = detached.head
