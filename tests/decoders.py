"""Equipment for decoding tests: tiny targets in float64 and proposers whose drafts are known in advance."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass
class Seen:
    """What a proposer was shown of one text: ids, and for each ``observe`` what came with them (empty: nothing)."""

    ids: list[int] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)
    last_hidden: list[Tensor] = field(default_factory=list)


class PrefixProposer:
    """Drafts ``draft(prefix, n)``, a function of the verified text alone (anchor included). Checks and records what it
    observes.
    """

    def __init__(
        self,
        draft: Callable[[list[int], int], list[int]],
        taps: tuple[int, ...] = (),
        reads_last_hidden: bool = False,
    ) -> None:
        self.draft = draft
        self.taps = taps
        self.kv_layers: tuple[int, ...] = ()
        self.reads_last_hidden = reads_last_hidden
        self.seen: list[Seen] = []  # every cache row ever made

    def new_cache(self, batch_size: int) -> list[Seen]:
        rows = [Seen() for _ in range(batch_size)]
        self.seen.extend(rows)
        return list(rows)

    def observe(self, cache: list[Seen], observation: Observation) -> None:
        ids_BT, lengths_B = observation.ids_BT, observation.lengths_B.tolist()
        assert len(cache) == len(ids_BT) == len(lengths_B)
        for name, values in (("taps", observation.taps_BTAH), ("last_hidden", observation.last_hidden_BTH)):
            assert values is None or values.shape[:2] == ids_BT.shape
            for row, seen in enumerate(cache):
                if values is not None:
                    getattr(seen, name).append(values[row, : lengths_B[row]].clone())
        for row, seen in enumerate(cache):
            seen.ids.extend(ids_BT[row, : lengths_B[row]].tolist())

    def propose(
        self, cache: list[Seen], anchor_B: Tensor, n: int, sampling: SamplingParams, generators: Any = None
    ) -> Proposal:
        drafts = [self.draft([*seen.ids, anchor], n) for seen, anchor in zip(cache, anchor_B.tolist(), strict=True)]
        ids_Bn = torch.tensor([draft + [0] * (n - len(draft)) for draft in drafts])
        return Proposal(ids=ids_Bn, lengths=torch.tensor([len(draft) for draft in drafts]))

    def select(self, cache: Any, rows: Tensor) -> Any:
        return [cache[row] for row in rows.tolist()]


class BigramProposer:
    """Drafts from a table: row v of ``logits_VV`` is the drafter's prediction after token v."""

    taps: tuple[int, ...] = ()
    reads_last_hidden = False
    kv_layers: tuple[int, ...] = ()

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
