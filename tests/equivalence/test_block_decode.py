"""A block drafter's own cache drafts what the reference implementation drafts without one, however the cache was
filled, and drafting leaves no trace in it.

Fresh heads change nothing, what comes after the anchor changes nothing, and a shorter draft is a shorter block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import drafter_tools
import pytest
import torch
from block_tools import (
    BLOCK_VARIANTS,
    DFLASH2,
    DSPARK,
    MASK_TOKEN,
    BlockOptions,
    block_reference_of,
    random_block_drafter,
)
from drafter_tools import HIDDEN, VOCAB, random_head
from torch import Tensor

from spectrain.decoding.proposers import Observation, Proposal
from spectrain.decoding.sampling import GREEDY, SamplingParams, truncated_log_probs
from spectrain.drafters.block.block_drafter import BlockDrafter

SAMPLED = SamplingParams(temperature=1.0)


def most(drafter: BlockDrafter) -> int:
    return drafter.shape.num_drafts


class Texts(drafter_tools.Texts):
    sink = 1000.0


def filled(
    drafter: BlockDrafter, texts: Texts, pieces: Sequence[Sequence[int]] | None = None, disturb: bool = False
) -> object:
    """A cache filled in several calls: ``pieces[i][b]`` tokens of row b in call i; each row gets all tokens but its
    anchor.
    """
    cache = drafter.new_cache(len(texts.ids))
    first = [0] * len(texts.ids)
    for counts in pieces or [[len(ids) - 1 for ids in texts.ids]]:
        texts.observe(drafter, cache, first, counts)
        first = [start + count for start, count in zip(first, counts, strict=True)]
        if disturb:
            draw(drafter, cache, torch.arange(len(first)))
    assert first == [len(ids) - 1 for ids in texts.ids]
    return cache


def draw(
    drafter: BlockDrafter, cache: object, anchors: Tensor, n: int | None = None, sampling: SamplingParams = SAMPLED
) -> Proposal:
    generators = None if sampling.greedy else [torch.Generator().manual_seed(50 + b) for b in range(len(anchors))]
    return drafter.propose(cache, anchors, n or most(drafter), sampling, generators)


@pytest.mark.parametrize("options", BLOCK_VARIANTS, ids=lambda options: options.name)
def test_sampled_drafts_their_distributions_and_confidences_are_the_reference(options: BlockOptions) -> None:
    drafter, texts = random_block_drafter(options), Texts(options, [9, 2, 12])
    reference = block_reference_of(drafter)
    proposal = draw(drafter, filled(drafter, texts), texts.anchors)
    assert proposal.log_probs is not None and proposal.log_probs.shape == (3, most(drafter), VOCAB)
    assert (proposal.confidence is not None) == options.confidence
    for b, ids in enumerate(texts.ids):
        drafts = proposal.ids[b].tolist()
        with torch.no_grad():
            expected = reference.draft(ids.tolist(), texts.taps[b], most(drafter), drafts)
        torch.testing.assert_close(proposal.log_probs[b], torch.stack(expected.log_probs), rtol=1e-8, atol=1e-8)
        if proposal.confidence is not None:
            torch.testing.assert_close(proposal.confidence[b], torch.stack(expected.confidence), rtol=1e-8, atol=1e-8)
    assert len({tuple(row) for row in proposal.ids.tolist()}) == 3
    chosen = proposal.log_probs.gather(-1, proposal.ids[..., None])
    assert bool(torch.isfinite(chosen).all())


@pytest.mark.parametrize("options", BLOCK_VARIANTS, ids=lambda options: options.name)
def test_greedy_drafts_of_every_length_are_the_reference(options: BlockOptions) -> None:
    drafter, texts = random_block_drafter(options), Texts(options, [7, 10])
    reference = block_reference_of(drafter)
    for n in range(1, most(drafter) + 1):
        proposal = draw(drafter, filled(drafter, texts), texts.anchors, n, GREEDY)
        assert proposal.log_probs is None
        with torch.no_grad():
            expected = [
                reference.draft(ids.tolist(), taps, n).tokens for ids, taps in zip(texts.ids, texts.taps, strict=True)
            ]
        assert proposal.ids.tolist() == expected


def test_length_of_a_block_matters_where_slots_see_each_other() -> None:
    """So a simulation for n drafts must score blocks of n drafts. Under causal attention a shorter block is the
    beginning of a longer one.
    """
    for options, same in ((BlockOptions(), False), (BlockOptions(window=20, causal=True), True), (DSPARK, False)):
        drafter, texts = random_block_drafter(options), Texts(options, [9])
        whole = draw(drafter, filled(drafter, texts), texts.anchors)
        short = draw(drafter, filled(drafter, texts), texts.anchors, 1)
        assert torch.allclose(short.log_probs[:, 0], whole.log_probs[:, 0], atol=1e-9) == same


@pytest.mark.parametrize("options", [BlockOptions(), DSPARK, DFLASH2], ids=lambda o: o.method)
def test_filling_in_pieces_is_filling_at_once(options: BlockOptions) -> None:
    """Rows advance by different counts; the buffers grow on the way (70 tokens)."""
    drafter, texts = random_block_drafter(options), Texts(options, [70, 9, 41])
    at_once = draw(drafter, filled(drafter, texts), texts.anchors)
    pieces = [[5, 1, 30], [1, 2, 1], [20, 1, 4], [42, 3, 1], [1, 1, 4]]
    in_pieces = draw(drafter, filled(drafter, texts, pieces), texts.anchors)
    assert torch.equal(at_once.ids, in_pieces.ids)
    torch.testing.assert_close(in_pieces.log_probs, at_once.log_probs, rtol=1e-9, atol=1e-9)
    # The same with a draft after each piece: it must have left no trace.
    disturbed = draw(drafter, filled(drafter, texts, pieces, disturb=True), texts.anchors)
    assert torch.equal(disturbed.log_probs, in_pieces.log_probs) and torch.equal(disturbed.ids, in_pieces.ids)


@pytest.mark.parametrize("options", [BlockOptions(), DSPARK, DFLASH2], ids=lambda o: o.method)
def test_select_keeps_each_row(options: BlockOptions) -> None:
    drafter, texts = random_block_drafter(options), Texts(options, [9, 5, 12])
    before = draw(drafter, filled(drafter, texts), texts.anchors, sampling=GREEDY)
    cache = drafter.select(filled(drafter, texts), torch.tensor([2, 0]))
    after = draw(drafter, cache, texts.anchors[[2, 0]], sampling=GREEDY)
    assert after.ids.tolist() == before.ids[[2, 0]].tolist()


@pytest.mark.parametrize("options", BLOCK_VARIANTS, ids=lambda options: options.name)
def test_nothing_behind_the_anchor_leaks(options: BlockOptions) -> None:
    """The anchor's own taps and all later tokens may be anything: distributions are equal to the bit. The token before
    it matters.
    """
    drafter, texts = random_block_drafter(options), Texts(options, [9])
    sampling = draw(drafter, filled(drafter, texts), texts.anchors).log_probs
    other = Texts(options, [9])
    other.taps[0][8] = 77.0
    cache = filled(drafter, other)
    # What a rejected draft leaves in the buffers: more columns were written than count.
    scratch = drafter.new_cache(1)
    ids, taps = (
        torch.zeros(1, 20, dtype=torch.long),
        torch.full((1, 20, len(options.taps), HIDDEN), 5.0, dtype=torch.float64),
    )
    taps[0, :8] = texts.taps[0][:8]
    drafter.observe(scratch, Observation(ids, torch.tensor([8]), taps))
    for found in (cache, scratch):
        assert torch.equal(draw(drafter, found, texts.anchors).log_probs, sampling)
    other.taps[0][7] += 1e-3
    assert not torch.equal(draw(drafter, filled(drafter, other), texts.anchors).log_probs, sampling)


def test_neutral_heads_are_dflash() -> None:
    """A Markov head of zeros, and identity convolutions with zero codebooks, give DFlash's distributions to the bit."""
    plain, texts = random_block_drafter(BlockOptions()), Texts(BlockOptions(), [9, 6])
    sampling = draw(plain, filled(plain, texts), texts.anchors).log_probs
    for options in (replace(BlockOptions(), method="dspark", markov="vanilla"), replace(DFLASH2, selector=VOCAB)):
        drafter = random_block_drafter(options, seed=3, head=plain.head)
        drafter.body.load_state_dict(plain.body.state_dict(), strict=False)
        assert not torch.equal(draw(drafter, filled(drafter, texts), texts.anchors).log_probs, sampling)
        drafter.body.reset_heads(torch.Generator().manual_seed(0))
        if drafter.body.markov_head is not None:
            drafter.body.markov_head.markov_w2.weight.data.zero_()
            assert torch.equal(draw(drafter, filled(drafter, texts), texts.anchors).log_probs, sampling)
        else:  # candidates are sorted before they are normalised, so sums may differ in the last bit
            torch.testing.assert_close(
                draw(drafter, filled(drafter, texts), texts.anchors).log_probs, sampling, rtol=1e-13, atol=1e-13
            )


