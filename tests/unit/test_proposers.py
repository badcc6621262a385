"""N-gram lookup against a search written out token by token, and parts of what a proposer observes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spectrain.decoding.proposers import NGramProposer, Observation
from spectrain.decoding.sampling import GREEDY
from spectrain.errors import ConfigError


def slow_lookup(text, n, ngram_max, ngram_min):
    for size in range(ngram_max, ngram_min - 1, -1):
        for start in range(len(text) - size):  # the first one, the suffix itself excluded
            if text[start : start + size] == text[len(text) - size :]:
                return text[start + size : start + size + n]
    return []


@pytest.mark.parametrize(("ngram_max", "ngram_min"), [(4, 2), (3, 1), (1, 1)])
def test_lookup_equals_a_written_out_search(ngram_max, ngram_min):
    rng = np.random.default_rng(0)
    proposer, lengths = NGramProposer(ngram_max, ngram_min), set()
    for _ in range(500):
        text = rng.integers(0, 3, size=rng.integers(1, 25)).tolist()
        found = proposer.lookup(text, 4)
        assert found == slow_lookup(text, 4, ngram_max, ngram_min)
        lengths.add(len(found))
    assert {0, 4} < lengths  # no match, full drafts, and drafts that the end of the text shortens


def test_the_longest_match_wins_then_the_first():
    proposer = NGramProposer(3, 1)
    assert proposer.lookup([7, 8, 1, 9, 8, 2, 7, 8], 1) == [1]  # two tokens match at the start, one in the middle
    assert proposer.lookup([8, 1, 8, 2, 8], 1) == [1]


def test_rows_draft_their_own_counts_and_drafting_leaves_no_trace():
    proposer = NGramProposer(2, 1)
    cache = proposer.new_cache(3)
    proposer.observe(cache, Observation(torch.tensor([[5, 6, 5], [1, 2, 0], [4, 4, 0]]), torch.tensor([3, 2, 1])))
    anchors = torch.tensor([6, 3, 4])
    first, second = proposer.propose(cache, anchors, 3, GREEDY), proposer.propose(cache, anchors, 3, GREEDY)
    assert first.log_probs is None
    assert first.lengths.tolist() == second.lengths.tolist() == [2, 0, 1]
    assert first.ids.tolist() == [[5, 6, 0], [0, 0, 0], [4, 0, 0]]
    kept = proposer.select(cache, torch.tensor([2, 0]))
    assert proposer.propose(kept, anchors[[2, 0]], 3, GREEDY).lengths.tolist() == [1, 2]


def observed():
    return Observation(
        ids_BT=torch.arange(6).reshape(2, 3),
        lengths_B=torch.tensor([3, 2]),
        taps_BTAH=torch.arange(24.0).reshape(2, 3, 2, 2),
        last_hidden_BTH=torch.arange(12.0).reshape(2, 3, 2),
    )


def test_a_part_of_an_observation_is_that_of_all_it_holds():
    whole = observed()
    part = whole.part(torch.tensor([1]), slice(2), torch.tensor([1]))
    assert (part.ids_BT.tolist(), part.lengths_B.tolist()) == ([[3, 4]], [1])
    assert part.taps_BTAH.tolist() == whole.taps_BTAH[1:, :2].tolist()
    assert part.last_hidden_BTH.tolist() == whole.last_hidden_BTH[1:, :2].tolist()
    assert whole.part(torch.tensor([1, 0])).lengths_B.tolist() == [2, 3]
    bare = replace(whole, taps_BTAH=None, last_hidden_BTH=None).part(torch.tensor([0]))
    assert bare.taps_BTAH is None and bare.last_hidden_BTH is None


def test_impossible_sizes_are_rejected():
    with pytest.raises(ConfigError, match="ngram_min=3"):
        NGramProposer(2, 3)
