"""The bench of what starting costs does what it says, at a size that takes no time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import bench_startup

from spectrain.data import prompts
from spectrain.data.hidden_states import ShardFile, StoredHiddenStates
from spectrain.data.responses import ResponseStore
from spectrain.files import FileState


@pytest.mark.slow
def test_each_command_starts_in_a_run_directory_of_the_bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileState, "settled", True)
    monkeypatch.setattr(bench_startup, "_SETTLES_S", 0)
    bench_startup.write_workplace(tmp_path, 200)
    bench_startup.start("generate", tmp_path)
    assert "0 of 200 responses" in capsys.readouterr().err
    bench_startup.write_responses(tmp_path)
    bench_startup.start("capture", tmp_path)
    assert "0 of 9,600 tokens" in capsys.readouterr().err
    bench_startup.write_states(tmp_path)
    store = StoredHiddenStates(tmp_path / "run" / "hidden_states")
    store.verify_checksums()
    responses = {r.key: r for r in ResponseStore(tmp_path / "run" / "responses").load()}
    for number in (0, 77, 199):
        states, response = store[number], responses[store.keys[number]]
        assert states.input_ids.tolist() == response.input_ids.tolist()
        assert states.loss_mask.tolist() == response.loss_mask.tolist()
    # Neither prompts nor, again, all bytes of the hidden states are read.
    monkeypatch.setattr(prompts, "load_prompts", lambda path: pytest.fail("reads prompts"))
    monkeypatch.setattr(ShardFile, "verify", lambda shard, on_bytes: pytest.fail("reads hidden states"))
    bench_startup.start("fit", tmp_path)
    assert "136 documents" in capsys.readouterr().err


def test_what_a_document_costs_is_the_difference_to_the_smallest_run() -> None:
    starts = [
        bench_startup.Start("fit", 1000, 9.0, 8.0, 600_000_000, 500_000_000),
        bench_startup.Start("fit", 11_000, 12.0, 10.0, 620_000_000, 510_000_000),
    ]
    *_, last = bench_startup.table(starts).splitlines()
    assert [cell.strip() for cell in last.strip("|").split("|")][-2:] == ["200", "2,000"]