@pytest.mark.parametrize("options", [BlockOptions(reduced=True), DSPARK, DFLASH2], ids=lambda o: o.method)
def test_reported_distribution_is_the_distribution_that_is_drawn_from(options: BlockOptions) -> None:
    """Relative frequencies of first and second drafts over many streams are the reported distributions, under
    temperature and truncation too.
    """
    drafter, texts = random_block_drafter(options), Texts(options, [6])
    sampling = SamplingParams(temperature=1.3, top_k=4)
    cache = drafter.select(filled(drafter, texts), torch.zeros(4000, dtype=torch.long))
    streams = [torch.Generator().manual_seed(b) for b in range(4000)]
    proposal = drafter.propose(cache, texts.anchors.expand(4000), 2, sampling, streams)
    p_V = proposal.log_probs[0, 0].exp()
    frequency_V = torch.bincount(proposal.ids[:, 0], minlength=VOCAB) / 4000
    assert int((p_V > 0).sum()) == 4
    assert float((frequency_V - p_V).abs().max()) < 4 * 0.5 / 4000**0.5
    first = int(p_V.argmax())
    rows = proposal.ids[:, 0] == first
    p_V = proposal.log_probs[rows][0, 1].exp()
    assert bool((proposal.log_probs[rows][:, 1] == proposal.log_probs[rows][0, 1]).all())
    frequency_V = torch.bincount(proposal.ids[rows, 1], minlength=VOCAB) / rows.sum()
    assert float((frequency_V - p_V).abs().max()) < 4 * 0.5 / int(rows.sum()) ** 0.5


