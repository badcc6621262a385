"""Typed configuration of ``eval serving``: the load that clients put on a server, and what they ask of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spectrain.config.keys import ANY_COUNT, Section, key, require

_LONGEST_S = 1e6


@dataclass(frozen=True)
class ServingConfig(Section, name="serving"):
    """How ``eval serving`` loads a server, and the limits within which an answer counts as good."""

    methods: tuple[str, ...] = key(
        (),
        "methods: none, ngram, suffix, draft_model, and the drafter's own, such as eagle3; none named: no speculation "
        "and the drafter",
        example="[none,ngram,eagle3]",
    )
    concurrency: tuple[int, ...] = key(
        (1, 8), "numbers of requests that are under way at any time", at_least=1, at_most=1 << 16, example="[1,8,32]"
    )
    request_rates: tuple[float, ...] = key(
        (),
        "numbers of requests that arrive in a second, at random moments, however many are under way",
        above=0,
        at_most=1e6,
        example="[0.5,2]",
    )
    requests: int = key(
        32,
        "requests of one measurement; prompts are asked again in their order until there are so many",
        at_least=1,
        at_most=ANY_COUNT,
    )
    repeats: int = key(2, "measurements of each load and method, taking turns", at_least=1, at_most=1000)
    warmups: int = key(4, "requests before the clock of a measurement starts", at_least=0, at_most=ANY_COUNT)
    servers: Literal["auto", "together", "in_turn"] = key(
        "auto",
        "whether the servers of all methods run at the same time, one of them at work; together: so that methods take "
        "turns load by load; in_turn: each is started when it is due, where the device holds one alone; auto: together "
        "on a CPU",
    )
    limit_ttft_s: float | None = key(
        None,
        "an answer is good if its first token comes within so many seconds; null: whenever it comes",
        above=0,
        at_most=_LONGEST_S,
        example="0.5",
    )
    limit_tpot_s: float | None = key(
        None,
        "and each further one within so many, on average; null: no limit",
        above=0,
        at_most=_LONGEST_S,
        example="0.05",
    )
    limit_latency_s: float | None = key(
        None, "and all of it within so many; null: no limit", above=0, at_most=_LONGEST_S, example="10"
    )

    def _check(self) -> None:
        self._require_distinct("methods", "concurrency", "request_rates")
        require(
            self.concurrency or self.request_rates,
            "serving.concurrency and serving.request_rates are empty: name a load",
        )
