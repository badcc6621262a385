"""``eval sweep`` with vLLM, without any vLLM at work: which is open when, and who answers in turn with whom. vLLM and
the clock are stand-ins: the machine becomes slower with each vLLM that is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from finished_runs import arguments

from spectrain import cli
from spectrain.decoding.acceptance import Round
from spectrain.decoding.loop import GenerationResult, LoopTiming, Prompt
from spectrain.errors import RunError
from spectrain.evaluation.records import EvaluationRecord, read_records
from spectrain.stages import answer_suite, sweep
from spectrain.stages.context import Context

__all__ = ["arguments"]

SECONDS = {"none": 2.0, "ngram": 1.0}  # of an answer, on a machine that is at rest


class VLLM:
    """Answers each prompt with four tokens."""

    now_s = 0.0
    opened: list[str] = []
    open_now: set[str] = set()
    answered: list[str] = []
    fails_at = -1

    def __init__(self, purpose: str) -> None:
        assert purpose not in VLLM.open_now
        self.name = purpose.removeprefix("sweep-")
        VLLM.opened.append(self.name)
        VLLM.open_now.add(self.name)

    def decode(
        self, prompts: list[Prompt], on_tokens: Callable[[int], None]
    ) -> tuple[list[GenerationResult], LoopTiming]:
        if len(VLLM.answered) == VLLM.fails_at:
            raise RunError("told to fail")
        assert self.name in VLLM.open_now
        VLLM.answered.append(self.name)
        method = self.name.partition("-")[0]
        VLLM.now_s += SECONDS[method] * len(VLLM.opened)
        rounds = [Round(9, 2, 1), Round(11, 2, 0)] if method == "ngram" else [Round(n, 0, 0) for n in (9, 10, 11)]
        return [GenerationResult([5, 6, 7, 8], rounds, "length") for _ in prompts], LoopTiming()

    def close(self) -> None:
        VLLM.open_now.remove(self.name)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    VLLM.now_s, VLLM.fails_at = 0.0, -1
    VLLM.opened, VLLM.answered, VLLM.open_now = [], [], set()
    monkeypatch.setattr(Context, "open_vllm", lambda context, purpose, args: VLLM(purpose))
    monkeypatch.setattr(sweep, "decoder_of", lambda context, client: client.decode)
    monkeypatch.setattr(answer_suite, "time", SimpleNamespace(perf_counter=lambda: VLLM.now_s))
    yield
    assert not VLLM.open_now


def swept(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, cpu: bool, *more: str
) -> tuple[int, dict[tuple[str, int], EvaluationRecord]]:
    monkeypatch.setattr(sweep, "is_cpu_build", lambda: cpu)
    command = ["eval", "sweep", *arguments, f"run.dir={folder / 'run'}", "engine=vllm", "sweep.methods=[none,ngram]"]
    command += ["sweep.num_speculative_tokens=[2,3]", "suite.max_prompts=2", "suite.max_new_tokens=4", *more]
    code = cli.main(command)
    found = read_records(folder / "run" / "eval" / "sweep")
    return code, {(record.method, record.num_speculative_tokens): record for record in found}


def test_on_a_cpu_no_speculation_takes_turns_with_each_method(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    code, found = swept(arguments, tmp_path, monkeypatch, True)
    assert code == 0 and VLLM.opened == ["none-n0", "ngram-n2", "ngram-n3"]
    plain, two, three = VLLM.opened
    # Off the clock first, then two prompts.
    assert VLLM.answered == [*[plain] * 3, *[plain, two] * 3, *[plain, three] * 3]
    # Three times as slow as at the beginning at last, and twice as fast as no speculation is then.
    assert [found["ngram", n].speedup for n in (2, 3)] == [2.0, 2.0]
    assert found["ngram", 3].baseline_tokens_per_s == pytest.approx(4 / 6)
    assert found["none", 0].output_tokens_per_s == pytest.approx(4 / 2)
    assert found["ngram", 2].output_identical and "tokens/s" not in capsys.readouterr().err


def test_where_one_is_open_at_a_time_the_machine_s_change_is_said(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    code, found = swept(arguments, tmp_path, monkeypatch, False)
    assert code == 0 and VLLM.opened == ["none-n0", "ngram-n2", "ngram-n3", "none-n0"]
    assert [found["ngram", n].speedup for n in (2, 3)] == pytest.approx([1.0, 2 / 3])
    assert "2.0 and 0.5 tokens/s, -75.0%" in " ".join(capsys.readouterr().err.split())
    # Shared: one at a time on a CPU, too, and nothing twice.
    VLLM.opened, VLLM.answered = [], []
    code, _ = swept(arguments, tmp_path, monkeypatch, True, "sweep.baseline=shared")
    assert code == 0 and VLLM.opened == ["none-n0", "ngram-n2", "ngram-n3"] and len(VLLM.answered) == 9


def test_one_that_dies_while_both_answer_is_opened_again(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    VLLM.fails_at = 6  # the first prompt of no speculation beside ngram
    code, found = swept(arguments, tmp_path, monkeypatch, True)
    assert code == 1 and list(found) == [("none", 0)]
    assert "ngram was not measured to the end in vLLM" in " ".join(capsys.readouterr().err.split())
    VLLM.fails_at, VLLM.opened = -1, []
    code, found = swept(arguments, tmp_path, monkeypatch, True)
    assert code == 0 and VLLM.opened == ["none-n0", "ngram-n2", "ngram-n3"]
    assert [found["ngram", n].speedup for n in (2, 3)] == [2.0, 2.0]
