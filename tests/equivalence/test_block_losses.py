"""Losses of block drafters against a loop over (document, anchor, draft) in float64: sums, counts, and every
parameter's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from block_reference import BlockDraft, BlockReference
from block_tools import (
    BLOCK_VARIANTS,
    DFLASH2,
    DSPARK,
    BlockOptions,
    block_reference_of,
    block_tensors,
    random_block_drafter,
)
from drafter_tools import MASKS, VOCAB, as_reference_document, gradients, packed, random_document
from reference import PlainDocument, loss_terms
from test_block_training import KINDS, ahead, texts
from torch import Tensor

from spectrain.config.drafter_schema import BlockConfig, DSparkConfig, LossConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.data.packing import Draw, pack_batch
from spectrain.drafters.block import block_training as training
from spectrain.drafters.block.block_drafter import BlockDrafter
from spectrain.drafters.losses import fused
from spectrain.drafters.losses import students as losses
from spectrain.drafters.losses.students import LossSums

EVERY_LOSS = {"ce": 0.3, "kl": 0.7, "tv": 1.1, "lk": 0.5}


def with_loss(options: BlockOptions, weights: dict[str, float], **block: object) -> BlockOptions:
    return replace(options, loss=LossConfig(weights=weights), block=BlockConfig(**block))  # type: ignore[arg-type]


@dataclass
class Sums:
    """Of the double loop; per draft of a block in lists of J."""

    loss: Tensor
    weight: float
    terms: dict[str, list[float]]
    hits: list[int]
    count: list[int]


def brute_force(reference: BlockReference, documents: list[PlainDocument], n: int, options: BlockOptions) -> Sums:
    """Σ over documents, anchors and drafts of weight · Σ_terms coefficient · term, with autograd through the naive
    formulas.
    """
    weights = options.loss.weights
    names = [*weights, *(["confidence"] if options.confidence else [])]
    total = Sums(torch.zeros((), dtype=torch.float64), 0.0, {name: [0.0] * n for name in names}, [0] * n, [0] * n)
    for document in documents:
        distributions = [reference.head.sampling(y_H) for y_H in document.last_hidden_SH]
        for a in range(len(document.ids)):
            counted = min(n, ahead(document.mask, a))
            if counted:
                one_block(reference, document, distributions, a, counted, n, options, total)
    return total


def one_block(
    reference: BlockReference,
    document: PlainDocument,
    distributions: list[Tensor],
    a: int,
    counted: int,
    n: int,
    options: BlockOptions,
    total: Sums,
) -> None:
    weights, block, dspark = options.loss.weights, options.block, options.dspark
    forced = (document.ids + [0] * n)[a + 1 : a + 1 + n]
    draft = reference.draft(document.ids[: a + 1], document.taps_SAH, n, drafts=forced)
    overlaps = [torch.minimum(draft.log_probs[k].exp(), distributions[a + k]).sum() for k in range(counted)]
    for k in range(counted):
        token, sampling = (
            document.ids[a + 1 + k],
            distributions[a + k],
        )  # draft k predicts x_{a+1+k}, as the target does at position a + k
        weight = math.exp(-k / block.decay)
        if block.d_pace:
            smooth = [(1 - block.d_pace_smoothing) * float(o.detach()) + block.d_pace_smoothing for o in overlaps]
            weight = sum(math.prod(smooth[: i + 1]) for i in range(k, counted))
        log_probs = draft.log_probs[k]
        ids = [v for v in range(len(sampling)) if log_probs[v] > -torch.inf]
        terms = loss_terms(log_probs[ids], ids, sampling, token)
        total.weight += weight
        total.count[k] += 1
        total.hits[k] += terms.hit
        found = [terms]
        if reference.top_k is not None:  # the distribution over all tokens, too
            found.append(loss_terms(draft.base[k], list(range(len(sampling))), sampling, token))
        for place, one in enumerate(found):
            for name, coefficient in weights.items():
                term = getattr(one, name)
                if term is not None:
                    total.loss = total.loss + weight * coefficient * term
                    total.terms[name][k] += float(term.detach()) if place == 0 else 0.0
        if draft.confidence:
            entropy = cross_entropy(
                reference, draft, document, a, k, float(overlaps[k].detach()), dspark.confidence_detach
            )
            total.loss = total.loss + weight * dspark.confidence_weight * entropy
            total.terms["confidence"][k] += float(entropy.detach())


def cross_entropy(
    reference: BlockReference, draft: BlockDraft, document: PlainDocument, a: int, k: int, goal: float, detach: bool
) -> Tensor:
    """Of the confidence against the acceptance probability; detached: only the confidence head's own tensors have a
    gradient.
    """
    if not detach:
        said = draft.confidence[k]
    else:
        x = draft.hidden[k].detach()
        if reference.confidence_with_markov:
            x = torch.cat([x, reference.tensors["markov_head.markov_w1.weight"][document.ids[a + k]].detach()])
        score = reference.tensors["confidence_head.proj.weight"] @ x + reference.tensors["confidence_head.proj.bias"]
        said = 1 / (1 + torch.exp(-score[0]))
    return -(goal * said.log() + (1 - goal) * (1 - said).log())


def assert_equals_brute_force(options: BlockOptions, masks: Sequence[str] = MASKS, stored: bool = True) -> None:
    drafter = random_block_drafter(options)
    documents = texts(options, drafter if stored else None, masks)
    reference = block_reference_of(drafter)
    expected = brute_force(reference, [as_reference_document(d) for d in documents], drafter.shape.num_drafts, options)
    sums = drafter.train_losses(packed(documents))
    assert float(sums.loss.detach()) == pytest.approx(float(expected.loss.detach()), rel=1e-9)
    assert float(sums.weight) == pytest.approx(expected.weight, rel=1e-9)
    assert sums.count_K.tolist() == expected.count
    assert sums.hits_K.tolist() == expected.hits
    assert set(sums.terms_K) == set(expected.terms) == set(drafter.loss_terms)
    for name, values in expected.terms.items():
        assert sums.terms_K[name].tolist() == pytest.approx(values, rel=1e-8), name

    sums.loss.backward()
    expected.loss.backward()
    found = gradients(drafter)
    assert set(found) == set(reference.tensors)
    for name, leaf in reference.tensors.items():
        assert leaf.grad is not None, name
        assert leaf.grad.abs().max() > 1e-5, f"{name}: the test would see nothing"
        torch.testing.assert_close(
            found[name], leaf.grad, rtol=1e-7, atol=1e-9, msg=lambda message, name=name: f"{name}: {message}"
        )


@pytest.mark.parametrize("options", BLOCK_VARIANTS, ids=lambda options: options.name)
def test_every_variant_with_the_losses_together(options: BlockOptions) -> None:
    assert_equals_brute_force(with_loss(options, EVERY_LOSS, decay=3.0))


@pytest.mark.parametrize(
    "weights", [{"ce": 1.0}, {"kl": 1.0}, {"tv": 1.0}, {"lk": 1.0}, {"ce": 0.1, "tv": 0.9}], ids="+".join
)
@pytest.mark.parametrize("options", [BlockOptions(reduced=True), DFLASH2], ids=lambda options: options.name)
def test_every_loss_alone(options: BlockOptions, weights: dict[str, float]) -> None:
    assert_equals_brute_force(with_loss(options, weights), masks=("0011111", "0000", "110111"))


@pytest.mark.parametrize("options", KINDS, ids=lambda options: options.name)
def test_without_stored_normalisers_the_same(options: BlockOptions) -> None:
    options = replace(with_loss(options, EVERY_LOSS), family="gemma2")
    assert_equals_brute_force(options, masks=("0011111", "110111"), stored=False)


@pytest.mark.parametrize("with_markov", [False, True])
def test_confidence_can_train_the_backbone(with_markov: bool) -> None:
    dspark = DSparkConfig(confidence_detach=False, confidence_weight=0.6)
    options = replace(DSPARK, confidence_with_markov=with_markov, dspark=dspark)
    assert_equals_brute_force(with_loss(options, {"tv": 1.0}), masks=("0011111", "110111"))


def test_confidence_loss_is_least_where_the_head_says_the_chance_of_acceptance() -> None:
    drafter = random_block_drafter(DSPARK)
    batch, head = packed(texts(DSPARK, drafter, ["011"])), drafter.body.confidence_head
    head.reset()
    goal = 1 - float(drafter.train_losses(batch).terms_K["tv"][0])  # one anchor, one draft
    found = []
    for said in (goal - 0.01, goal, goal + 0.01):
        head.proj.bias.data.fill_(math.log(said / (1 - said)))
        found.append(float(drafter.train_losses(batch).terms_K["confidence"][0]))
    assert found[1] == pytest.approx(-goal * math.log(goal) - (1 - goal) * math.log(1 - goal))
    assert found[1] < min(found[0], found[2])


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("options", KINDS, ids=lambda options: options.name)
def test_d_pace_weighs_slots_by_what_they_add_to_the_expected_length(options: BlockOptions, smoothing: float) -> None:
    assert_equals_brute_force(
        with_loss(options, EVERY_LOSS, d_pace=True, d_pace_smoothing=smoothing), masks=("0011111", "0111011111")
    )


def test_d_pace_keeps_a_slot_that_is_never_reached() -> None:
    """Its weight is less than any float32, but it counts in the statistics."""
    counted = training.Counted(torch.zeros(8, dtype=torch.long), torch.arange(8), torch.arange(8), [1] * 8)
    weight_S = training._d_pace(torch.full((8,), 1e-6), 0.0, counted, (1, 8))
    assert weight_S[0] == pytest.approx(1e-6, rel=1e-4) and bool((weight_S > 0).all())


@pytest.mark.parametrize("options", KINDS, ids=lambda options: options.name)
def test_chunks_and_attention_paths_change_nothing(options: BlockOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    row = 4 * VOCAB
    for chunk, tile, candidate, attention in (
        (1 << 25, 1 << 20, 1 << 25, "eager"),
        (1, 1, 1, "eager"),
        (7 * row, 3 * row, 900, "sdpa"),
    ):
        monkeypatch.setattr(losses, "CHUNK_BYTES", chunk)
        monkeypatch.setattr(fused, "_TILE_BYTES", tile)
        monkeypatch.setattr(training, "_CANDIDATE_BYTES", candidate)
        changed = with_loss(replace(options, attention=attention), EVERY_LOSS)
        drafter = random_block_drafter(changed)
        sums = drafter.train_losses(packed(texts(changed, drafter)))
        sums.loss.backward()
        results.append((sums, gradients(drafter)))
    (first, first_gradients), *others = results
    for sums, found in others:
        torch.testing.assert_close(sums.loss, first.loss, rtol=1e-9, atol=0)
        torch.testing.assert_close(sums.terms_K, first.terms_K, rtol=1e-9, atol=0)
        assert torch.equal(sums.hits_K, first.hits_K)
        torch.testing.assert_close(found, first_gradients, rtol=1e-7, atol=1e-9)


# ---- what has a gradient


@pytest.mark.parametrize("options", BLOCK_VARIANTS, ids=lambda options: options.name)
@pytest.mark.parametrize("masks", [["0000", "000", "01"], ["0"]])
def test_a_batch_in_which_nothing_counts_still_has_a_gradient_for_everything(
    options: BlockOptions, masks: list[str]
) -> None:
    """Ranks with text wait for those without."""
    drafter = random_block_drafter(options)
    sums = drafter.train_losses(packed(texts(options, drafter, masks)))
    assert float(sums.weight) == 0
    assert sums.count_K.tolist() == [0] * drafter.shape.num_drafts
    assert set(sums.terms_K) == set(drafter.loss_terms)
    sums.loss.backward()
    found = gradients(drafter)
    assert set(found) == set(block_tensors(drafter))
    assert all(bool((gradient == 0).all()) for gradient in found.values())


def test_context_before_the_last_anchor_trains_and_nothing_behind_it_does() -> None:
    options = BlockOptions()
    drafter = random_block_drafter(options)
    documents = [
        random_document("000111100", 3, seed=4),
        random_document("0000", 3, seed=5),
        random_document("011", 3, seed=6),
    ]
    batch = packed(documents)
    batch.taps_TAH.requires_grad_()
    drafter.train_losses(batch).loss.backward()
    assert batch.taps_TAH.grad is not None
    gradient_T = batch.taps_TAH.grad.abs().amax(dim=(1, 2))
    # The last anchor of the first text is 5 (6 ends the turn), of the third its second token.
    assert (gradient_T > 1e-9).nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 13]


def drawn_sums(drafter: BlockDrafter, documents: list[TargetStates], numbers: Sequence[int]) -> LossSums:
    return drafter.train_losses(pack_batch([documents[n] for n in numbers], draw=Draw(3, 5, tuple(numbers), 20)))


@pytest.mark.parametrize("options", KINDS, ids=lambda options: options.name)
def test_each_document_counts_by_itself(options: BlockOptions) -> None:
    """A batch's sums and gradients are the sums of its documents', drawn anchors included, so micro-batches and ranks
    may be added up.
    """
    options = with_loss(options, EVERY_LOSS, anchors=8)
    drafter = random_block_drafter(options)
    documents = texts(options, drafter)
    together = drawn_sums(drafter, documents, range(len(documents)))
    together.loss.backward()
    expected = gradients(drafter)
    everything = drafter.train_losses(packed(documents))
    assert int(together.count_K.sum()) < int(everything.count_K.sum())
    drafter.zero_grad()
    alone = [drawn_sums(drafter, documents, [n]) for n in (3, 0, 1, 6, 5, 4, 2)]
    for sums in alone:
        sums.loss.backward()
    assert float(together.loss.detach()) == pytest.approx(sum(float(sums.loss.detach()) for sums in alone), rel=1e-10)
    assert float(together.weight) == pytest.approx(sum(float(sums.weight) for sums in alone), rel=1e-6)
    assert together.count_K.tolist() == torch.stack([sums.count_K for sums in alone]).sum(0).tolist()
    torch.testing.assert_close(gradients(drafter), expected, rtol=1e-6, atol=1e-8)
