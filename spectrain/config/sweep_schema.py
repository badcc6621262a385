"""Typed configuration of ``eval sweep``: which cells are measured, and the workload that the recommendation is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spectrain.config.keys import HOTTEST, Section, check_temperature, key, require

SweptEngine = Literal["hf", "vllm", "vllm_server"]


@dataclass(frozen=True)
class SweepConfig(Section, name="sweep"):
    """The cells of ``eval sweep``: each combination of these is measured, and is one file in ``eval/sweep/``."""

    num_speculative_tokens: tuple[int, ...] = key(
        (1, 2, 4), "numbers of tokens that are drafted in a round", at_least=1, at_most=1024
    )
    methods: tuple[str, ...] = key(
        (),
        "methods: none, ngram, suffix, draft_model, and the drafters' own, such as eagle3; none named: no speculation, "
        "n-gram, suffix and the drafters",
        example="[eagle3,ngram,suffix,none]",
    )
    drafters: tuple[str, ...] = key(
        (),
        "further drafters of the same target, beside the run's own or drafter.path, each of another kind: run "
        "directories, folders or Hub ids (also as ORG/NAME@REVISION)",
        example="[runs/dflash,runs/dspark]",
    )
    engines: tuple[SweptEngine, ...] = key(
        (),
        "engines that measure all of it, beside each other; hf: our own loop; none named: engine.name. What vLLM does "
        "not have is left out there",
        example="[hf,vllm]",
    )
    suites: tuple[str, ...] = key(
        (),
        "suites by name, prompt files by path, or both as NAME:FILE, which reads the file in place of the suite's own "
        "source; none named: the suite that is configured",
        example="[gsm8k:gsm8k.jsonl,mt_bench]",
    )
    concurrency: tuple[int, ...] = key((1,), "numbers of conversations decoded together", at_least=1, at_most=1 << 16)
    temperatures: tuple[float, ...] = key(
        (), "temperatures; none named: decoding.temperature", at_least=0, at_most=HOTTEST, example="[0,0.7]"
    )
    context_tokens: tuple[int, ...] = key(
        (),
        "lengths in tokens that prompts are brought to by other texts of their suite before them; none named: prompts "
        "as they are",
        at_least=1,
        at_most=1 << 24,
        example="[2048,4096]",
    )
    baseline: Literal["interleaved", "shared"] = key(
        "interleaved",
        "what a cell's speed is compared with; interleaved: no speculation, measured again beside each cell, prompt by "
        "prompt (with vLLM on a GPU, which holds one at a time: before the others, and after them to tell the change); "
        "shared: one measurement for all cells of the same suite and concurrency, half the time but at the mercy of "
        "what else the machine does",
    )
    measure: bool = key(
        True,
        "measure the cells that are not there yet; false: what is there is summarised, as of a sweep that was stopped",
    )
    shares: dict[str, float] = key(
        make=dict,
        help="the workload that is recommended for: shares of its output tokens by suite; none named: equal shares",
        above=0,
        at_most=1e9,
        example="{gsm8k: 0.7, mt_bench: 0.3}",
    )

    def _check(self) -> None:
        self._require_distinct(
            *("num_speculative_tokens", "methods", "drafters", "engines", "suites", "concurrency", "temperatures"),
            "context_tokens",
        )
        for name in ("num_speculative_tokens", "concurrency"):
            require(getattr(self, name), f"sweep.{name} is empty: name at least one")
        for temperature in self.temperatures:
            check_temperature("sweep.temperatures", temperature)
