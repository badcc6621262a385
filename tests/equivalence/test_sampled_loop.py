"""Speculation at temperature > 0 leaves the distribution of the output alone, and the simulation has the loop's
distribution of accepted counts.

The target is a tiny model over six tokens, so that every answer of three tokens can be enumerated and its probability
computed exactly.
"""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from decoders import BigramProposer, PrefixProposer, float64_target, full_forward, prefix_hash, prompts_of
from scipy import stats

from spectrain.decoding.loop import DecodingSettings, Prompt, speculative_generate
from spectrain.decoding.proposers import NGramProposer
from spectrain.decoding.sampling import GREEDY, SamplingParams, truncated_log_probs
from spectrain.decoding.simulate import Span, acceptance_probability, expected_acceptance, simulate

VOCAB, PROMPT, EOS = 6, [3, 1, 3], 5
SAMPLINGS = [SamplingParams(1.0), SamplingParams(0.8, top_p=0.85), SamplingParams(1.5, top_k=4)]
DRAFTING = ["none", "drawn", "argmax", "n-gram", "ragged"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    # Sharp enough to be worth truncating, flat enough that all answers occur.
    return float64_target(
        "llama", folder, vocab_size=VOCAB, num_hidden_layers=1, bos_token_id=0, eos_token_id=EOS, pad_token_id=0
    )


def next_log_probs(target, ids, sampling):
    """[S, V]: row t is the distribution of the token after ids[: t + 1]. No cache of ours has a part in it."""
    return truncated_log_probs(target.logits(full_forward(target, ids)[0]).double(), sampling)


def answer_probabilities(target, sampling, length):
    """Exact probability of every answer of at most ``length`` tokens, an end token ending it early."""
    probabilities = {}

    def extend(answer, log_probability):
        if len(answer) == length or (answer and answer[-1] == EOS):
            probabilities[answer] = math.exp(log_probability)
            return
        for token, log_prob in enumerate(next_log_probs(target, [*PROMPT, *answer], sampling)[-1].tolist()):
            if log_prob > -math.inf:
                extend((*answer, token), log_probability + log_prob)

    extend((), 0.0)
    assert math.fsum(probabilities.values()) == pytest.approx(1.0)
    return probabilities


def drafting(name, sampling):
    """(proposer, draft distribution)"""
    table = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    if name == "drawn":
        return BigramProposer(table), sampling
    if name == "argmax":
        return BigramProposer(table), GREEDY
    if name == "n-gram":
        return NGramProposer(2, 1), GREEDY
    ragged = PrefixProposer(
        lambda prefix, n: [prefix_hash(prefix, j) % VOCAB for j in range(prefix_hash(prefix, 9) % (n + 1))]
    )
    return (None, GREEDY) if name == "none" else (ragged, GREEDY)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.slow
def test_distribution_of_answers_is_the_targets(target, sampling, name):
    samples, length = 4000, 3
    proposer, draft_sampling = drafting(name, sampling)
    settings = DecodingSettings(2, sampling, draft_sampling, eos_ids=(EOS,), seed=1)
    results = answers_to_prompt(target, proposer, samples, length, settings)
    expected = answer_probabilities(target, sampling, length)
    counts = Counter(tuple(result.ids) for result in results)
    assert counts.keys() <= expected.keys()  # nothing that truncation forbids
    assert goodness_of_fit(counts, expected, samples) > 1e-3


def answers_to_prompt(target, proposer, samples, length, settings):
    return speculative_generate(target, proposer, prompts_of([PROMPT] * samples, length), settings).results


def goodness_of_fit(counts, expected, samples):
    """p-value of chi-squared, answers expected less than five times thrown together."""
    frequent = [answer for answer, probability in expected.items() if probability * samples >= 5]
    observed = [counts[answer] for answer in frequent]
    wanted = [expected[answer] * samples for answer in frequent]
    if samples - sum(wanted) > 1:
        observed.append(samples - sum(observed))
        wanted.append(samples - sum(wanted))
    return stats.chisquare(observed, np.array(wanted) * (samples / sum(wanted))).pvalue


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", ["drawn", "argmax"])
@pytest.mark.slow
def test_first_draft_is_accepted_with_chance_one_minus_tv(target, sampling, name):
    """Over all first anchors: a round at anchor x accepts its first draft with chance Σ min(p(·|x), q(·|prompt, x))."""
    proposer, draft_sampling = drafting(name, sampling)
    results = answers_to_prompt(target, proposer, 6000, 4, DecodingSettings(2, sampling, draft_sampling, seed=2))
    draft_table = truncated_log_probs(proposer.logits_VV, draft_sampling).exp()
    for anchor in range(VOCAB):
        accepted = [result.rounds[0].accepted >= 1 for result in results if result.ids[0] == anchor]
        if len(accepted) < 50:
            continue
        overlap = (
            torch.minimum(draft_table[anchor], next_log_probs(target, [*PROMPT, anchor], sampling)[-1].exp())
            .sum()
            .item()
        )
        assert abs(np.mean(accepted) - overlap) < 4 * math.sqrt(overlap * (1 - overlap) / len(accepted)) + 1e-9


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=str)
@pytest.mark.parametrize("eos_ids", [(), (EOS,)])
def test_simulation_of_argmax_drafts_is_the_loop_round_by_round(target, sampling, eos_ids):
    proposer, draft_sampling = drafting("argmax", sampling)
    settings = DecodingSettings(3, sampling, draft_sampling, eos_ids=eos_ids, seed=3)
    results = answers_to_prompt(target, proposer, 300, 7, settings)
    spans = can_be_simulated(target, results, sampling, proposer.logits_VV, draft_sampling, 3)
    # Nothing is left to chance: a one-hot draft is the text's token or it is not.
    assert [simulate(span, 3, np.random.default_rng(0)) for span in spans] == [result.rounds for result in results]


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=str)
@pytest.mark.parametrize("eos_ids", [(), (EOS,)])
def test_simulation_of_drawn_drafts_has_the_loops_distribution(target, sampling, eos_ids):
    """Rounds of the loop against simulations of other texts, which were decoded without speculation: the same
    distribution, as sequences and as sums.
    """
    samples, length, n = 2000, 7, 3
    proposer, draft_sampling = drafting("drawn", sampling)
    settings = DecodingSettings(n, sampling, draft_sampling, eos_ids=eos_ids, seed=3)
    looped = answers_to_prompt(target, proposer, samples, length, settings)
    texts = answers_to_prompt(target, None, samples, length, replace(settings, seed=4))
    spans = can_be_simulated(target, texts, sampling, proposer.logits_VV, draft_sampling, n)
    rng = np.random.default_rng(0)
    counts = [
        Counter(tuple((r.accepted, r.cut) for r in rounds) for rounds in every)
        for every in ([result.rounds for result in looped], [simulate(span, n, rng) for span in spans])
    ]
    frequent = [outcome for outcome in counts[0] | counts[1] if counts[0][outcome] + counts[1][outcome] >= 20]
    assert len(frequent) >= 8
    table = [
        [count[outcome] for outcome in frequent] + [samples - sum(count[outcome] for outcome in frequent)]
        for count in counts
    ]
    assert stats.chi2_contingency([column for column in zip(*table, strict=True) if sum(column)]).pvalue > 1e-3

    complete = [[r for r in result.rounds if not r.cut] for result in looped]
    measured = np.array([[len(rounds), sum(r.accepted for r in rounds)] for rounds in complete])
    expected = expected_acceptance(spans, n)
    error = 4 * math.sqrt(2 * samples) * measured.std(axis=0)  # texts of both sides vary
    assert (abs(measured.sum(axis=0) - [expected.rounds, expected.accepted_tokens]) < error).all()


