"""The last row of a document is never read: what a drafter would predict from there lies outside the document.

States captured by a server lack that row (the last token never ran), and hold zeros in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from drafter_tools import VARIANTS, Options, as_dtype, gradients, packed, random_documents, random_drafter, random_head

from spectrain.data.hidden_states import TargetStates
from spectrain.data.packing import PackedBatch
from spectrain.decoding.sampling import GREEDY, SamplingParams
from spectrain.drafters.autoregressive.eagle3 import Eagle3

FILLINGS = [0.0, 3.0, -1e4]


def with_last_row(documents: Sequence[TargetStates], value: float, row: int = -1) -> list[TargetStates]:
    filled = []
    for document in documents:
        taps, last_hidden = document.taps.clone(), document.last_hidden.clone()
        taps[row], last_hidden[row] = value, value
        filled.append(replace(document, taps=taps, last_hidden=last_hidden))
    return filled


def results(drafter: Eagle3, batch: PackedBatch) -> list[torch.Tensor]:
    drafter.zero_grad()
    losses = drafter.train_losses(batch)
    losses.loss.backward()
    found = [losses.loss.detach(), *(tensor for _, tensor in sorted(gradients(drafter).items()))]
    for sampling in (GREEDY, SamplingParams(temperature=0.7)):
        scores = drafter.score(batch, drafter.training_steps, sampling, sampling)
        found += [value for value in vars(scores).values() if isinstance(value, torch.Tensor)]
    return found


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: options.name)
def test_no_loss_gradient_or_score_depends_on_the_last_row(options: Options) -> None:
    drafter = random_drafter(options)
    documents = random_documents(options, drafter.head)
    expected = results(drafter, packed(documents))
    assert len(expected) > 10
    for value in FILLINGS:
        for found, wanted in zip(results(drafter, packed(with_last_row(documents, value))), expected, strict=True):
            assert found.equal(wanted) or torch.allclose(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_the_row_before_is_read() -> None:
    drafter = random_drafter()
    documents = random_documents(Options(), drafter.head)
    assert not results(drafter, packed(documents))[0].equal(
        results(drafter, packed(with_last_row(documents, 3.0, row=-2)))[0]
    )


def test_the_closed_form_init_does_not_read_it() -> None:
    weights = []
    for value in (None, 0.0, 7.0):
        head = random_head(dtype=torch.float32)
        head.embed_weight.add_(2.0)  # some direction must be nearly constant
        drafter = random_drafter(dtype=torch.float32, head=head)
        documents = [
            as_dtype(document, torch.float32) for document in random_documents(Options(), masks=["00" + "1" * 30] * 30)
        ]
        documents = documents if value is None else with_last_row(documents, value)
        columns = drafter.closed_form_init(lambda documents=documents: [packed(documents)])
        weights.append([columns, *(parameter.detach().clone() for parameter in drafter.parameters())])
    assert weights[0][0] > 0
    for other in weights[1:]:
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(weights[0], other, strict=True))
