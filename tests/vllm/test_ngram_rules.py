"""Our n-gram lookup drafts what vLLM's does, text by text."""

from __future__ import annotations

import numpy as np
import pytest

from spectrain.decoding.proposers import NGramProposer


@pytest.mark.parametrize(("longest", "shortest", "drafts"), [(4, 2, 3), (3, 1, 5), (1, 1, 1)])
def test_lookup_is_vllms(longest, shortest, drafts):
    rules = pytest.importorskip("vllm.v1.spec_decode.ngram_proposer")
    rng = np.random.default_rng(0)
    proposer, found = NGramProposer(longest, shortest), 0
    for _ in range(400):
        text = rng.integers(0, 3, size=rng.integers(2, 30)).astype(np.int32)
        theirs = rules._find_longest_matched_ngram_and_propose_tokens(text, shortest, longest, 10_000, drafts)
        assert proposer.lookup(text.tolist(), drafts) == theirs.tolist()
        found += len(theirs) > 0
    assert found > 50
