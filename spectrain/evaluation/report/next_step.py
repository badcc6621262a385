"""What a measurement means for the reader's own workload, and the command to run next.

A drafter is worth something on the kind of prompts it was trained on. So the page says first on which prompts its
figures were measured, whether they pay there, and how to get such figures for the prompts that the reader serves.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from spectrain.evaluation.records import EvaluationRecord
from spectrain.evaluation.report.tables import number

_ANSWER_TOKENS = 300  # an answer of a usual length, to put the speed-up into seconds


@dataclass(frozen=True)
class TrainedOn:
    """What the measured drafter was trained on.

    workload: the prompt files, as they are named in ``data.train``. shipped: they came with spectrain, so they are
    nobody's own workload. heldout_suite: the name of the suite that holds the run's own held-out prompts. run_dir:
    where the run lies. again: the arguments that say what to train, for a run on other prompts.
    """

    workload: Sequence[str]
    shipped: bool
    prompts: int
    run_dir: str
    again: Sequence[str]
    heldout_suite: str = "heldout"


@dataclass(frozen=True)
class NextStep:
    """A few sentences and a command, for the top of the page."""

    meaning: str
    title: str
    command: str


def next_step(record: EvaluationRecord, trained_on: TrainedOn | None) -> NextStep | None:
    """None where it is not known what the drafter was trained on."""
    if trained_on is None:
        return None
    like = f"the {trained_on.prompts:,} prompts it was trained on ({', '.join(trained_on.workload)})"
    where = (
        f"Measured on {record.num_prompts} held-out prompts of the same kind as {like}."
        if record.suite == trained_on.heldout_suite
        else f"Measured on {record.num_prompts} prompts of the suite {record.suite}, not on held-out ones of {like}."
    )
    own = ["spectrain", "run", *trained_on.again, "run.dir=runs/mine"]
    if trained_on.shipped:
        return NextStep(
            f"{where} {_verdict(record)} On prompts of another kind it accepts fewer tokens: what counts for you is a "
            "drafter trained on your own prompts.",
            'Your own workload: a few hundred prompts, one {"turns": ["…"]} a line; a tenth is held out',
            _command([*own, "data=jsonl", "data.train=prompts.jsonl"]),
        )
    if _pays(record) is not False:
        return NextStep(
            f"{where} {_verdict(record)} Expect the same of prompts like these, and less of others.",
            "Serve it",
            _command(["spectrain", "serve", f"run.dir={trained_on.run_dir}"]),
        )
    return NextStep(
        f"{where} {_verdict(record)} More prompts of this kind teach it more; what is answered and captured already is "
        "kept.",
        "Train it on more prompts",
        _command(["spectrain", "run", f"run.dir={trained_on.run_dir}", _train(trained_on.workload)]),
    )


def _train(workload: Sequence[str]) -> str:
    return f"data.train=[{','.join([*workload, 'more.jsonl'])}]"


def _command(words: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, words))


def _pays(record: EvaluationRecord) -> bool | None:
    """Whether speed is gained for certain, lost for certain, or neither: None."""
    if record.speedup_interval is None:
        return None
    low, high = record.speedup_interval
    return True if low > 1 else False if high < 1 else None


def _verdict(record: EvaluationRecord) -> str:
    if record.speedup is None or record.baseline_tokens_per_s is None:
        return "How fast it decodes was not compared with no speculation."
    if _pays(record) is True:
        plain_s = _ANSWER_TOKENS / record.baseline_tokens_per_s
        return (
            f"It pays there: {_ANSWER_TOKENS} tokens that took {number(plain_s, digits=1)} s take "
            f"{number(plain_s / record.speedup, digits=1)} s."
        )
    if _pays(record) is False:
        return "It does not pay there: drafting costs more time than its accepted tokens save."
    return "Whether it pays there is not certain: too few prompts were measured, or it gains too little."
