"""Drafting by confidence leaves the distribution of the output alone, and what would not leave it alone is seen to fail
the same test.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from decoders import BigramProposer, float64_target, prompts_of
from test_sampled_loop import EOS, PROMPT, VOCAB, answer_probabilities, goodness_of_fit

from spectrain.config.drafter_schema import BlockConfig, DrafterConfig, DSparkConfig
from spectrain.data.vocab import full_vocab
from spectrain.decoding.confidence import survival
from spectrain.decoding.loop import DecodingSettings, Prompt, speculative_generate
from spectrain.decoding.sampling import GREEDY, SamplingParams
from spectrain.decoding.scheduler import SchedulerPolicy, StepCost, ThresholdPolicy, schedule
from spectrain.drafters.build import build_drafter
from spectrain.target.head import TargetHead

HOT, N, LENGTH, SAMPLES = SamplingParams(1.0), 2, 3, 4000
COST = StepCost(verify=((1, 1.0), (40, 1.5), (400, 10.0)))
CONFIDENCE = (0.95, 0.3, 0.85, 0.5, 0.7, 0.15)  # by token


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(folder):
    return float64_target(
        "llama", folder, vocab_size=VOCAB, num_hidden_layers=1, bos_token_id=0, eos_token_id=EOS, pad_token_id=0
    )


class ConfidentProposer(BigramProposer):
    """States a confidence that depends on the token before the drafted one; with ``peeks``, on the drafted one
    itself.
    """

    def __init__(self, peeks: bool = False) -> None:
        super().__init__(
            1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        )
        self.peeks = peeks

    def propose(self, cache, anchor_B, n, sampling, generators=None):
        proposal = super().propose(cache, anchor_B, n, sampling, generators)
        before = torch.cat([anchor_B[:, None], proposal.ids[:, :-1]], dim=1)
        return replace(proposal, confidence=torch.tensor(CONFIDENCE)[proposal.ids if self.peeks else before])


@dataclass(frozen=True)
class LooksAhead:
    """The prefix with the most tokens per second wherever it is: the scheduler without its early stop. Each row by
    itself.
    """

    steps_per_s: tuple[float, ...]

    def lengths(self, confidence_Bn, drafted_B):
        expected = 1 + survival(confidence_Bn).cumsum(-1)
        expected = torch.cat([torch.ones(len(expected), 1), expected], dim=1)
        return (expected * torch.tensor(self.steps_per_s)).argmax(-1).tolist()


@dataclass(frozen=True)
class RowByRow:
    """The scheduler with batches of one row, so that a thousand rows can be decoded at once."""

    steps_per_s: tuple[float, ...]

    def lengths(self, confidence_Bn, drafted_B):
        survival_Bn = survival(confidence_Bn).numpy()
        return [
            schedule(row[None], [n], lambda t: self.steps_per_s[t - 1])[0]
            for row, n in zip(survival_Bn, drafted_B, strict=True)
        ]


POLICIES = {
    "threshold": (ThresholdPolicy(0.5), None),
    "high threshold": (ThresholdPolicy(0.75), None),
    "scheduler": (SchedulerPolicy(COST), 40),
    "scheduler, row by row": (RowByRow((1.0, 0.6, 0.58)), None),
}


def p_value(target, proposer, policy, batch_size, draft_sampling):
    settings = DecodingSettings(N, HOT, draft_sampling, policy, eos_ids=(EOS,), seed=1, batch_size=batch_size)
    generation = speculative_generate(target, proposer, prompts_of([PROMPT] * SAMPLES, LENGTH), settings)
    rounds = [round_ for result in generation.results for round_ in result.rounds]
    used = Counter(round_.drafted for round_ in rounds)
    assert len(used) > 1, used  # a policy that never decides anything proves nothing
    return goodness_of_fit(
        Counter(tuple(r.ids) for r in generation.results), answer_probabilities(target, HOT, LENGTH), SAMPLES
    )


@pytest.mark.parametrize("draft_sampling", [HOT, GREEDY], ids=["drawn", "argmax"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.slow
def test_distribution_of_answers_is_the_targets(target, name, draft_sampling):
    policy, batch_size = POLICIES[name]
    assert p_value(target, ConfidentProposer(), policy, batch_size, draft_sampling) > 1e-3


@pytest.fixture(scope="module", params=["vanilla", "rnn"])
def dspark(request, target, folder):
    """A DSpark drafter with weights large enough that its distributions and its confidences differ from position to
    position.
    """
    block, dspark = BlockConfig(block_size=N, mask_token_id=0), DSparkConfig(markov=request.param, markov_rank=4)
    config = DrafterConfig("dspark", taps=(0, 1), block=block, dspark=dspark, init="random")
    head = TargetHead.from_checkpoint(folder, dtype=torch.float64)
    drafter = build_drafter(config, target.spec, full_vocab(VOCAB), head, folder).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.7)
    return drafter.attach(head).eval()


@pytest.mark.parametrize("name", ["threshold", "scheduler"])
@pytest.mark.slow
def test_distribution_of_answers_is_the_targets_with_a_confidence_head(target, dspark, name):
    policy, batch_size = POLICIES[name]
    assert p_value(target, dspark, policy, batch_size, HOT) > 1e-3


def test_a_confidence_that_knows_the_draft_would_change_the_distribution(target):
    assert p_value(target, ConfidentProposer(peeks=True), ThresholdPolicy(0.5), None, HOT) < 1e-6


def test_looking_past_the_first_fall_would_change_the_distribution(target):
    # With one draft a round is slower than with none; with two it is faster than with none if the second is likely to
    # be accepted.
    assert p_value(target, ConfidentProposer(), LooksAhead((1.0, 0.4, 0.55)), None, HOT) < 1e-6


@pytest.mark.parametrize(
    "policy",
    [ThresholdPolicy(0.5), SchedulerPolicy(StepCost(((1, 1.0), (4, 1.2), (20, 4.0))))],
    ids=["threshold", "scheduler"],
)
def test_greedy_answers_are_plain_greedy_answers(target, policy):
    prompts = prompts_of(itertools.islice(itertools.product(range(VOCAB), repeat=3), 7, 60, 5), 12)
    plain = speculative_generate(target, None, prompts, DecodingSettings(eos_ids=(EOS,)))
    settings = DecodingSettings(4, policy=policy, eos_ids=(EOS,), batch_size=4)
    drafted = speculative_generate(target, ConfidentProposer(), prompts, settings)
    assert [r.ids for r in drafted.results] == [r.ids for r in plain.results]
    lengths = Counter(round_.drafted for result in drafted.results for round_ in result.rounds)
    assert len(lengths) > 1


def test_rounds_carry_the_confidence_of_what_was_verified(target):
    """The threshold can be checked after the fact, from the text and the rounds alone."""
    settings = DecodingSettings(4, policy=ThresholdPolicy(0.4))
    result = speculative_generate(target, ConfidentProposer(), [Prompt(PROMPT, 40)], settings).results[0]
    text = PROMPT + result.ids
    for round_ in result.rounds:
        before = [text[round_.anchor], *round_.drafts]
        expected = [CONFIDENCE[token] for token in before]
        assert round_.confidence == pytest.approx(expected[:-1])
        reach = np.cumprod(expected)
        assert all(reach[: round_.drafted] >= 0.4)
        assert round_.drafted == 4 or reach[round_.drafted] < 0.4


def test_a_proposer_without_confidence_is_refused(target):
    proposer, settings = BigramProposer(torch.zeros(VOCAB, VOCAB)), DecodingSettings(2, policy=ThresholdPolicy(0.5))
    with pytest.raises(ValueError, match="confidence"):
        speculative_generate(target, proposer, [Prompt(PROMPT, 4)], settings)
