"""A small language model that drafts, against itself without a cache."""

from __future__ import annotations

import pytest
import torch
from decoders import float64_target, full_forward, prompts_of
from tiny import VOCAB_SIZE, tiny_target

from spectrain.decoding.draft_model import DraftModelProposer
from spectrain.decoding.loop import DecodingSettings, speculative_generate
from spectrain.decoding.proposers import Observation
from spectrain.decoding.sampling import GREEDY, SamplingParams, truncated_log_probs
from spectrain.errors import InputError
from spectrain.target.model import TargetModel

SMALL = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return float64_target("llama", folder / "target", **SMALL), float64_target(
        "qwen3", folder / "draft", seed=1, **SMALL
    )


def greedy(model: TargetModel, text: list[int], n: int) -> list[int]:
    drafts: list[int] = []
    for _ in range(n):
        hidden, _ = full_forward(model, [*text, *drafts])
        drafts.append(int(model.logits(hidden[-1]).argmax()))
    return drafts


def test_drafts_are_what_the_model_writes_by_itself_and_leave_no_trace(models):
    proposer = DraftModelProposer(models[1], 20)
    cache = proposer.new_cache(2)
    texts = [[1, 2, 3, 4], [7, 8]]
    proposer.observe(cache, Observation(torch.tensor([[1, 2, 3, 4], [7, 8, 0, 0]]), torch.tensor([4, 2])))
    for anchors in ([5, 9], [6, 9]):  # the second time on what the first one left
        drafts = proposer.propose(cache, torch.tensor(anchors), 3, GREEDY).ids.tolist()
        assert drafts == [greedy(models[1], [*text, a], 3) for text, a in zip(texts, anchors, strict=True)]
    proposer.observe(cache, Observation(torch.tensor([[6, 11, 12], [9, 0, 0]]), torch.tensor([3, 1])))
    kept = proposer.select(cache, torch.tensor([1, 0]))
    drafts = proposer.propose(kept, torch.tensor([3, 2]), 2, GREEDY).ids.tolist()
    assert drafts == [greedy(models[1], [7, 8, 9, 3], 2), greedy(models[1], [1, 2, 3, 4, 6, 11, 12, 2], 2)]


def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from(models):
    proposer, sampling = DraftModelProposer(models[1], 20), SamplingParams(0.8, top_k=5)
    cache = proposer.new_cache(1)
    proposer.observe(cache, Observation(torch.tensor([[1, 2]]), torch.tensor([2])))
    proposal = proposer.propose(cache, torch.tensor([3]), 2, sampling, [torch.Generator().manual_seed(0)])
    text = [1, 2, 3]
    for slot in range(2):
        hidden, _ = full_forward(models[1], text)
        expected = truncated_log_probs(models[1].logits(hidden[-1]), sampling)
        torch.testing.assert_close(proposal.log_probs[0, slot], expected)
        text.append(int(proposal.ids[0, slot]))
        assert expected[text[-1]] > float("-inf")


def test_decoding_with_it_is_plain_greedy_decoding(models):
    prompts = prompts_of([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 15)
    plain = speculative_generate(models[0], None, prompts, DecodingSettings())
    for draft in reversed(models):  # a stranger, and the target itself, which accepts everything
        settings = DecodingSettings(num_speculative_tokens=3, batch_size=2)
        found = speculative_generate(models[0], DraftModelProposer(draft, 20), prompts, settings)
        assert [r.ids for r in found.results] == [r.ids for r in plain.results]
    rounds = [round_ for r in found.results for round_ in r.rounds if not round_.cut]
    assert all(round_.accepted == 3 for round_ in rounds[:-1]) and len(rounds) > 3


def test_models_that_cannot_draft_are_refused(models, tmp_path):
    with pytest.raises(InputError, match=r"decoding\.draft_model has a vocabulary of 20"):
        DraftModelProposer(models[1], VOCAB_SIZE)
    tiny_target("qwen3_next", tmp_path)
    with pytest.raises(InputError, match="recurrent"):
        DraftModelProposer(float64_target("qwen3_next", tmp_path), 20)
