"""The sampling distribution against transformers' own warpers, and verification against a float64 loop written from the
paper.
"""

import math

import pytest
import torch
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from spectrain.decoding.sampling import GREEDY, SamplingParams, sample, truncated_log_probs
from spectrain.decoding.verify import verify
from spectrain.errors import ConfigError


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1.0),
        SamplingParams(0.6),
        SamplingParams(1.0, top_k=5),
        SamplingParams(0.8, top_p=0.7),
        SamplingParams(1.3, top_p=0.9, top_k=7),
        SamplingParams(1.0, top_p=1e-9),
        SamplingParams(1.0, top_k=999),
    ],
)
def test_distribution_is_transformers_sampling_distribution(sampling):
    logits = torch.randn(200, 31, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    torch.testing.assert_close(truncated_log_probs(logits, sampling), scores.log_softmax(-1), rtol=1e-12, atol=1e-12)


def test_distribution_does_not_change_its_input_and_computes_in_float32():
    logits = torch.randn(2, 9, dtype=torch.bfloat16)
    before = logits.clone()
    for sampling in (GREEDY, SamplingParams(0.5), SamplingParams(1.0, top_p=0.5, top_k=3)):
        assert truncated_log_probs(logits, sampling).dtype == torch.float32
    assert torch.equal(logits, before)
    float_logits = torch.randn(2, 9)
    before = float_logits.clone()
    truncated_log_probs(float_logits, SamplingParams(1.0, top_p=0.5, top_k=3))
    assert torch.equal(float_logits, before)


def test_greedy_distribution_is_one_hot_at_the_argmax():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 2.0]])
    assert truncated_log_probs(logits, GREEDY).exp().tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_equal_logits_are_kept_or_dropped_together():
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0])
    assert truncated_log_probs(logits, SamplingParams(1.0, top_k=2)).isfinite().tolist() == [True, True, True, False]
    assert truncated_log_probs(logits, SamplingParams(1.0, top_p=0.6)).isfinite().tolist() == [True, True, True, False]


@pytest.mark.parametrize("fields", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}])
def test_impossible_distributions_are_rejected(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        SamplingParams(**fields)


def test_sample_inverts_the_distribution_function():
    weights = torch.tensor([0.0, 0.2, 0.0, 0.6, 0.0]).expand(6, -1)
    uniforms = torch.tensor([0.0, 0.24, 0.26, 0.99, 1 - 2**-53, 0.5], dtype=torch.float64)
    assert sample(weights, uniforms).tolist() == [
        1,
        1,
        3,
        3,
        3,
        3,
    ]  # never a token of weight zero, not even at the ends


def test_sample_over_a_large_vocabulary_is_unbiased():
    weights = torch.full((1, 150_000), 1e-6)
    weights[0, 75_000:] *= 3
    uniforms = torch.linspace(0, 1, 42, dtype=torch.float64)[:-1]
    drawn = sample(weights.expand(41, -1), uniforms)
    expected = torch.where(uniforms < 0.25, uniforms * 300_000, 75_000 + (uniforms - 0.25) * 100_000)
    assert (drawn - expected).abs().max() <= 1.5


def brute_force(drafts, draft_probs, target_probs, uniforms, length):
    """The published algorithm for one row, in Python floats. draft_probs is None for one-hot drafts."""
    n = len(drafts)
    for j in range(length):
        p = [float(v == drafts[j]) for v in range(len(target_probs[j]))] if draft_probs is None else draft_probs[j]
        if uniforms[1 + j] * p[drafts[j]] >= target_probs[j][drafts[j]]:
            residual = [max(0.0, q - pv) for q, pv in zip(target_probs[j], p, strict=True)]
            return j, pick(residual, uniforms[0])
    assert length <= n
    return length, pick(target_probs[length], uniforms[0])


def pick(weights, uniform):
    total, running = math.fsum(weights), 0.0
    for token, weight in enumerate(weights):
        running += weight
        if running > uniform * total:
            return token
    raise AssertionError("weights are all zero")


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.0), SamplingParams(0.7, top_p=0.8, top_k=6)])
@pytest.mark.parametrize("ragged", [False, True])
def test_verify_equals_the_published_algorithm(one_hot, sampling, ragged):
    generator = torch.Generator().manual_seed(3)
    batch, n, vocab = 400, 3, 8
    target_logits = torch.randn(batch, n + 1, vocab, generator=generator, dtype=torch.float64)
    # Drafts near the target, so that every accepted count occurs.
    draft_sampling = GREEDY if one_hot else sampling
    draft_logits = target_logits[:, :n] + 0.7 * torch.randn(batch, n, vocab, generator=generator, dtype=torch.float64)
    draft_log_probs = truncated_log_probs(draft_logits, draft_sampling)
    drafts = sample(
        draft_log_probs.exp().flatten(0, 1), torch.rand(batch * n, generator=generator, dtype=torch.float64)
    ).view(batch, n)
    uniforms = torch.rand(batch, n + 1, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, n + 1, (batch,), generator=generator) if ragged else None

    verdict = verify(
        drafts,
        None if one_hot else draft_log_probs,
        target_logits,
        sampling,
        None if sampling.greedy else uniforms,
        lengths,
    )

    target_probs = truncated_log_probs(target_logits, sampling).exp()
    row_lengths = [n] * batch if lengths is None else lengths.tolist()
    expected = [
        brute_force(
            drafts[b].tolist(),
            None if one_hot else draft_log_probs[b].exp().tolist(),
            target_probs[b].tolist(),
            uniforms[b].tolist(),
            row_lengths[b],
        )
        for b in range(batch)
    ]
    assert verdict.accepted.tolist() == [accepted for accepted, _ in expected]
    assert verdict.next_token.tolist() == [token for _, token in expected]
    assert set(verdict.accepted.tolist()) == set(range(n + 1))


