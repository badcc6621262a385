"""The permutation test of sampled outputs: what it lets pass, what it refuses, its p-value against an enumeration."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from decoders import BigramProposer, float64_target

from spectrain.decoding import loop
from spectrain.decoding.loop import DecodingSettings, Prompt, speculative_generate
from spectrain.decoding.sampling import SamplingParams
from spectrain.decoding.verify import Verdict, verify
from spectrain.evaluation.same_distribution import PERMUTATIONS, compare_samples

VOCAB, SEEDS, TOKENS = 6, 600, 6


def test_the_p_value_is_that_of_all_relabellings():
    plain, speculative = [[1, 2], [1, 2], [1, 3], [4, 3]], [[4, 3], [4, 3], [4, 2], [1, 3]]
    answers = np.array([*plain, *speculative])

    def statistic(chosen: tuple[int, ...]) -> float:
        mine, other = answers[list(chosen)], np.delete(answers, list(chosen), axis=0)
        total = 0.0
        for columns in ([0], [0, 1]):  # first tokens, then neighbours
            for words in {tuple(answer) for answer in answers[:, columns]}:
                a, b = (sum(tuple(answer) == words for answer in side[:, columns]) for side in (mine, other))
                total += (a - b) ** 2 / (a + b)
        return total

    observed = statistic((0, 1, 2, 3))
    ways = [statistic(chosen) for chosen in itertools.combinations(range(8), 4)]
    exact = np.mean([way >= observed - 1e-9 for way in ways])
    found = compare_samples([plain], [speculative], 2).p_value
    assert found == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / PERMUTATIONS))


def test_ended_answers_count_as_ended():
    ends, goes_on = [[[1]] * 30], [[[1, 1]] * 30]
    assert compare_samples(ends, goes_on, 2).p_value < 0.001
    assert compare_samples(ends, ends, 2).p_value == 1.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return float64_target("llama", tmp_path_factory.mktemp("target"), vocab_size=VOCAB, num_hidden_layers=1)


def samples(target: Any, proposer: Any, first: int) -> list[list[list[int]]]:
    """Of two prompts; streams from ``first`` on."""
    settings = DecodingSettings(2, SamplingParams(1.0), SamplingParams(1.0))
    found = []
    for prompt in ([3, 1, 3], [2, 4]):
        prompts = [Prompt(prompt, TOKENS, stream=first + number) for number in range(SEEDS)]
        found.append([result.ids for result in speculative_generate(target, proposer, prompts, settings).results])
        first += SEEDS
    return found


def always(
    drafts: Any, log_probs: Any, logits: Any, sampling: Any, uniforms: Any = None, lengths: Any = None
) -> Verdict:
    """An acceptance rule that looks at nothing."""
    right = verify(drafts, log_probs, logits, sampling, uniforms, lengths)
    return Verdict(torch.full_like(right.accepted, drafts.shape[1]), right.next_token)


def never_from_the_residual(
    drafts: Any, log_probs: Any, logits: Any, sampling: Any, uniforms: Any = None, lengths: Any = None
) -> Verdict:
    """Rejected tokens are drawn from the target's whole distribution: the classic mistake."""
    right = verify(drafts, log_probs, logits, sampling, uniforms, lengths)
    rows = torch.arange(len(drafts))
    again = torch.distributions.Categorical(logits=logits[rows, right.accepted]).sample()
    return Verdict(right.accepted, torch.where(right.accepted < drafts.shape[1], again, right.next_token))


def test_the_right_rule_passes_and_broken_ones_do_not(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    table = 3.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    plain = samples(target, None, 0)
    p_value = compare_samples(plain, samples(target, BigramProposer(table), 1 << 20), TOKENS).p_value
    assert p_value > 0.01
    for broken in (always, never_from_the_residual):
        monkeypatch.setattr(loop, "verify", broken)
        test = compare_samples(plain, samples(target, BigramProposer(table), 1 << 20), TOKENS)
        assert not test.same and "the output is wrong" in str(test)
