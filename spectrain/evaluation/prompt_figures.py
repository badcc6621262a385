"""What one method did with one prompt: as it was decoded, and what a record keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectrain.decoding.acceptance import Round
from spectrain.files import digest_strings


@dataclass(frozen=True)
class PromptResult:
    """What one method did with one prompt.

    key: identifies the prompt, so that methods are compared prompt by prompt. rounds: of the speculative loop.
    output_ids: the generated ids. seconds: wall-clock time of the answer. batch: conversations decoded together share
    their time, so they carry the same number here and ``seconds`` is each one's share; ``None`` means that the prompt
    was decoded alone. domain: kind of text. correct: whether the answer is right, ``None`` where nobody graded it.
    """

    key: str
    rounds: Sequence[Round]
    output_ids: Sequence[int]
    seconds: float
    batch: int | None = None
    domain: str | None = None
    correct: bool | None = None


@dataclass(frozen=True)
class PromptFigures:
    """One prompt's part of a record, so that records can be compared prompt by prompt and weighted anew.

    key: of the prompt. rounds, accepted_tokens: of complete rounds. seconds: as in ``PromptResult``; baseline_seconds:
    what the baseline took for as many tokens. output_digest: of the generated ids. correct: whether the answer is
    right, where the suite is graded. ``None`` is what was not measured.
    """

    key: str
    domain: str | None
    rounds: int
    accepted_tokens: int
    output_tokens: int
    seconds: float
    baseline_seconds: float | None
    batch: int | None
    output_digest: str
    correct: bool | None


def timed_units(prompts: Sequence[PromptFigures]) -> list[list[PromptFigures]]:
    """Prompts that were timed together: each alone, or the batches. They are what is resampled to judge speed."""
    units: dict[object, list[PromptFigures]] = {}
    for prompt in prompts:
        units.setdefault(prompt.key if prompt.batch is None else prompt.batch, []).append(prompt)
    return list(units.values())


def accuracy(results: Sequence[PromptResult]) -> float | None:
    """Share of right answers among those graded; ``None`` where none was."""
    graded = [result.correct for result in results if result.correct is not None]
    return sum(graded) / len(graded) if graded else None


def prompt_figures(
    results: Sequence[PromptResult], baseline: Sequence[PromptResult] | None
) -> tuple[PromptFigures, ...]:
    """Figures of each result; ``baseline``: the same prompts in the same order, without speculation."""
    figures = []
    for index, result in enumerate(results):
        complete = [round_ for round_ in result.rounds if not round_.cut]
        theirs = None if baseline is None else baseline[index]
        scaled = None
        if theirs is not None and len(theirs.output_ids):
            scaled = theirs.seconds * len(result.output_ids) / len(theirs.output_ids)
        figures.append(
            PromptFigures(
                key=result.key[:16],
                domain=result.domain,
                rounds=len(complete),
                accepted_tokens=sum(round_.accepted for round_ in complete),
                output_tokens=len(result.output_ids),
                seconds=result.seconds,
                baseline_seconds=scaled,
                batch=result.batch,
                output_digest=digest_strings([str(token) for token in result.output_ids])[:16],
                correct=result.correct,
            )
        )
    return tuple(figures)
