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

Baseline = Literal["none", "ngram", "suffix", "draft_model"]
BASELINES: tuple[str, ...] = get_args(Baseline)  # methods that need no trained drafter


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
    draft_model: str | None = key(
        None,
        "folder or Hub id of a small language model with the target's tokenizer, which the method draft_model drafts "
        "with; null: none",
        example="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
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
    path: str | None = key(
        None,
        "a JSON-lines file with turns that is read instead of the suite's own source, as where there is no network; "
        "null: the suite's source",
        example="gsm8k.jsonl",
    )
    hub: str = key(
        "", "data set on the Hub, or a local folder of one, that the prompts are made of", example="openai/gsm8k"
    )
    revision: str | None = key(
        None, "commit of suite.hub; null: the newest", example="e53f048856ff4f594e959d75785d2c2d37b678ee"
    )
    subset: str | None = key(None, "configuration of suite.hub; null: its only one", example="main")
    split: str = key("test", "split of suite.hub that is read")
    files: tuple[str, ...] = key(
        (),
        "files of suite.hub that are read by themselves, whatever the data set's own configurations are; the name of "
        "each is the category of its rows; none: those configurations",
        example="[qa.jsonl,rag.jsonl]",
    )
    turns: tuple[str, ...] = key(
        (),
        "prompt form of suite.hub: a text for each user turn, in which {name} stands for a column, {one|other} for the "
        "first of them that is there; a turn that is one column of several texts gives a turn for each",
        example='["{question}"]',
    )
    answer: str | None = key(
        None,
        "column of suite.hub with the right answer, or a form such as suite.turns that makes it of columns, by which "
        "answers are graded; null: none",
        example="answer",
    )
    grading: Literal["none", "number", "boxed", "tests"] = key(
        "none",
        "how an answer is compared with the right one; number: the last number of each; boxed: what \\boxed{} holds, "
        "or the last number where nothing is boxed; tests: the right answer is a program that tests the code of the "
        "answer, where suite.execute_code allows it; none: not at all",
    )
    execute_code: bool = key(
        False,
        "run the code of answers, which a model wrote, to grade it by tests; each in a process of its own with limits "
        "of time and memory, which is no sandbox: do it in a container",
    )
    domain: str | None = key(
        None,
        "kind of text, for prompts that name none themselves, or the column {name} that names it; null: none",
        example="maths",
    )
    categories: tuple[str, ...] = key(
        (), "only prompts of these categories are asked; none: all", example="[translation,summarization]"
    )
    context_tokens: int | None = key(
        None,
        "each prompt is preceded by other texts of the suite until it has about so many tokens; null: it stays as it "
        "is",
        at_least=1,
        example="4096",
        at_most=1 << 24,
    )
    lossless_seeds: int = key(
        0,
        "at temperatures above 0, answers to each of a few prompts, with and without speculation, whose distributions "
        "are compared; 0: they are not",
        at_least=0,
        example="128",
        at_most=1 << 16,
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
    baselines: tuple[Baseline, ...] = key(
        ("none", "ngram"),
        "what the drafter is compared with; none: no speculation; ngram: n-gram lookup; suffix: suffix decoding; "
        "draft_model: decoding.draft_model",
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

    @property
    def uses_heldout(self) -> bool:
        """Whether the run's own held-out prompts are asked."""
        return self.path is None and not self.hub and self.prompts == "heldout"

    @property
    def source(self) -> str:
        """What the prompts come from, as a message names it; empty: nothing is named."""
        return self.path or self.hub or self.prompts

    def _check(self) -> None:
        require_name("suite.name", self.name)
        require(
            self.grading == "none" or not self.hub or self.answer,
            f"suite.grading={self.grading} needs suite.answer: name the column with the right answer",
        )
        self._require_distinct("policies", "batches")
