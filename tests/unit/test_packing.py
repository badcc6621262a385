"""Packing: every document exactly once, no row too full, and a batch that is its documents laid end to end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from drafter_tools import random_document
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.data.packing import pack_batch, pack_rows, truncated_tokens

lengths_of_documents = st.lists(st.integers(1, 60), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(lengths_of_documents, st.integers(1, 50), st.integers(0, 2**31), st.integers(0, 5))
def test_rows_hold_every_document_once_and_are_never_too_full(
    lengths: list[int], packed_length: int, seed: int, epoch: int
) -> None:
    rows = pack_rows(lengths, packed_length, seed, epoch)
    assert Counter(d for row in rows for d in row) == Counter(range(len(lengths)))
    assert all(row for row in rows)
    assert max(sum(min(lengths[d], packed_length) for d in row) for row in rows) <= packed_length
    assert pack_rows(lengths, packed_length, seed, epoch) == rows  # stateless


@settings(max_examples=60, deadline=None)
@given(lengths_of_documents, st.integers(1, 50), st.integers(0, 2**31))
def test_each_document_goes_where_it_leaves_least_room(lengths: list[int], packed_length: int, seed: int) -> None:
    """Best fit by looking at every sequence; of several with the same room, the one begun first."""
    rng = np.random.default_rng((seed, 0))
    shuffled = rng.permutation(len(lengths))
    needs = {d: min(lengths[d], packed_length) for d in range(len(lengths))}
    noise = rng.uniform(0.9, 1.1, size=len(lengths)).tolist()
    noisy = {int(d): needs[d] * factor for d, factor in zip(shuffled, noise, strict=True)}
    rows: list[list[int]] = []
    for document in sorted((int(d) for d in shuffled), key=lambda d: -noisy[d]):
        rooms = [packed_length - sum(needs[d] for d in row) - needs[document] for row in rows]
        fitting = [(room, row) for row, room in enumerate(rooms) if room >= 0]
        if fitting:
            rows[min(fitting)[1]].append(document)
        else:
            rows.append([document])
    wanted = [rows[row] for row in rng.permutation(len(rows))]
    assert pack_rows(lengths, packed_length, seed, 0) == wanted


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=20, max_size=80), st.integers(0, 1000))
def test_rows_are_well_filled(lengths: list[int], seed: int) -> None:
    """Best fit leaves at most one row half empty: two such rows would have been one."""
    rows = pack_rows(lengths, 32, seed, 0)
    assert sum(sum(lengths[d] for d in row) <= 16 for row in rows) <= 1


@pytest.mark.parametrize(("length", "count", "rows"), [(16, 20, 10), (8, 20, 5), (32, 3, 3)])
def test_documents_that_fit_exactly_share_a_row(length: int, count: int, rows: int) -> None:
    assert len(pack_rows([length] * count, 32, seed=0, epoch=0)) == rows


def test_epochs_and_seeds_shuffle() -> None:
    lengths = [5, 9, 13, 7, 11, 6, 8, 12, 10, 4] * 3
    one = pack_rows(lengths, 30, seed=0, epoch=0)
    assert one != pack_rows(lengths, 30, seed=0, epoch=1)
    assert one != pack_rows(lengths, 30, seed=1, epoch=0)
    assert {frozenset(row) for row in one} != {
        frozenset(row) for row in pack_rows(lengths, 30, seed=0, epoch=1)
    }  # other neighbours too


def test_documents_of_one_length_are_not_always_in_the_same_order() -> None:
    firsts = {pack_rows([4] * 8, 4, seed=0, epoch=epoch)[0][0] for epoch in range(12)}
    assert len(firsts) > 3


def test_a_batch_is_its_documents_end_to_end() -> None:
    documents = [random_document("00111", 2, 0), random_document("1", 2, 1), random_document("0110", 2, 2)]
    batch = pack_batch(documents)
    assert batch.num_tokens == 10
    assert batch.lengths() == [5, 1, 4]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3]
    assert batch.document_ids_T.tolist() == [0] * 5 + [1] + [2] * 4
    assert batch.loss_mask_T.tolist() == [m == "1" for m in "001111" + "0110"]
    assert (batch.input_ids_T.dtype, batch.loss_mask_T.dtype) == (torch.int64, torch.bool)
    for (start, end), states in zip([(0, 5), (5, 6), (6, 10)], documents, strict=True):
        assert batch.input_ids_T[start:end].tolist() == states.input_ids.tolist()
        assert torch.equal(batch.taps_TAH[start:end], states.taps)
        assert torch.equal(batch.last_hidden_TH[start:end], states.last_hidden)
    assert batch.log_normalizer_T is None


def test_a_long_document_loses_its_tail_only() -> None:
    documents = [random_document("0001111111", 2, 0), random_document("011", 2, 1)]
    documents = [replace(d, log_normalizer=torch.arange(len(d.input_ids)).float()) for d in documents]
    batch = pack_batch(documents, max_tokens=4)
    assert batch.lengths() == [4, 3]
    assert batch.input_ids_T.tolist() == documents[0].input_ids[:4].tolist() + documents[1].input_ids.tolist()
    assert torch.equal(batch.taps_TAH, torch.cat([documents[0].taps[:4], documents[1].taps]))
    assert batch.log_normalizer_T is not None
    assert batch.log_normalizer_T.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert truncated_tokens([10, 3, 4], 4) == 6
    assert truncated_tokens([3, 4], 4) == 0


def test_normalisers_are_taken_from_all_or_from_none() -> None:
    with_normalizer = replace(random_document("011", 1, 0), log_normalizer=torch.ones(3))
    assert pack_batch([with_normalizer, random_document("011", 1, 1)]).log_normalizer_T is None
    assert pack_batch([with_normalizer]).log_normalizer_T is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_keep_their_dtype(dtype: torch.dtype) -> None:
    states = random_document("011", 1, 0)
    batch = pack_batch([replace(states, taps=states.taps.to(dtype), last_hidden=states.last_hidden.to(dtype))]).to(
        "cpu"
    )
    assert (batch.taps_TAH.dtype, batch.last_hidden_TH.dtype, batch.input_ids_T.dtype) == (dtype, dtype, torch.int64)
