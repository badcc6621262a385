"""``spectrain eval parity`` and ``spectrain eval engine=vllm`` from the command line, on a run that our own loop has
measured.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from parity_tools import SHAPE
from tiny import tiny_target

from spectrain.cli import main
from spectrain.engines.vllm.args import vllm_version
from spectrain.errors import RunError
from spectrain.evaluation.records import EvaluationRecord, read_records
from spectrain.stages import eval_parity as stage
from spectrain.stages.context import Context
from spectrain.stages.eval_parity import parity_record
from spectrain.stages.run_dir import RunDir

VLLM = ("engine=vllm", "engine.max_num_seqs=8", "engine.environment.VLLM_CPU_KVCACHE_SPACE=1")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A finished run: responses, states, drafter, and records of our own loop."""
    folder: Path = tmp_path_factory.mktemp("eval")
    tiny_target("llama", folder / "target", **SHAPE)
    for name, numbers in (("train", range(16)), ("heldout", range(16, 21))):
        turns = [[f"Tell me about number {number}.", "And then?"][: 1 + (number % 4 == 0)] for number in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"turns": turn}) + "\n" for turn in turns))
    given = [
        *(
            "data=jsonl",
            f"data.train={folder / 'train.jsonl'}",
            f"data.heldout={folder / 'heldout.jsonl'}",
            "sampling.temperature=0",
        ),
        *(
            f"target.path={folder / 'target'}",
            "target.name=tiny",
            "target.max_length=256",
            "sampling.max_new_tokens=24",
        ),
        *(
            "trainer.epochs=2",
            "trainer.packed_length=256",
            "trainer.learning_rate=0.01",
            "drafter.draft_vocab_size=150",
        ),
        *("suite.max_prompts=5", "suite.concurrency=2", f"run.dir={folder / 'run'}"),
    ]
    assert main(["run", *given]) == 0
    return given


def run_dir(arguments: list[str]) -> RunDir:
    return RunDir(arguments[-1].removeprefix("run.dir="))


