"""``train_losses`` against a double loop over (document, column, step) in float64: sums, counts, and the gradient of
every parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from drafter_tools import (
    VARIANTS,
    Options,
    as_reference_document,
    gradients,
    packed,
    random_document,
    random_documents,
    random_drafter,
    reference_of,
    split_by_document,
)
from reference import brute_force_loss

from spectrain.config.drafter_schema import LossConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.drafters.autoregressive.eagle3 import Eagle3
from spectrain.drafters.losses import students as losses

EVERY_LOSS = {"ce": 0.3, "kl": 0.7, "tv": 1.1, "lk": 0.5}
MIXES = [{"ce": 1.0}, {"kl": 1.0}, {"tv": 1.0}, {"lk": 1.0}, {"ce": 0.1, "tv": 0.9}, EVERY_LOSS]


def with_loss(options: Options, weights: dict[str, float], step_decay: float = 0.8, **changes: object) -> Options:
    return replace(options, loss=LossConfig(weights=weights), step_decay=step_decay, **changes)  # type: ignore[arg-type]


def assert_equals_brute_force(drafter: Eagle3, documents: Sequence[TargetStates], options: Options) -> None:
    reference, loss = reference_of(drafter), options.loss
    expected = brute_force_loss(
        reference, [as_reference_document(d) for d in documents], options.steps, loss.weights, options.step_decay
    )
    sums = drafter.train_losses(packed(documents))
    assert float(sums.loss.detach()) == pytest.approx(float(expected.loss.detach()), rel=1e-6)  # weights are float32
    assert float(sums.weight) == pytest.approx(expected.weight, rel=1e-6)
    assert sums.count_K.tolist() == expected.count
    assert sums.hits_K.tolist() == expected.hits
    assert set(sums.terms_K) == set(loss.weights)
    for name, values in expected.terms.items():
        assert sums.terms_K[name].tolist() == pytest.approx(values, rel=1e-9), name

    drafter.zero_grad()
    sums.loss.backward()
    expected.loss.backward()
    found = gradients(drafter)
    assert set(found) == set(reference.tensors)
    for name, leaf in reference.tensors.items():
        assert leaf.grad is not None
        assert leaf.grad.abs().max() > 1e-4, f"{name}: the test would see nothing"
        torch.testing.assert_close(
            found[name], leaf.grad, rtol=1e-5, atol=1e-7, msg=lambda message, name=name: f"{name}: {message}"
        )


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: options.name)
def test_every_variant_with_the_losses_together(options: Options) -> None:
    options = with_loss(options, EVERY_LOSS)
    drafter = random_drafter(options)
    assert_equals_brute_force(drafter, random_documents(options, drafter.head), options)


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize("weights", MIXES, ids="+".join)
def test_every_loss_alone(weights: dict[str, float], reduced: bool) -> None:
    options = with_loss(Options(), weights, step_decay=0.5, reduced=reduced)
    drafter = random_drafter(options)
    documents = random_documents(options, drafter.head, masks=("0011111", "0000", "110111"))
    assert_equals_brute_force(drafter, documents, options)


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_without_stored_normalisers_the_same(reduced: bool) -> None:
    options = with_loss(Options(family="gemma2"), EVERY_LOSS, reduced=reduced)
    drafter = random_drafter(options)
    assert_equals_brute_force(drafter, random_documents(options, None, masks=("0011111", "110111")), options)


def test_each_document_counts_by_itself() -> None:
    """A batch's sums are the sums of its documents', so micro-batches and ranks may be added up."""
    options = with_loss(Options(reduced=True), EVERY_LOSS)
    drafter = random_drafter(options)
    documents = random_documents(options, drafter.head)
    together = drafter.train_losses(packed(documents))
    alone = [drafter.train_losses(packed([d])) for d in documents]
    assert float(together.loss.detach()) == pytest.approx(sum(float(sums.loss.detach()) for sums in alone), rel=1e-10)
    assert float(together.weight) == pytest.approx(sum(float(sums.weight) for sums in alone), rel=1e-6)
    assert together.count_K.tolist() == torch.stack([sums.count_K for sums in alone]).sum(0).tolist()


@pytest.mark.parametrize("masks", [["0000"], ["0000", "000", "01"], ["0"]])
def test_a_batch_in_which_nothing_counts_still_has_a_gradient_for_everything(masks: list[str]) -> None:
    """Ranks with text wait for those without."""
    drafter = random_drafter(Options(reduced=True))
    sums = drafter.train_losses(packed(random_documents(Options(), drafter.head, masks=masks)))
    assert float(sums.weight) == 0
    assert sums.count_K.tolist() == [0, 0, 0]
    sums.loss.backward()
    found = gradients(drafter)
    assert set(found) == {name.removeprefix("body.") for name, _ in drafter.named_parameters()}
    assert all(bool((gradient == 0).all()) for gradient in found.values())


def tap_gradient(drafter: Eagle3, documents: Sequence[TargetStates]) -> torch.Tensor:
    """Largest gradient that reaches each position's taps, [T]."""
    batch = packed(documents)
    batch.taps_TAH.requires_grad_()
    drafter.train_losses(batch).loss.backward()
    assert batch.taps_TAH.grad is not None
    return batch.taps_TAH.grad.abs().amax(dim=(1, 2))


def test_the_last_prompt_column_trains_and_nothing_behind_the_end_of_turn_does() -> None:
    drafter = random_drafter(Options())
    # Two generated tokens: the only student is column 2, the last of the prompt, at step 0.
    gradient = tap_gradient(drafter, [random_document("000110", 3, seed=3)])
    assert gradient[2] > 1e-3
    assert bool((gradient[3:] == 0).all())
    # Ends of turn at 6: column 5 holds it and column 6 comes after it. Neither is ever a query nor seen by one.
    gradient = tap_gradient(drafter, [random_document("000111100", 3, seed=4), random_document("0000", 3, seed=5)])
    assert bool((gradient[:5] > 1e-6).all())
    assert bool((gradient[5:] == 0).all())


def test_gradients_stay_inside_their_document() -> None:
    options = Options(num_layers=2)
    drafter = random_drafter(options)
    documents = random_documents(options, masks=("00111", "0000", "0111"))
    starts = split_by_document(documents)
    gradient = tap_gradient(drafter, documents)
    assert bool((gradient[: starts[1]] > 0).any())
    assert bool((gradient[starts[1] : starts[2]] == 0).all())
    assert bool((gradient[starts[2] :] > 0).any())


@pytest.mark.parametrize("options", [Options(), Options(reduced=True, num_layers=2)], ids=lambda options: options.name)
def test_chunks_and_attention_paths_change_nothing(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk_bytes, attention in ((losses.CHUNK_BYTES, "eager"), (1, "eager"), (4 * 3 * 9 * 4, "sdpa")):
        monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_bytes)
        changed = with_loss(options, EVERY_LOSS, attention=attention)
        drafter = random_drafter(changed)
        sums = drafter.train_losses(packed(random_documents(changed, drafter.head)))
        sums.loss.backward()
        results.append((sums, gradients(drafter)))
    (first, first_gradients), *others = results
    for sums, found in others:
        torch.testing.assert_close(sums.loss, first.loss, rtol=1e-9, atol=0)
        torch.testing.assert_close(sums.terms_K, first.terms_K, rtol=1e-9, atol=0)
        assert torch.equal(sums.hits_K, first.hits_K)
        torch.testing.assert_close(found, first_gradients, rtol=1e-7, atol=1e-9)
