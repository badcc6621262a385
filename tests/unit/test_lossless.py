"""Why two greedy answers differ: a tie of the target's two best tokens, or a failure."""

from __future__ import annotations

import pytest
import torch
from decoders import float64_target, full_forward

from spectrain.errors import RunError
from spectrain.evaluation.lossless import first_difference
from spectrain.stages.answer_suite import refuse_wrong_output


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return float64_target("llama", folder, vocab_size=20, hidden_size=16, intermediate_size=24)


def test_a_difference_carries_the_two_logits_of_its_position(target):
    found = first_difference(target, "one", [1, 2, 3], [4, 5, 6, 7], [4, 5, 9, 1])
    hidden, _ = full_forward(target, [1, 2, 3, 4, 5])
    logits = target.logits(hidden[-1])
    assert (found.position, found.plain_id, found.speculative_id) == (2, 6, 9)
    assert (found.plain_logit, found.speculative_logit) == pytest.approx((float(logits[6]), float(logits[9])))
    assert not found.tie
    with pytest.raises(RunError, match=r"one, token 3: 6 without speculation, 9 with it"):
        refuse_wrong_output([("eagle3", found)])


def test_equal_answers_and_beginnings_do_not_differ(target):
    assert first_difference(target, "one", [1], [4, 5], [4, 5]) is None
    assert first_difference(target, "one", [1], [4, 5, 6], [4, 5]) is None


def test_two_tokens_with_the_same_logit_tie(target):
    with torch.no_grad():
        target._lm_head.weight[9] = target._lm_head.weight[6]
    found = first_difference(target, "one", [1, 2], [6], [9])
    assert found.tie and found.plain_logit == found.speculative_logit
    refuse_wrong_output([("eagle3", found)])
