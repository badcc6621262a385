"""Our suffix decoding drafts what vLLM's proposer does, round by round. vLLM's needs arctic-inference, which has to be
built by a compiler; without it this is left out, and ``tests/unit/test_suffix.py`` has the rules as counted paths.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.decoding.proposers import Observation
from spectrain.decoding.sampling import GREEDY
from spectrain.decoding.suffix import SuffixProposer

pytest.importorskip("arctic_inference.suffix_decoding", reason="arctic-inference is not installed")
LONGEST = 400


class VLLMRequests:
    """vLLM's proposer and its input batch: one row a request that is under way."""

    def __init__(self, drafts: int) -> None:
        rules = pytest.importorskip("vllm.v1.spec_decode.suffix_decoding")
        speculative = SimpleNamespace(
            num_speculative_tokens=drafts,
            suffix_decoding_max_tree_depth=24,
            suffix_decoding_max_spec_factor=1.0,
            suffix_decoding_min_token_prob=0.1,
            suffix_decoding_max_cached_requests=10_000,
        )
        config: Any = SimpleNamespace(
            speculative_config=speculative, model_config=SimpleNamespace(max_model_len=LONGEST)
        )
        self.proposer, self.drafts = rules.SuffixDecodingProposer(config), drafts

    def propose(self, texts: dict[str, tuple[int, list[int]]], sampled: list[list[int]]) -> list[list[int]]:
        """texts: request -> (tokens of the prompt, the text so far), of which ``sampled`` are the newest tokens."""
        tokens = np.zeros((len(texts), LONGEST), dtype=np.int32)
        for row, (_, text) in enumerate(texts.values()):
            tokens[row, : len(text)] = text
        batch: Any = SimpleNamespace(
            req_ids=list(texts),
            req_id_to_index={name: row for row, name in enumerate(texts)},
            num_tokens_no_spec=np.array([len(text) for _, text in texts.values()]),
            num_prompt_tokens=np.array([prompt for prompt, _ in texts.values()]),
            token_ids_cpu=tokens,
        )
        return [list(ids) for ids in self.proposer.propose(self.drafts, batch, sampled)]


def observed(rows: list[list[int]]) -> Observation:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return Observation(ids, torch.tensor([len(row) for row in rows]))


@pytest.mark.parametrize(("drafts", "tokens", "batch"), [(8, 3, 1), (4, 2, 1), (8, 5, 3), (1, 3, 2)])
def test_every_round_drafts_what_vllms_does(drafts: int, tokens: int, batch: int) -> None:
    """Groups of conversations, one after the other; a round commits what fits of the draft, and one token more."""
    rng = np.random.default_rng(drafts)
    ours, theirs = SuffixProposer(), VLLMRequests(drafts)
    rounds = lengths = 0
    motifs = [rng.integers(0, tokens, size=7).tolist() for _ in range(4)]
    for group in range(6):
        prompts = [[token for _ in range(3) for token in motifs[rng.integers(4)]] for _ in range(batch)]
        texts = {f"{group}-{row}": (len(prompt), [*prompt]) for row, prompt in enumerate(prompts)}
        cache = ours.new_cache(batch)
        seen, sampled = [[*prompt] for prompt in prompts], [[int(rng.integers(tokens))] for _ in prompts]
        for _ in range(20):
            for (_, text), new in zip(texts.values(), sampled, strict=True):
                text.extend(new)
            # The anchor, each text's newest token, is proposed for; what is before it was observed.
            ours.observe(cache, observed([[*before, *new[:-1]] for before, new in zip(seen, sampled, strict=True)]))
            anchors = torch.tensor([new[-1] for new in sampled])
            proposal = ours.propose(cache, anchors, drafts, GREEDY)
            assert proposal.lengths is not None
            found = [ids[:n] for ids, n in zip(proposal.ids.tolist(), proposal.lengths.tolist(), strict=True)]
            assert found == theirs.propose(texts, sampled)
            rounds, lengths = rounds + 1, lengths + sum(map(len, found))
            seen = [[new[-1]] for new in sampled]
            accepted = [int(rng.integers(len(ids) + 1)) for ids in found]
            sampled = [[*ids[:n], int(rng.integers(tokens))] for ids, n in zip(found, accepted, strict=True)]
        for row, (_, text) in enumerate(texts.values()):
            text.extend(sampled[row])
            ours.finish(cache, row, text)
        theirs.propose(texts, sampled)  # vLLM proposes before it knows which answers are at their end
    assert rounds == 120 and lengths > rounds / 2
