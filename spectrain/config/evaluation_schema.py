"""Typed configuration of what ``eval`` measures (group ``suite``) and of the speculative loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from spectrain.config.keys import (
    ANY_COUNT,
    FILE_NAME_BYTES,
    HOTTEST,
    SEEDS,
    TOP_K,
    Section,
    check_temperature,
    key,
    require,
    require_name,
)

_DRAFTS = 1024

DraftPolicy = Literal["fixed", "threshold", "scheduler"]
DRAFT_POLICIES: tuple[str, ...] = get_args(DraftPolicy)


@dataclass(frozen=True)
class DecodingConfig(Section, name="decoding"):
    """The speculative loop of ``eval`` and the simulation of ``fit``."""

    num_speculative_tokens: int = key(3, "tokens that the drafter proposes in a round", at_least=1, at_most=_DRAFTS)
    temperature: float = key(
        0.0, "temperature at which drafts are judged; 0: greedy", at_least=0, example="0.6", at_most=HOTTEST
    )
    top_p: float = key(1.0, "judge by the likeliest tokens that hold this share of the probability", above=0, at_most=1)
    top_k: int = key(0, "judge by so many of the likeliest tokens; 0: by all", example="20", at_least=0, below=TOP_K)
    proposal_policy: Literal["greedy", "sample"] = key(
        "greedy",
        "how drafts are chosen; greedy: the argmax (a one-hot distribution); sample: drawn from the drafter's "
        "distribution",
    )
    draft_policy: DraftPolicy = key(
        "fixed",
        "how many drafts of a round are verified, by the drafter's confidence head; fixed: all; threshold: see "
        "decoding.threshold; scheduler: as many as pay on this machine",
    )
    threshold: float = key(
        0.3,
        "of draft_policy=threshold: drafting goes on while the chance that all drafts are accepted is at least this",
        at_least=0,
        at_most=1,
    )
    ngram_max: int = key(4, "tokens of the longest suffix that n-gram drafting looks up", at_least=1, at_most=_DRAFTS)
    ngram_min: int = key(2, "tokens of the shortest suffix that n-gram drafting looks up", at_least=1, at_most=_DRAFTS)
    seed: int = key(0, "seed of drafting and verification", at_least=0, below=SEEDS)

    def _check(self) -> None:
        check_temperature("decoding.temperature", self.temperature)
        require(
            self.ngram_min <= self.ngram_max,
            f"decoding.ngram_min={self.ngram_min} must lie between 1 and ngram_max={self.ngram_max}",
        )


@dataclass(frozen=True)
class SuiteConfig(Section, name="suite"):
    """What ``eval`` measures (group ``suite``)."""

    name: str = key("heldout", "name of the suite, for reports and records", most_bytes=FILE_NAME_BYTES)
    prompts: str = key(
        "heldout", "a JSON-lines file of prompts; heldout: this run's held-out prompts", example="A.jsonl"
    )
    max_prompts: int = key(16, "at most so many prompts, spread evenly over the file", at_least=1, at_most=ANY_COUNT)
    max_new_tokens: int | None = key(
        None,
        "tokens generated at most in one turn; null: as sampling.max_new_tokens",
        at_least=1,
        example="128",
        at_most=1 << 24,
    )
    concurrency: int = key(1, "conversations decoded together", at_least=1, at_most=1 << 16)
    baselines: tuple[Literal["none", "ngram"], ...] = key(
        ("none", "ngram"), "what the drafter is compared with; none: no speculation; ngram: n-gram lookup"
    )
    policies: tuple[DraftPolicy, ...] = key(
        (), "draft policies to compare; none: decoding.draft_policy alone", example="[fixed,threshold]"
    )
    batches: tuple[int, ...] = key(
        (),
        "numbers of conversations decoded together, to compare draft policies with; none: suite.concurrency alone",
        at_least=1,
        example="[1,8]",
        at_most=1 << 16,
    )

    def _check(self) -> None:
        require_name("suite.name", self.name)
        for name in ("policies", "batches"):
            values = getattr(self, name)
            require(len(set(values)) == len(values), f"suite.{name}={list(values)} names one of them twice")
