"""What clients of a server saw, from the measurements of vLLM's benchmark client: how long they waited, and for how
many answers the wait was short enough.

Times are the client's, of the successful requests of all repeats: *ttft* until the first token; *itl* between pieces of
the stream, each of which holds all tokens of a round, so that it grows with speculation; *tpot* for each token behind
the first, which can be compared; *latency* for the whole answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spectrain.config.serving_schema import ServingConfig
from spectrain.files import digest_strings


@dataclass(frozen=True)
class Spread:
    """Seconds: the mean, and what 50, 90 and 99 of a hundred stay below."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """None where nothing was measured, as between the tokens of answers of one token."""
        if not len(seconds):
            return None
        return cls(float(np.mean(seconds)), *(float(np.percentile(seconds, share)) for share in (50, 90, 99)))


@dataclass(frozen=True)
class ServingFigures:
    """Of one method under one load. requests: of all repeats; requests_per_s: answered; goodput_requests_per_s: of
    those within all limits that are set, ``None`` without a limit.
    """

    requests: int
    repeats: int
    seconds: float
    requests_per_s: float
    ttft_s: Spread
    tpot_s: Spread | None
    itl_s: Spread | None
    latency_s: Spread
    goodput_requests_per_s: float | None
    limit_ttft_s: float | None
    limit_tpot_s: float | None
    limit_latency_s: float | None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> ServingFigures:
        """From a record's JSON."""
        spreads = {name: Spread(**value) for name, value in values.items() if isinstance(value, Mapping)}
        return cls(**{**values, **spreads})


@dataclass(frozen=True)
class ClientRun:
    """One measurement of vLLM's client: seconds of its clock; of each request the tokens of its answer, a digest of its
    text, its waits; and the server's own count of rounds, ``None`` without speculation.
    """

    seconds: float
    output_tokens: tuple[int, ...]
    ttft_s: tuple[float, ...]
    itl_s: tuple[tuple[float, ...], ...]
    latency_s: tuple[float, ...]
    text_digests: tuple[str, ...]
    rounds: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    accepted_per_position: tuple[float, ...] = ()  # share of rounds

    @classmethod
    def read(cls, result: Mapping[str, Any]) -> ClientRun:
        """From the client's result file (``--save-detailed``)."""
        return cls(
            seconds=float(result["duration"]),
            output_tokens=tuple(map(int, result["output_lens"])),
            ttft_s=tuple(map(float, result["ttfts"])),
            itl_s=tuple(tuple(map(float, gaps)) for gaps in result["itls"]),
            latency_s=tuple(map(float, result["latencies"])),
            text_digests=tuple(digest_strings([text])[:16] for text in result["generated_texts"]),
            rounds=result.get("spec_decode_num_drafts"),
            drafted_tokens=result.get("spec_decode_draft_tokens"),
            accepted_tokens=result.get("spec_decode_accepted_tokens"),
            accepted_per_position=tuple(result.get("spec_decode_per_position_acceptance_rates") or ()),
        )

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> ClientRun:
        """From what ``dataclasses.asdict`` made of one, in JSON."""
        return cls(**{name: _frozen(value) for name, value in values.items()})

    @property
    def tokens_per_s(self) -> float:
        return sum(self.output_tokens) / self.seconds

    @property
    def tpot_s(self) -> list[float]:
        """Of each request; 0 for an answer of one token."""
        return [
            (latency - first) / (tokens - 1) if tokens > 1 else 0.0
            for latency, first, tokens in zip(self.latency_s, self.ttft_s, self.output_tokens, strict=True)
        ]


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def serving_figures(runs: Sequence[ClientRun], config: ServingConfig) -> ServingFigures:
    """The repeats of one measurement, together."""
    seconds = sum(run.seconds for run in runs)
    requests = sum(len(run.latency_s) for run in runs)
    within = [
        _within(config, waits) for run in runs for waits in zip(run.ttft_s, run.tpot_s, run.latency_s, strict=True)
    ]
    limited = any(limit is not None for limit in _limits(config))
    ttft, latency = Spread.of(_all(run.ttft_s for run in runs)), Spread.of(_all(run.latency_s for run in runs))
    if ttft is None or latency is None:
        raise ValueError("no request was answered")
    tokens = _all(run.output_tokens for run in runs)
    return ServingFigures(
        requests=requests,
        repeats=len(runs),
        seconds=seconds,
        requests_per_s=requests / seconds,
        ttft_s=ttft,
        tpot_s=Spread.of([t for t, count in zip(_all(run.tpot_s for run in runs), tokens, strict=True) if count > 1]),
        itl_s=Spread.of(_all(gaps for run in runs for gaps in run.itl_s)),
        latency_s=latency,
        goodput_requests_per_s=sum(within) / seconds if limited else None,
        limit_ttft_s=config.limit_ttft_s,
        limit_tpot_s=config.limit_tpot_s,
        limit_latency_s=config.limit_latency_s,
    )


def _all(parts: Any) -> list[Any]:
    return [value for part in parts for value in part]


def _limits(config: ServingConfig) -> tuple[float | None, ...]:
    return config.limit_ttft_s, config.limit_tpot_s, config.limit_latency_s


def _within(config: ServingConfig, waits: tuple[float, ...]) -> bool:
    """As vLLM's client counts them: an answer of one token keeps every limit of time per token."""
    return all(limit is None or wait <= limit for wait, limit in zip(waits, _limits(config), strict=True))