def test_without_drafts_the_next_token_is_a_plain_sample():
    logits = torch.randn(500, 1, 6, generator=torch.Generator().manual_seed(0))
    uniforms = torch.rand(500, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    verdict = verify(torch.zeros(500, 0, dtype=torch.long), None, logits, SamplingParams(0.9), uniforms)
    assert verdict.accepted.tolist() == [0] * 500
    assert torch.equal(
        verdict.next_token, sample(truncated_log_probs(logits[:, 0], SamplingParams(0.9)).exp(), uniforms[:, 0])
    )


def test_an_empty_residual_falls_back_to_the_target():
    """p = q up to rounding: the draft is rejected by a hair, and nothing of q is above p."""
    sampling = torch.tensor([0.5, 0.5]).log()
    above = torch.tensor([0.5000001, 0.5]).log()
    verdict = verify(
        torch.zeros(1, 1, dtype=torch.long),
        above[None, None],
        sampling.expand(1, 2, 2),
        SamplingParams(1.0),
        torch.tensor([[0.75, 1 - 1e-9]], dtype=torch.float64),
    )
    assert (verdict.accepted.item(), verdict.next_token.item()) == (0, 1)


def test_sampling_needs_uniforms():
    with pytest.raises(ValueError, match="uniforms"):
        verify(torch.zeros(1, 1, dtype=torch.long), None, torch.zeros(1, 2, 3), SamplingParams(1.0))


LAWS = [SamplingParams(1.0), SamplingParams(0.7, top_p=0.8), SamplingParams(1.2, top_k=3)]


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("sampling", LAWS)
def test_output_distribution_is_the_targets_and_acceptance_is_one_minus_tv(sampling, one_hot):
    """Sequences of three tokens on a vocabulary of five, 60,000 rounds of two drafts in one call of verify."""
    generator = torch.Generator().manual_seed(11)
    vocab, n, samples = 5, 2, 60_000
    # Markov distributions: row v is the distribution after token v. The first draft follows token 0.
    q = truncated_log_probs(1.2 * torch.randn(vocab, vocab, generator=generator, dtype=torch.float64), sampling)
    p_logits = 1.2 * torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
    p = truncated_log_probs(p_logits, GREEDY if one_hot else sampling)

    uniforms = torch.rand(samples, 2 * n + 2, generator=generator, dtype=torch.float64)
    previous, drafts, draft_samplings = torch.zeros(samples, dtype=torch.long), [], []
    for j in range(n):
        draft_samplings.append(p[previous])
        previous = sample(draft_samplings[-1].exp(), uniforms[:, j])
        drafts.append(previous)
    drafts, draft_samplings = torch.stack(drafts, 1), torch.stack(draft_samplings, 1)
    context = torch.cat([torch.zeros(samples, 1, dtype=torch.long), drafts], 1)
    # q is already truncated: temperature 1 leaves it as it is.
    verdict = verify(
        drafts, None if one_hot else draft_samplings, q[context], SamplingParams(1.0), uniforms[:, n : 2 * n + 1]
    )

    # A text goes on after a round with samples of the target; here it only has to be filled up to three tokens.
    tokens = torch.cat([drafts, torch.zeros(samples, 1, dtype=torch.long)], 1)
    rows = torch.arange(samples)
    tokens[rows, verdict.accepted] = verdict.next_token
    for j in range(1, n + 1):
        fill = sample(q[tokens[:, j - 1]].exp(), torch.rand(samples, generator=generator, dtype=torch.float64))
        tokens[:, j] = torch.where(verdict.accepted < j, fill, tokens[:, j])

    expected = q.exp()[0][:, None, None] * q.exp()[:, :, None] * q.exp()[None]
    counts = torch.zeros(vocab, vocab, vocab).index_put_(
        (tokens[:, 0], tokens[:, 1], tokens[:, 2]), torch.ones(samples), accumulate=True
    )
    support = expected.flatten() > 0
    assert counts.flatten()[~support].sum() == 0
    test = stats.chisquare(counts.flatten()[support].double(), expected.flatten()[support] * samples)
    assert test.pvalue > 1e-3

    overlap = torch.minimum(p[0].exp(), q[0].exp()).sum().item()  # 1 - TV
    rate = (verdict.accepted >= 1).double().mean().item()
    assert abs(rate - overlap) < 4 * math.sqrt(overlap * (1 - overlap) / samples) + 1e-12
