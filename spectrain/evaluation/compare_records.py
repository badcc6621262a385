"""Records side by side: which of their differences are more than chance, over the prompts that both answered.

Figures of two records may be compared where the conditions of both are the same; what differs is named, and refused
unless the reader asks for it all the same. What is compared on purpose (drafter, method, number of drafts) may differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spectrain.decoding.acceptance import percentile_interval, resampled_sums
from spectrain.errors import InputError
from spectrain.evaluation.prompt_figures import PromptFigures
from spectrain.evaluation.records import EvaluationRecord, Interval, read_record

LENGTH = "acceptance length"  # the figure's name in ``Difference``
# Conditions that must agree, and what they are called.
CONDITIONS = {
    "target": "target",
    "target_revision": "target revision",
    "engine": "engine",
    "engine_version": "engine version",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "proposal_policy": "proposal policy",
    "thinking": "thinking",
    "template_kwargs": "settings of the chat template",
    "max_new_tokens": "max_new_tokens",
    "concurrency": "concurrency",
    "context_tokens": "context tokens",
    "request_rate": "requests a second",
}


@dataclass(frozen=True)
class Difference:
    """A figure of two records over the prompts that both answered: B − A for lengths, B / A for speeds. ``interval``:
    95 %, prompts resampled in pairs; None with fewer than two.
    """

    name: str
    first: float
    second: float
    change: float
    interval: Interval | None
    none: float  # the change that says that both are the same

    @property
    def certain(self) -> bool:
        """The interval leaves out that both are the same."""
        return self.interval is not None and not self.interval[0] <= self.none <= self.interval[1]


@dataclass(frozen=True)
class Comparison:
    """Two records over ``prompts`` common prompts. ``differing``: conditions that are not the same, as text."""

    first: EvaluationRecord
    second: EvaluationRecord
    prompts: int
    differences: tuple[Difference, ...]
    same_output: int | None
    differing: tuple[str, ...]


def records_of(name: str) -> list[EvaluationRecord]:
    """The records that a name means: of a file, of a run directory (its evaluations and its sweep), or of a folder of
    records. InputError for one that holds none.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return [read_record(path)]
    if not path.is_dir():
        raise InputError(f"{name} is neither a record, nor a folder of records, nor a run directory")
    folders = (
        [path / "eval", path / "eval" / "sweep", path / "eval" / "serving"]
        if (path / "eval").is_dir() or (path / "manifest.json").is_file()
        else [path, path / "sweep"]
    )
    files = [file for folder in folders for file in sorted(folder.glob("*.json"))]
    if not files:
        raise InputError(f"{name} holds no evaluation records: run `spectrain eval` there first")
    return [read_record(file) for file in files]


def pairs(
    first: Sequence[EvaluationRecord], second: Sequence[EvaluationRecord]
) -> list[tuple[EvaluationRecord, EvaluationRecord]]:
    """Records of both sides that measure the same thing: suite, kind of method, number of drafts, temperature, engine,
    concurrency. Two single records are a pair whatever they measure.
    """
    if len(first) == len(second) == 1:
        return [(first[0], second[0])]

    def cell(record: EvaluationRecord) -> tuple[object, ...]:
        kind = "drafter" if record.is_drafter else record.method
        return (
            *(record.suite, kind, record.num_speculative_tokens, record.temperature, record.engine),
            *(
                record.concurrency,
                record.context_tokens,
                record.request_rate,
                record.draft_policy,
                record.draft_threshold,
            ),
        )

    ours: dict[tuple[object, ...], list[EvaluationRecord]] = defaultdict(list)
    for record in first:
        ours[cell(record)].append(record)
    # A run may hold several, of evaluations and of a sweep: the one that was measured alike.
    return [
        (min(ours[cell(record)], key=lambda other: len(differing_conditions(other, record))), record)
        for record in second
        if cell(record) in ours
    ]


def differing_conditions(first: EvaluationRecord, second: EvaluationRecord) -> list[str]:
    """``temperature 0 and 0.7``, for each condition that two records do not share."""
    found = []
    for field, name in CONDITIONS.items():
        ours, theirs = getattr(first, field, None), getattr(second, field, None)
        if ours != theirs:
            found.append(f"{name} {_short(ours)} and {_short(theirs)}")
    return found


def compare(first: EvaluationRecord, second: EvaluationRecord, anyway: bool = False) -> Comparison:
    """Raises InputError where conditions differ (unless ``anyway``), where a record has no figures of single prompts,
    or where both answered no prompt in common.
    """
    differing = differing_conditions(first, second)
    what = f"{first.file_name()} and {second.file_name()}"
    if differing and not anyway:
        raise InputError(
            f"{what} were measured under other conditions ({'; '.join(differing)}): measure one again, or add "
            "--anyway to compare them all the same"
        )
    for record in (first, second):
        if not record.prompts:
            raise InputError(f"{record.file_name()} has no figures of single prompts: measure it again")
    ours = {prompt.key: prompt for prompt in first.prompts}
    common = [(ours[prompt.key], prompt) for prompt in second.prompts if prompt.key in ours]
    if not common:
        raise InputError(f"{what} have no prompt in common: compare records of the same suite")
    differences = [
        found
        for found in (
            _ratio_difference(LENGTH, common, _length, relative=False),
            _ratio_difference("tokens/s", common, _rate, relative=True),
            _ratio_difference("accuracy", common, _correct, relative=False),
        )
        if found is not None
    ]
    greedy = first.temperature == second.temperature == 0
    same = sum(a.output_digest == b.output_digest for a, b in common) if greedy else None
    return Comparison(first, second, len(common), tuple(differences), same, tuple(differing))


def _length(prompt: PromptFigures) -> tuple[float, float]:
    """Whose ratio of sums is τ: a round commits its accepted drafts and one more token."""
    return prompt.rounds + prompt.accepted_tokens, prompt.rounds


def _rate(prompt: PromptFigures) -> tuple[float, float]:
    return prompt.output_tokens, prompt.seconds


def _correct(prompt: PromptFigures) -> tuple[float, float]:
    return (0.0, 0.0) if prompt.correct is None else (float(prompt.correct), 1.0)


def _ratio_difference(
    name: str,
    common: Sequence[tuple[PromptFigures, PromptFigures]],
    parts: Callable[[PromptFigures], tuple[float, float]],
    relative: bool,
) -> Difference | None:
    """How a ratio of sums differs. Both sides' prompts are drawn together."""
    figures = np.array([(*parts(a), *parts(b)) for a, b in common], dtype=np.float64)
    totals = figures.sum(axis=0)
    if totals[1] <= 0 or totals[3] <= 0 or totals[0] <= 0:
        return None

    def change(sums: np.ndarray) -> np.ndarray:
        ours, theirs = sums[..., 0] / sums[..., 1], sums[..., 2] / sums[..., 3]
        return theirs / ours if relative else theirs - ours

    interval = None
    if len(figures) > 1:
        sums_Rk = resampled_sums(figures.tolist())
        sums_Rk = sums_Rk[(sums_Rk[:, [1, 3]] > 0).all(axis=1) & (sums_Rk[:, 0] > 0)]
        interval = percentile_interval(change(sums_Rk)) if len(sums_Rk) else None
    return Difference(
        name,
        float(totals[0] / totals[1]),
        float(totals[2] / totals[3]),
        float(change(totals)),
        interval,
        1.0 if relative else 0.0,
    )


def _short(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else text[:16] + "…"
