"""Suffix decoding against suffix trees written out as counted paths, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoders import float64_target, prompts_of

from spectrain.decoding.loop import DecodingSettings, speculative_generate
from spectrain.decoding.proposers import Observation
from spectrain.decoding.sampling import GREEDY
from spectrain.decoding.suffix import SuffixIndex, SuffixProposer


class Tree:
    """All paths of at most ``depth`` tokens with their counts, and the children of each in the order of vLLM's tree:
    falling counts; a new child last; one that catches up with those before it moves in front of the group it meets.
    """

    def __init__(self, depth):
        self.depth, self.count, self.children, self.texts = depth, {(): 0}, {}, {}

    def append(self, text, token):
        tokens = self.texts.setdefault(text, [])
        tokens.append(token)
        self.count[()] += 1
        for start in range(max(0, len(tokens) - self.depth), len(tokens)):
            path = tuple(tokens[start:])
            siblings = self.children.setdefault(path[:-1], [])
            self.count[path] = self.count.get(path, 0) + 1
            if token not in siblings:
                siblings.append(token)
            else:
                self.move(siblings, path)

    def move(self, siblings, path):
        at = siblings.index(path[-1])
        sizes = [self.count[(*path[:-1], token)] for token in siblings]
        sizes[at] -= 1  # as it was before this token
        if at == 0 or sizes[at - 1] > sizes[at] + 1:
            return
        place = min(i for i in range(at) if sizes[i] == sizes[at - 1])
        siblings.insert(place, siblings.pop(at))

    def speculate(self, context, n, factor, least):
        context = context[-self.depth :]
        best, best_score = [], 0.0
        for m in range(1, len(context)):
            path = tuple(context[-m:])
            if path not in self.count:
                break
            ids, score, probability = [], np.float32(0), np.float32(1)
            while len(ids) < min(n, int(m * factor + 1e-6)):
                children = self.children.get(path, [])
                if len(path) == self.depth or not children:
                    break
                following = (*path, children[0])
                if self.count[following] < self.count[path]:
                    probability *= np.float32(self.count[following]) / np.float32(self.count[path])
                if probability < np.float32(least):
                    break
                path = following
                ids.append(children[0])
                score += probability
            if score >= best_score:
                best, best_score = ids, score
        return best, float(best_score)


@pytest.mark.parametrize(("depth", "factor", "least"), [(24, 1.0, 0.1), (4, 2.0, 0.5), (6, 0.5, 0.0), (5, 3.0, 0.34)])
def test_an_index_of_positions_drafts_what_a_tree_does(depth, factor, least):
    rng = np.random.default_rng(0)
    lengths = set()
    for _ in range(40):
        tree, index, texts = Tree(depth), SuffixIndex(depth), [[], [], []]
        for _ in range(60):
            which = int(rng.integers(3))  # texts grow in turns, as in a batch
            token = int(rng.integers(3))
            texts[which].append(token)
            tree.append(which, token)
            index.extend(which, [token])
            draft = index.speculate(texts[which], 5, factor, least)
            assert (draft.ids, draft.score) == tree.speculate(texts[which], 5, factor, least)
            lengths.add(len(draft.ids))
    assert len(lengths) > 2


def observed(*rows):
    longest = max(map(len, rows))
    ids = torch.tensor([list(row) + [0] * (longest - len(row)) for row in rows])
    return Observation(ids, torch.tensor([len(row) for row in rows]))


def test_drafts_follow_the_text_itself_and_earlier_answers():
    proposer = SuffixProposer()
    first = proposer.new_cache(1)
    proposer.observe(first, observed([1, 2]))
    assert proposer.propose(first, torch.tensor([5]), 4, GREEDY).lengths.tolist() == [0]
    proposer.finish(first, 0, [1, 2, 5, 6, 7, 8])
    second = proposer.new_cache(2)
    proposer.observe(second, observed([9, 5], [3, 4, 3]))
    # Row 0 goes on as the first answer did: two tokens match, so two may be drafted. Row 1 repeats its prompt.
    proposal = proposer.propose(second, torch.tensor([6, 4]), 4, GREEDY)
    assert proposal.lengths.tolist() == [2, 2]
    assert proposal.ids[0, :2].tolist() == [7, 8] and proposal.ids[1, :2].tolist() == [3, 4]
    again = proposer.propose(second, torch.tensor([6, 4]), 4, GREEDY)
    assert again.ids.tolist() == proposal.ids.tolist() and again.log_probs is None
    kept = proposer.select(second, torch.tensor([1]))
    assert proposer.propose(kept, torch.tensor([4]), 4, GREEDY).ids[0, :2].tolist() == [3, 4]


def test_prompts_are_no_part_of_what_others_draft_from():
    proposer = SuffixProposer()
    first = proposer.new_cache(1)
    proposer.observe(first, observed([5, 6, 7, 5, 6]))
    proposer.propose(first, torch.tensor([1]), 4, GREEDY)
    second = proposer.new_cache(1)
    proposer.observe(second, observed([5]))
    assert proposer.propose(second, torch.tensor([6]), 4, GREEDY).lengths.tolist() == [0]


def test_decoding_with_it_is_plain_greedy_decoding_and_ends_are_remembered(tmp_path):
    target = float64_target("llama", tmp_path, vocab_size=12, hidden_size=16, intermediate_size=24)
    prompts = prompts_of([[1, 2, 3, 1, 2], [4, 5], [1, 2, 3, 1, 2]], 24)
    plain = speculative_generate(target, None, prompts, DecodingSettings())
    for batch in (1, 3):
        settings = DecodingSettings(num_speculative_tokens=4, batch_size=batch)
        found = speculative_generate(target, SuffixProposer(), prompts, settings)
        assert [r.ids for r in found.results] == [r.ids for r in plain.results]
        assert sum(round_.accepted for r in found.results for round_ in r.rounds)
        if batch == 1:  # the third prompt is the first one, whose whole answer is known
            assert len(found.results[2].rounds) < len(found.results[0].rounds)
