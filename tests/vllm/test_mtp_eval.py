"""``spectrain eval engine=vllm`` of a tuned native head: vLLM serves the target's own head, untuned, and the overlay
with the tuned one, and both accept what our loop does. (Round by round: ``test_mtp_parity.py``.)
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mtp_tools import taught_target
from parity_tools import SHAPE

from spectrain.cli import main
from spectrain.evaluation.records import read_records

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
VLLM = ("engine=vllm", "engine.max_num_seqs=8", "engine.environment.VLLM_CPU_KVCACHE_SPACE=1")


def test_the_untuned_head_is_measured_beside_the_tuned_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, run = taught_target("mimo", tmp_path / "target", **{**SHAPE, "num_hidden_layers": 4}), tmp_path / "run"
    for name, numbers in (("train", range(40, 52)), ("heldout", range(60, 62))):
        lines = [json.dumps({"turns": [f"Tell me about number {number}."]}) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    asked = ["recipe=mtp_smoke", "target.tiny=null", f"target.path={target}", "target.name=taught", f"run.dir={run}"]
    asked += ["data=jsonl", f"data.train={tmp_path / 'train.jsonl'}", f"data.heldout={tmp_path / 'heldout.jsonl'}"]
    assert main(["run", *asked, "trainer.epochs=12", "trainer.learning_rate=1e-2", "suite.baselines=[]"]) == 0
    assert main(["eval", f"run.dir={run}", *VLLM]) == 0
    found = {(record.engine, record.method): record for record in read_records(run / "eval")}
    assert found.keys() == {(engine, method) for engine in ("hf", "vllm") for method in ("mtp", "mtp-untuned")}
    for method in ("mtp", "mtp-untuned"):
        ours, theirs = found["hf", method], found["vllm", method]
        assert (theirs.rounds, theirs.accepted_tokens) == (ours.rounds, ours.accepted_tokens)
        assert [prompt.output_digest for prompt in theirs.prompts] == [prompt.output_digest for prompt in ours.prompts]
    # Tuning has changed what is drafted, so the two are no copies of one measurement.
    assert found["vllm", "mtp"].acceptance_length > 1.5 > found["vllm", "mtp-untuned"].acceptance_length
