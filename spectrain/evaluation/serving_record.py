"""The record of one method at a server under one load, from the repeats of vLLM's benchmark client."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from spectrain.config.serving_schema import ServingConfig
from spectrain.decoding.acceptance import bootstrap_ratio_interval
from spectrain.evaluation.prompt_figures import PromptFigures
from spectrain.evaluation.records import Conditions, EvaluationRecord
from spectrain.evaluation.serving_figures import ClientRun, serving_figures
from spectrain.files import digest_strings


def serving_record(
    conditions: Conditions,
    keys: Sequence[str],
    runs: Sequence[ClientRun],
    baseline: Sequence[ClientRun] | None,
    config: ServingConfig,
    inputs: str,
) -> EvaluationRecord:
    """Rounds are the server's own count; it tells of no single request, so there is no interval over prompts for
    acceptance. Speed-up: a request's latency without speculation, for as many tokens, over its latency.

    Args:
        keys: digest of each request's prompt, in the order of the requests.
        baseline: the same requests without speculation; None for those themselves.
    """
    rounds, drafted, accepted = (
        sum(getattr(run, name) or 0 for run in runs) for name in ("rounds", "drafted_tokens", "accepted_tokens")
    )
    positions = conditions.num_speculative_tokens
    survival = tuple(_survival(runs, position, rounds) for position in range(positions))
    prompts = _prompts(conditions, keys, runs, baseline)
    compared = [(p.baseline_seconds, p.seconds) for p in prompts if p.baseline_seconds is not None]
    total_s = sum(ours for _, ours in compared)
    return EvaluationRecord(
        **{field.name: getattr(conditions, field.name) for field in dataclasses.fields(Conditions)},
        num_prompts=len(prompts),
        rounds=rounds,
        cut_rounds=0,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        acceptance_length=1 + accepted / rounds if rounds else None,
        acceptance_length_interval=None,
        acceptance_rate=accepted / drafted if drafted else None,
        acceptance_per_position=survival,
        conditional_acceptance_per_position=tuple(
            _share(now, before) for before, now in zip((1.0, *survival), survival, strict=False)
        ),
        output_tokens=_tokens(runs),
        output_tokens_per_s=_tokens_per_s(runs),
        baseline_tokens_per_s=None if baseline is None else _tokens_per_s(baseline),
        speedup=sum(theirs for theirs, _ in compared) / total_s if total_s > 0 else None,
        speedup_interval=bootstrap_ratio_interval([theirs for theirs, _ in compared], [ours for _, ours in compared]),
        prompts=prompts,
        inputs=inputs,
        serving=serving_figures(runs, config),
    )


def _survival(runs: Sequence[ClientRun], position: int, rounds: int) -> float | None:
    """Share of all rounds in which the drafts up to ``position`` were accepted."""
    if not rounds:
        return None
    return (
        sum(
            run.accepted_per_position[position] * (run.rounds or 0)
            for run in runs
            if position < len(run.accepted_per_position)
        )
        / rounds
    )


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _tokens(runs: Sequence[ClientRun]) -> int:
    return sum(sum(run.output_tokens) for run in runs)


def _tokens_per_s(runs: Sequence[ClientRun]) -> float:
    return _tokens(runs) / sum(run.seconds for run in runs)


def _prompts(
    conditions: Conditions, keys: Sequence[str], runs: Sequence[ClientRun], baseline: Sequence[ClientRun] | None
) -> tuple[PromptFigures, ...]:
    """Of each different prompt, over all its requests. Seconds are shared with the other requests under way."""
    ours, theirs = _by_prompt(keys, runs), None if baseline is None else _by_prompt(keys, baseline)
    found = []
    for key, (tokens, seconds, digests) in ours.items():
        scaled = None
        if theirs is not None and theirs[key][0]:
            scaled = theirs[key][1] * tokens / theirs[key][0] / conditions.concurrency
        found.append(
            PromptFigures(
                key=key[:16],
                domain=None,
                rounds=0,
                accepted_tokens=0,
                output_tokens=tokens,
                seconds=seconds / conditions.concurrency,
                baseline_seconds=scaled,
                batch=None,
                output_digest=digest_strings(sorted(set(digests)))[:16],
                correct=None,
            )
        )
    return tuple(found)


def _by_prompt(keys: Sequence[str], runs: Sequence[ClientRun]) -> dict[str, tuple[int, float, list[str]]]:
    """(tokens, seconds, digests of texts) of each prompt."""
    found: dict[str, tuple[int, float, list[str]]] = {}
    for run in runs:
        for key, count, latency_s, digest in zip(keys, run.output_tokens, run.latency_s, run.text_digests, strict=True):
            tokens, seconds, digests = found.get(key, (0, 0.0, []))
            found[key] = tokens + count, seconds + latency_s, [*digests, digest]
    return found
