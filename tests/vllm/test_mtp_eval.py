"""``spectrain eval engine=vllm`` of a tuned native head: vLLM serves the target's own head, untuned, and the overlay
with the tuned one, and both accept what our loop does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from spectrain.cli import main
from spectrain.evaluation.records import read_records

RECIPE = ("recipe=mtp_smoke", "data.max_train=12", "data.max_heldout=4", "trainer.epochs=4", "suite.baselines=[]")
VLLM = ("engine=vllm", "engine.max_num_seqs=8", "engine.environment.VLLM_CPU_KVCACHE_SPACE=1")


def test_the_untuned_head_is_measured_beside_the_tuned_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    assert main(["run", *RECIPE, f"run.dir={run}", "suite.max_prompts=4"]) == 0
    assert main(["eval", f"run.dir={run}", *VLLM]) == 0
    found = {(record.engine, record.method): record for record in read_records(run / "eval")}
    assert found.keys() == {(engine, method) for engine in ("hf", "vllm") for method in ("mtp", "mtp-untuned")}
    for method in ("mtp", "mtp-untuned"):
        ours, theirs = found["hf", method], found["vllm", method]
        assert (theirs.rounds, theirs.accepted_tokens) == (ours.rounds, ours.accepted_tokens)
        assert [prompt.output_digest for prompt in theirs.prompts] == [prompt.output_digest for prompt in ours.prompts]
    # Tuning has changed what is drafted, so the two are no copies of one measurement.
    assert found["vllm", "mtp"].accepted_tokens > found["vllm", "mtp-untuned"].accepted_tokens