def test_parity_passes_and_is_bound_to_the_weights(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = run_dir(arguments)
    theirs: list[Any] = []
    by_vllm = stage._theirs
    monkeypatch.setattr(stage, "_theirs", lambda context: theirs.extend(by_vllm(context)) or theirs)
    assert parity_record(run, run.drafter) is None
    assert main(["eval", "parity", *arguments, *VLLM]) == 0
    assert "parity: equal" in capsys.readouterr().out
    record = parity_record(run, run.drafter)
    assert record is not None and record["passed"] and record["rounds"] > 40 and record["different"] == 0
    assert record["equal"] + record["near_ties"] == record["rounds"]
    assert record["acceptance_per_position"]["loop"] == record["acceptance_per_position"]["vllm"] or record["near_ties"]
    assert (run.path / "logs" / "vllm-parity.log").is_file()

    # Other weights were never checked.
    changed = tmp_path / "drafter"
    changed.mkdir()
    for file in run.drafter.iterdir():
        changed.joinpath(file.name).write_bytes(file.read_bytes())
    changed.joinpath("config.json").write_text(changed.joinpath("config.json").read_text() + " ")
    assert parity_record(run, changed) is None

    # Asked again, nothing is done; with a server that drafts otherwise, the gate fails, says where, and is not
    # satisfied by that record.
    monkeypatch.setattr(stage, "_theirs", lambda context: pytest.fail("vLLM was started for nothing"))
    assert main(["eval", "parity", *arguments, *VLLM]) == 0
    monkeypatch.setattr(stage, "_theirs", lambda context: _one_wrong_draft(theirs[:2]))
    assert main(["eval", "parity", *arguments, *VLLM, "suite.max_prompts=2"]) == 1
    said = capsys.readouterr().err
    assert (
        "1 of " in said
        and "rounds differ; the first: prompt 1, round 3, anchor at " in said
        and "likely cause: " in said
    )
    entry = run.outputs("eval/parity-n3")["parity"]
    assert not entry["passed"] and entry["first_difference"]["slot"] == 2
    assert main(["eval", "parity", *arguments, *VLLM, "suite.max_prompts=2"]) == 1


def _one_wrong_draft(theirs: list[Any]) -> Any:
    rounds = list(theirs[1].rounds)
    first, second, *rest = rounds[3].drafts
    rounds[3] = dataclasses.replace(rounds[3], drafts=(first, (second + 1) % 300, *rest))
    return [theirs[0], dataclasses.replace(theirs[1], rounds=rounds), *theirs[2:]]


def test_records_of_vllm_are_those_of_our_loop(arguments: list[str]) -> None:
    """Same prompts, same rounds: all figures of acceptance are equal, and so is the output."""
    run = run_dir(arguments)
    assert main(["eval", *arguments, *VLLM]) == 0
    records = {(record.engine, record.method): record for record in read_records(run.eval)}
    assert set(records) == {(engine, method) for engine in ("hf", "vllm") for method in ("none", "ngram", "eagle3")}
    ours, theirs = records["hf", "eagle3"], records["vllm", "eagle3"]
    assert figures(ours) == figures(theirs)
    assert theirs.simulated_acceptance_length == ours.simulated_acceptance_length is not None
    assert theirs.engine_version.startswith("vllm 0.") and theirs.output_identical is True
    assert theirs.baseline_tokens_per_s == records["vllm", "none"].output_tokens_per_s
    assert theirs.speedup is not None and theirs.concurrency == 2 and theirs.peak_memory_bytes is None
    assert figures(records["hf", "none"]) == figures(records["vllm", "none"])
    assert records["vllm", "ngram"].num_speculative_tokens == 3 and records["vllm", "ngram"].output_identical is True
    assert "vllm" in run.report.read_text()


@pytest.mark.slow
def test_what_clients_of_the_served_drafter_see(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Two real servers, as `spectrain serve` starts them, and vLLM's own client."""
    run = run_dir(arguments)
    asked = ["serving.concurrency=[2]", "serving.requests=4", "serving.repeats=1", "serving.warmups=1", *VLLM]
    asked += ["suite.max_prompts=2", "suite.max_new_tokens=12", "decoding.num_speculative_tokens=2"]
    assert main(["eval", "serving", f"run.dir={run.path}", *asked, "serving.limit_latency_s=1000"]) == 0
    records = {record.method: record for record in read_records(run.eval / "serving")}
    plain, mine = records["none"], records["eagle3"]
    assert mine.rounds > 0 and mine.drafted_tokens == 2 * mine.rounds and plain.rounds == 0
    # Each answer is a first token of the prompt's own pass, and what its rounds committed; the limit cuts the last.
    assert mine.rounds + mine.accepted_tokens + 4 >= mine.output_tokens > 4
    assert [p.output_tokens for p in plain.prompts] == [p.output_tokens for p in mine.prompts]
    assert [p.output_digest for p in plain.prompts] == [p.output_digest for p in mine.prompts]
    for record in (plain, mine):
        figures = record.serving
        assert figures is not None and figures.requests == 4
        assert 0 < figures.ttft_s.p50 <= figures.latency_s.p50 and figures.itl_s is not None
        assert figures.goodput_requests_per_s == pytest.approx(figures.requests_per_s)
    assert mine.speedup is not None and mine.engine == "vllm_server" and mine.concurrency == 2
    capsys.readouterr()
    assert main(["eval", "serving", f"run.dir={run.path}", *asked]) == 0
    assert "2 measurements, 2 of them made already" in capsys.readouterr().err


def test_a_quantised_target_is_another_one(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What was made with the target as it is must not pass for what the quantised one would answer."""
    assert main(["capture", "--dry-run", *arguments, *VLLM]) == 0
    assert "unchanged" in (said := capsys.readouterr().out) and "quantization" not in said
    assert main(["capture", "--dry-run", *arguments, *VLLM, "engine.quantization=fp8"]) == 0
    assert "engine.quantization changed from null to fp8" in " ".join(capsys.readouterr().out.split())


def figures(record: EvaluationRecord) -> dict[str, Any]:
    names = (
        "rounds",
        "cut_rounds",
        "drafted_tokens",
        "accepted_tokens",
        "acceptance_length",
        "acceptance_per_position",
        "output_tokens",
    )
    return json.loads(json.dumps({name: getattr(record, name) for name in names}))


def test_a_server_that_is_started_here_measures_the_same(arguments: list[str], tmp_path: Path) -> None:
    """Without a baseline: it would be another start, and is the same for all engines."""
    run = RunDir(tmp_path / "run")
    shutil.copytree(run_dir(arguments).path, run.path)
    server = ["engine=vllm_server", *VLLM[1:], "suite.baselines=[]"]
    assert main(["eval", *arguments[:-1], f"run.dir={run.path}", *server]) == 0
    records = {(record.engine, record.method): record for record in read_records(run.eval)}
    ours, theirs = records["hf", "eagle3"], records["vllm_server", "eagle3"]
    assert figures(theirs) == figures(ours)
    assert theirs.engine_version == f"vllm {vllm_version()}" and theirs.concurrency == 2
    assert theirs.simulated_acceptance_length == ours.simulated_acceptance_length
    assert theirs.output_identical is None and theirs.speedup is None
    assert "vllm-eval-eagle3-1.log" in {log.name for log in (run.path / "logs").iterdir()}


def test_a_sweep_in_vllm_counts_the_rounds_of_our_own(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_dir(arguments)
    sweep = ["eval", "sweep", *arguments, "sweep.num_speculative_tokens=[2]", "sweep.methods=[none,ngram,eagle3]"]
    sweep += ["sweep.engines=[hf,vllm]", *VLLM[1:]]
    opened = Context.open_vllm

    def dies(context: Context, purpose: str, *others: Any) -> Any:
        if purpose == "sweep-ngram-n2":
            raise RunError("vLLM ended")
        return opened(context, purpose, *others)

    with monkeypatch.context() as patched:
        patched.setattr(Context, "open_vllm", dies)
        assert main(sweep) == 1
    assert "ngram was not measured to the end in vLLM" in " ".join(capsys.readouterr().err.split())
    kept = {path: path.read_bytes() for path in (run.eval / "sweep").glob("*.json")}
    assert len(kept) == 5
    assert main(sweep) == 0
    assert all(path.read_bytes() == content for path, content in kept.items())
    said = " ".join(capsys.readouterr().err.split())
    assert "6 cells, 5 of them measured already" in said
    assert "hf and vllm have the same acceptance length, within 95 % intervals, in 2 of 2 greedy cells" in said
    summary = run.eval / "sweep" / "summary"
    found = json.loads((summary / "recommendation.json").read_text())["engines"]
    assert [(cell["method"], cell["change"], cell["agrees"]) for cell in found] == [
        ("ngram", 0.0, True),
        ("eagle3", 0.0, True),
    ]
    assert {"speedup-heldout-hf.svg", "speedup-heldout-vllm.svg"} <= {path.name for path in summary.iterdir()}
    cells = {(r.engine, r.method): r for r in read_records(run.eval / "sweep")}
    assert len(cells) == 6
    for method in ("ngram", "eagle3"):
        ours, theirs = cells["hf", method], cells["vllm", method]
        assert (theirs.rounds, theirs.acceptance_per_position) == (ours.rounds, ours.acceptance_per_position)
        assert theirs.speedup and [p.key for p in theirs.prompts] == [p.key for p in ours.prompts]
