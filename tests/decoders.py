"""Equipment for decoding tests: tiny targets in float64 and proposers whose drafts are known in advance."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_target, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from spectrain.decoding.loop import Prompt
from spectrain.decoding.proposers import Observation, Proposal
from spectrain.decoding.sampling import SamplingParams, sample, truncated_log_probs
from spectrain.target.families import head_math
from spectrain.target.model import TargetModel
from spectrain.target.spec import TargetSpec


def float64_target(
    family: str, folder: Path, attn_implementation: str = "sdpa", seed: int = 0, **overrides: Any
) -> TargetModel:
    """A tiny target whose arithmetic is exact enough that no two paths through it disagree about an argmax."""
    tiny_target(family, folder, seed=seed, **overrides)
    # Eager experts: torch's grouped matrix product knows no float64.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation=attn_implementation, experts_implementation="eager"
    )
    return TargetModel(model, tiny_tokenizer(), TargetSpec.from_config(model.config), head_math(model.config))


def full_forward(target: TargetModel, ids: Sequence[int], taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
    """Last hidden states [S, H] and taps [S, A, H] of one text in one pass without a cache."""
    output = target.run(torch.tensor([list(ids)]), torch.arange(len(ids))[None], tap_ids=taps)
    return output.last_hidden_BSH[0], None if output.taps_BSAH is None else output.taps_BSAH[0]


def prefix_hash(prefix: Sequence[int], salt: int = 0) -> int:
    """A number that any change of the prefix changes, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr((salt, list(prefix))).encode(), digest_size=8).digest(), "big")


def prompts_of(texts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Prompt]:
    """Prompts whose answers may all have so many tokens."""
    return [Prompt(text, max_new_tokens) for text in texts]


class PrefixProposer:
    """Drafts ``draft(prefix, n)``, a function of the verified text alone (anchor included). Checks and records what it
    observes.
    """

    reads_last_hidden = False

    def __init__(self, draft: Callable[[list[int], int], list[int]], taps: tuple[int, ...] = ()) -> None:
        self.draft = draft
        self.taps = taps
        self.seen: list[tuple[list[int], list[Tensor]]] = []  # every cache row ever made: ids and taps

    def new_cache(self, batch_size: int) -> list[tuple[list[int], list[Tensor]]]:
        rows: list[tuple[list[int], list[Tensor]]] = [([], []) for _ in range(batch_size)]
        self.seen.extend(rows)
        return list(rows)

    def observe(self, cache: Any, observation: Observation) -> None:
        lengths_B, taps_BTAH = observation.lengths_B, observation.taps_BTAH
        assert len(cache) == len(observation.ids_BT) == len(lengths_B)
        for b, (ids, taps) in enumerate(cache):
            ids.extend(observation.ids_BT[b, : lengths_B[b]].tolist())
            if taps_BTAH is not None:
                taps.append(taps_BTAH[b, : lengths_B[b]].clone())

    def propose(
        self, cache: Any, anchor_B: Tensor, n: int, sampling: SamplingParams, generators: Any = None
    ) -> Proposal:
        drafts = [self.draft([*ids, anchor], n) for (ids, _), anchor in zip(cache, anchor_B.tolist(), strict=True)]
        ids_Bn = torch.tensor([draft + [0] * (n - len(draft)) for draft in drafts])
        return Proposal(ids=ids_Bn, lengths=torch.tensor([len(draft) for draft in drafts]))

    def select(self, cache: Any, rows: Tensor) -> Any:
        return [cache[row] for row in rows.tolist()]


class BigramProposer:
    """Drafts from a table: row v of ``logits_VV`` is the drafter's prediction after token v."""

    taps: tuple[int, ...] = ()
    reads_last_hidden = False

    def __init__(self, logits_VV: Tensor) -> None:
        self.logits_VV = logits_VV

    def new_cache(self, batch_size: int) -> int:
        return batch_size

    def observe(self, cache: int, observation: Observation) -> None:
        assert cache == len(observation.ids_BT)

    def propose(
        self,
        cache: int,
        anchor_B: Tensor,
        n: int,
        sampling: SamplingParams,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Proposal:
        table_VV = truncated_log_probs(self.logits_VV, sampling)
        uniforms_Bn = torch.zeros(len(anchor_B), n, dtype=torch.float64)
        if generators is not None:
            uniforms_Bn = torch.stack(
                [torch.rand(n, generator=generator, dtype=torch.float64) for generator in generators]
            )
        previous_B, ids, distributions = anchor_B, [], []
        for j in range(n):
            distributions.append(table_VV[previous_B])
            previous_B = sample(distributions[-1].exp(), uniforms_Bn[:, j])
            ids.append(previous_B)
        return Proposal(ids=torch.stack(ids, 1), log_probs=None if sampling.greedy else torch.stack(distributions, 1))

    def select(self, cache: int, rows: Tensor) -> int:
        return len(rows)
