"""A document's outputs do not depend on its neighbours, nor on anything behind the tokens a server would know at that
step.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from drafter_tools import (
    VOCAB,
    Options,
    gradients,
    packed,
    random_document,
    random_documents,
    random_drafter,
    split_by_document,
    students,
)
from torch import Tensor

from spectrain.config.drafter_schema import LossConfig
from spectrain.data.packing import PackedBatch
from spectrain.decoding.sampling import GREEDY, SamplingParams
from spectrain.drafters.autoregressive.eagle3 import Eagle3

BACKENDS = ["eager", "sdpa"]
SHAPES = [Options(), Options(num_layers=2, layer_type="qwen3", reduced=True, norm_output=True)]


def cases() -> list[Options]:
    return [replace(shape, attention=backend) for shape in SHAPES for backend in BACKENDS]


@pytest.mark.parametrize("options", cases(), ids=lambda options: options.name)
def test_a_document_alone_is_the_same_document_among_others(options: Options) -> None:
    drafter = random_drafter(options)
    documents = random_documents(options)
    together = students(drafter, packed(documents))
    seen = 0
    for states, start in zip(documents, split_by_document(documents), strict=True):
        for (t, k), hidden in students(drafter, packed([states])).items():
            torch.testing.assert_close(together[start + t, k], hidden, rtol=1e-10, atol=1e-10)
            seen += 1
    assert seen == len(together) > 30


@pytest.mark.parametrize("options", cases(), ids=lambda options: options.name)
def test_permuted_documents_give_permuted_outputs_and_the_same_gradients(options: Options) -> None:
    drafter = random_drafter(options)
    documents = random_documents(options, drafter.head)
    order = [3, 6, 0, 2, 5, 1, 4]
    found, starts = students(drafter, packed(documents)), split_by_document(documents)
    shuffled = [documents[i] for i in order]
    permuted, new_starts = students(drafter, packed(shuffled)), split_by_document(shuffled)
    moved = dict(zip([starts[i] for i in order], new_starts, strict=True))
    for (t, k), hidden in found.items():
        start = max(s for s in starts if s <= t)
        torch.testing.assert_close(permuted[moved[start] + t - start, k], hidden, rtol=1e-10, atol=1e-10)

    results = []
    for batch in (packed(documents), packed(shuffled)):
        drafter.zero_grad()
        drafter.train_losses(batch).loss.backward()
        results.append(gradients(drafter))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-8)


def scribbled(batch: PackedBatch, cut: int, end: int) -> PackedBatch:
    """Another text from position ``cut`` on (to ``end``): tokens at cut + 1 …, and what the target computed at cut …,
    are different.
    """
    generator = torch.Generator().manual_seed(9)
    ids, taps, hidden = batch.input_ids_T.clone(), batch.taps_TAH.clone(), batch.last_hidden_TH.clone()
    ids[cut + 1 : end] = (
        ids[cut + 1 : end] + 1 + torch.randint(0, VOCAB - 1, ids[cut + 1 : end].shape, generator=generator)
    ) % VOCAB
    taps[cut:end] = torch.randn(taps[cut:end].shape, generator=generator, dtype=taps.dtype) * 50
    hidden[cut:end] = torch.randn(hidden[cut:end].shape, generator=generator, dtype=hidden.dtype)
    return replace(batch, input_ids_T=ids, taps_TAH=taps, last_hidden_TH=hidden)


@pytest.mark.parametrize("options", cases(), ids=lambda options: options.name)
def test_nothing_behind_the_known_tokens_leaks_into_a_student(options: Options) -> None:
    """Student (t, k) knows tokens up to t + 1 + k and taps up to t. A change behind that leaves its bits alone; one
    before does not.
    """
    drafter = random_drafter(options)
    documents = random_documents(options, masks=("0011", "00011111110", "011"))
    batch, (_, start, end) = packed(documents), split_by_document(documents)
    before = students(drafter, batch)
    kept = changed = 0
    for cut in range(start, end):
        after = students(drafter, scribbled(batch, cut, end))
        for (t, k), hidden in before.items():
            outside = t < start or t >= end
            if outside or (t < cut and t + 1 + k <= cut):
                assert torch.equal(after[t, k], hidden), (cut, t, k)
                kept += 1
            else:
                assert (after[t, k] - hidden).abs().max() > 1e-6, (cut, t, k)
                changed += 1
    assert kept > 50 and changed > 50


def loss_of(drafter: Eagle3, batch: PackedBatch) -> Tensor:
    return drafter.train_losses(batch).loss.detach()


def test_loss_masks_are_no_input() -> None:
    """The mask decides what counts, never what is computed: the students of a mask are those of a wider one."""
    drafter = random_drafter(replace(SHAPES[1], steps=2))
    wide, narrow = packed([random_document("00111111", 3, 0)]), packed([random_document("00111111", 3, 0)])
    narrow.loss_mask_T = torch.tensor([0, 0, 0, 0, 1, 1, 1, 0]).bool()
    few, many = students(drafter, narrow), students(drafter, wide)
    assert set(few) == {(3, 0), (4, 0), (3, 1)}
    assert all(torch.allclose(hidden, many[key], rtol=1e-10, atol=1e-10) for key, hidden in few.items())


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", SHAPES, ids=lambda options: options.name)
def test_scores_of_a_document_alone_are_those_among_others(options: Options, sampling: SamplingParams) -> None:
    drafter = random_drafter(options)
    documents = random_documents(options, drafter.head)
    together = drafter.score(packed(documents), 4, sampling, sampling)
    place = {anchor: row for row, anchor in enumerate(together.anchor_R.tolist())}
    seen = 0
    for states, start in zip(documents, split_by_document(documents), strict=True):
        alone = drafter.score(packed([states]), 4, sampling, sampling)
        for anchor, accept_K in zip(alone.anchor_R.tolist(), alone.accept_RK, strict=True):
            torch.testing.assert_close(together.accept_RK[place[start + anchor]], accept_K, rtol=1e-5, atol=1e-6)
            seen += 1
    assert seen == len(together.anchor_R) > 10
    assert loss_of(drafter, packed(documents)) > 0


def test_training_losses_do_not_depend_on_padding_by_documents_without_answers() -> None:
    options = Options(loss=LossConfig(weights={"ce": 1.0, "kl": 1.0, "lk": 1.0}))
    drafter = random_drafter(options)
    text, empty = random_document("0001111", 3, 0, drafter.head), random_document("00000", 3, 1, drafter.head)
    alone = loss_of(drafter, packed([text]))
    for documents in ([empty, text], [text, empty], [empty, text, empty, empty]):
        torch.testing.assert_close(loss_of(drafter, packed(documents)), alone, rtol=1e-10, atol=0)
