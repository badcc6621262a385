"""The bench of what starting costs does what it says, at a size that takes no time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import bench_startup

from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.data.responses import ResponseStore


@pytest.mark.parametrize("stage", bench_startup.STAGES)
def test_a_command_starts_in_a_run_directory_of_the_bench(
    tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_startup.write_workplace(tmp_path, 200)
    if stage != "generate":
        bench_startup.write_outputs(tmp_path, states=stage == "fit")
    bench_startup.start(stage, tmp_path)
    said = capsys.readouterr().err
    assert {"generate": "0 of 200 responses", "capture": "0 of 9,600 tokens", "fit": "136 documents"}[stage] in said
    if stage == "fit":
        store = StoredHiddenStates(tmp_path / "run" / "hidden_states")
        store.verify_checksums()
        responses = {r.key: r for r in ResponseStore(tmp_path / "run" / "responses").load()}
        for number in (0, 77, 199):
            states, response = store[number], responses[store.keys[number]]
            assert states.input_ids.tolist() == response.input_ids.tolist()
            assert states.loss_mask.tolist() == response.loss_mask.tolist()


def test_what_a_document_costs_is_the_difference_to_the_smallest_run() -> None:
    starts = [
        bench_startup.Start("fit", 1000, 9.0, 8.0, 600_000_000, 500_000_000),
        bench_startup.Start("fit", 11_000, 12.0, 10.0, 620_000_000, 510_000_000),
    ]
    *_, last = bench_startup.table(starts).splitlines()
    assert [cell.strip() for cell in last.strip("|").split("|")][-2:] == ["200", "2,000"]