def test_distribution_of_a_temperature_is_that_of_the_reference_logits() -> None:
    drafter, texts = random_block_drafter(BlockOptions()), Texts(BlockOptions(), [8])
    sampling = SamplingParams(temperature=0.7, top_p=0.8)
    proposal = draw(drafter, filled(drafter, texts), texts.anchors, sampling=sampling)
    with torch.no_grad():
        base = torch.stack(block_reference_of(drafter).draft(texts.ids[0].tolist(), texts.taps[0], most(drafter)).base)
    torch.testing.assert_close(proposal.log_probs[0], truncated_log_probs(base, sampling), rtol=1e-8, atol=1e-8)


def test_confidence_is_calibrated_slot_by_slot() -> None:
    drafter, texts = random_block_drafter(DSPARK), Texts(DSPARK, [8])
    raw = draw(drafter, filled(drafter, texts), texts.anchors).confidence
    drafter.temperatures = (2.0, 0.5)
    found = draw(drafter, filled(drafter, texts), texts.anchors).confidence
    logit = torch.logit(raw)
    torch.testing.assert_close(found[:, 0], torch.sigmoid(logit[:, 0] / 2))
    torch.testing.assert_close(found[:, 1], torch.sigmoid(logit[:, 1] * 2))
    assert torch.equal(found[:, 2:], raw[:, 2:])


def test_what_cannot_be_drafted_is_refused() -> None:
    drafter, texts = random_block_drafter(BlockOptions()), Texts(BlockOptions(), [5])
    with pytest.raises(ValueError, match="4 drafts, 5 were asked for"):
        drafter.propose(filled(drafter, texts), texts.anchors, 5, GREEDY)
    with pytest.raises(ValueError, match="taps"):
        drafter.observe(drafter.new_cache(1), Observation(torch.zeros(1, 2, dtype=torch.long), torch.tensor([2])))
    with pytest.raises(ValueError, match="generator"):
        drafter.propose(filled(drafter, texts), texts.anchors, 2, SAMPLED)


def test_mask_token_fills_the_slots_behind_the_anchor() -> None:
    drafter = random_block_drafter(BlockOptions())
    head = random_head()
    found = drafter.body.block_input(torch.tensor([2, 9]), head)
    assert torch.equal(found[:, 0], head.embed_rows(torch.tensor([2, 9])))
    assert torch.equal(found[:, 1:], head.embed_rows(torch.full((2, 4), MASK_TOKEN)))
