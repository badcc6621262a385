"""The draft vocabulary: which tokens are kept, what they cover, and the offsets a server reads."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.data.vocab import build_vocab, full_vocab, vocab_from_d2t
from spectrain.errors import ConfigError

V = 20


def document(ids: list[int], mask: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8)


def test_the_most_frequent_generated_tokens_are_kept() -> None:
    documents = [document([9, 9, 9, 9, 5, 5, 7], [0, 0, 0, 0, 1, 1, 1]), document([3, 5, 7, 2], [1, 1, 1, 1])]
    # Generated: 5 three times, 7 twice, 2 and 3 once; 9 in prompts only.
    vocab = build_vocab(documents, 3, V)
    assert vocab.ids_D.tolist() == [2, 5, 7]  # of the tie, the lower id
    assert vocab.coverage == pytest.approx(6 / 7)
    assert vocab.target_size == V and not vocab.is_full


def test_prompts_and_then_low_ids_fill_what_is_left() -> None:
    vocab = build_vocab([document([9, 9, 8, 5], [0, 0, 0, 1])], 5, V)
    assert vocab.ids_D.tolist() == [0, 1, 5, 8, 9]
    assert vocab.coverage == 1.0
    # Twenty occurrences in prompts weigh as one that was generated.
    assert build_vocab([document([9] * 19 + [5], [0] * 19 + [1])], 1, V).ids_D.tolist() == [5]
    assert build_vocab([document([9] * 21 + [5], [0] * 21 + [1])], 1, V).ids_D.tolist() == [9]


def test_what_the_target_expected_to_say_counts_as_if_it_had() -> None:
    documents = [document([5, 5, 7, 3], [1, 1, 1, 1])]
    expected_V = np.zeros(V)
    expected_V[[11, 3]] = 1.5, 0.25
    vocab = build_vocab(documents, 3, V, expected_V)
    assert vocab.ids_D.tolist() == [3, 5, 11]  # 1 + 0.25 before the 1 of token 7
    assert vocab.coverage == pytest.approx(3 / 4)  # of what was said, not of what was expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, V - 1), st.booleans()), min_size=1, max_size=80), st.integers(1, V - 1))
def test_no_dropped_token_scores_more_than_a_kept_one(tokens: list[tuple[int, bool]], size: int) -> None:
    vocab = build_vocab([document([t for t, _ in tokens], [int(m) for _, m in tokens])], size, V)
    generated, prompted = (Counter(t for t, m in tokens if m == wanted) for wanted in (True, False))
    scores = [generated[t] + prompted[t] / 20 for t in range(V)]
    kept = vocab.ids_D.tolist()
    assert kept == sorted(set(kept)) and len(kept) == size
    assert min(scores[t] for t in kept) >= max(scores[t] for t in range(V) if t not in kept) - 1e-9
    total = sum(generated.values())
    assert vocab.coverage == pytest.approx(sum(generated[t] for t in kept) / total if total else 1.0)


def test_offsets_and_lookups_are_inverse() -> None:
    vocab = build_vocab([document([19, 4, 4, 11, 0], [1, 1, 1, 1, 1])], 4, V)
    assert vocab.ids_D.tolist() == [0, 4, 11, 19]
    assert vocab.d2t().tolist() == [0, 3, 9, 16]
    assert vocab.d2t().dtype == torch.int64
    lookup = vocab.target_to_draft()
    assert [lookup[i].item() for i in vocab.ids_D] == [0, 1, 2, 3]
    assert int((lookup == -1).sum()) == V - 4
    again = vocab_from_d2t(vocab.d2t(), V)
    assert torch.equal(again.ids_D, vocab.ids_D) and again.target_size == V
    assert np.isnan(again.coverage)  # unknown, not made up


@pytest.mark.parametrize("size", [None, V])
def test_the_whole_vocabulary(size: int | None) -> None:
    vocab = build_vocab([], size, V)
    assert vocab.is_full and vocab.coverage == 1.0
    assert torch.equal(vocab.ids_D, full_vocab(V).ids_D)
    assert vocab.d2t().abs().sum() == 0


def test_more_than_the_target_has_is_an_error() -> None:
    with pytest.raises(ConfigError, match=f"draft_vocab_size={V + 1}.*vocabulary of {V}"):
        build_vocab([], V + 1, V)