def can_be_simulated(target, results, sampling, draft_logits, draft_sampling, n):
    """Spans of answers to PROMPT. What the bigram drafter drafts for a token depends on the token before it alone."""
    texts = torch.full((len(results), len(PROMPT) + max(len(result.ids) for result in results)), 0)
    for row, result in zip(texts, results, strict=True):
        row[: len(PROMPT) + len(result.ids)] = torch.tensor([*PROMPT, *result.ids])
    output = target.run(texts, torch.arange(texts.shape[1]).expand_as(texts))
    log_q = truncated_log_probs(target.logits(output.last_hidden_BSH).double(), sampling)[:, :-1].gather(
        2, texts[:, 1:, None]
    )[..., 0]
    log_p = truncated_log_probs(draft_logits, draft_sampling)[texts[:, :-1], texts[:, 1:]]
    chance = acceptance_probability(
        log_p, log_q
    ).numpy()  # chance[b, t]: token t + 1 of the text, drafted after token t
    padded = np.concatenate([chance, np.zeros((len(results), n))], axis=1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, n, axis=1)[:, len(PROMPT) :]
    return [
        Span(len(PROMPT), window[: len(result.ids)], result.finish_reason == "stop")
        for window, result in zip(windows, results, strict=True)
    ]


@pytest.mark.parametrize("name", ["drawn", "n-gram", "ragged"])
def test_an_answer_does_not_depend_on_its_neighbours(target, name):
    sampling = SamplingParams(1.2, top_p=0.95)
    proposer, draft_sampling = drafting(name, sampling)
    prompts = [[1, 2, 1, 2, 1], [4], [3, 3, 3], [2, 1, 0, 4, 2, 1]]

    def answers(which, batch_size=None):
        chosen = [Prompt(prompts[i], 20, stream=i) for i in which]
        settings = DecodingSettings(3, sampling, draft_sampling, eos_ids=(EOS,), seed=7, batch_size=batch_size)
        return dict(zip(which, speculative_generate(target, proposer, chosen, settings).results, strict=True))

    together = answers([0, 1, 2, 3])
    assert answers([0, 1, 2, 3], batch_size=1) == together
    assert answers([3, 1]) == {3: together[3], 1: together[1]}


def test_streams_and_seeds_differ(target):
    def ids(seed, *streams):
        prompts = [Prompt(PROMPT, 30, stream) for stream in streams]
        settings = DecodingSettings(sampling=SamplingParams(1.0), seed=seed)
        return [tuple(result.ids) for result in speculative_generate(target, None, prompts, settings).results]

    assert ids(0, 0) == ids(0, 0)
    assert len({*ids(0, 0, 1), *ids(1, 0, 1)}) == 4
    assert ids(0, None, None) == ids(0, 0, 1)  # a prompt's index, where no number is given
