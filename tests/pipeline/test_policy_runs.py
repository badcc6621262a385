"""A drafter with a confidence head from training to the report: calibrated, saved, compared under every policy in
batches.
"""

import json
import math
import shutil

import pytest
from workplace import make

from spectrain import cli
from spectrain.drafters.drafter_folder import add_metadata, load_drafter
from spectrain.evaluation.records import read_records
from spectrain.files import with_digest


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    more = [
        "drafter=dspark",
        "drafter.num_layers=1",
        "drafter.block.block_size=4",
        "drafter.dspark.markov_rank=8",
        "drafter.taps=[1,3,5]",
    ]
    return [
        *make(tmp_path_factory.mktemp("workplace")),
        *more,
        "drafter.block.anchors=32",
        "trainer.epochs=3",
        "trainer.eval_documents=3",
    ]


@pytest.fixture(scope="module")
def finished(arguments, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "finished"
    assert cli.main(["fit", *arguments, f"run.dir={path}"]) == 0
    compared = [
        "suite.policies=[fixed,threshold,scheduler]",
        "suite.batches=[1,3]",
        "suite.max_prompts=6",
        "suite.baselines=[none]",
    ]
    assert cli.main(["eval", *arguments, f"run.dir={path}", *compared, "decoding.threshold=0.15"]) == 0
    return path


def test_calibration_is_logged_and_saved_with_the_drafter(finished):
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert all(len(line["confidence_error"]) == 3 for line in lines if "simulated_acceptance_length" in line)
    (last,) = (line for line in lines if "confidence_temperatures" in line)
    assert last["step"] == max(line["step"] for line in lines)
    assert last["confidence_documents"] == 6  # all that are held out, not the three that evaluations simulate
    raw, calibrated = (
        [x for x in last[name] if x is not None] for name in ("confidence_error", "confidence_error_calibrated")
    )
    assert sum(calibrated) <= sum(raw) + 1e-12
    config = json.loads((finished / "drafter/config.json").read_text())["spectrain"]
    assert config["confidence_temperatures"] == last["confidence_temperatures"] and "step" in config
    assert load_drafter(finished / "drafter").temperatures == tuple(last["confidence_temperatures"])


def test_a_kill_after_the_last_step_loses_no_calibration(finished, arguments, tmp_path):
    """The run directory as it is in between: last checkpoint and best drafter are written, the temperatures are not."""
    path = tmp_path / "killed"
    shutil.copytree(finished, path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["stages"]["fit"]["status"] = "running"
    (path / "manifest.json").write_text(json.dumps(with_digest(manifest)))
    add_metadata(path / "drafter", {"confidence_temperatures": []})
    assert load_drafter(path / "drafter").temperatures == ()

    assert cli.main(["fit", *arguments, f"run.dir={path}"]) == 0
    for name in ("drafter/config.json", "drafter/model.safetensors", "metrics.jsonl"):
        assert (path / name).read_bytes() == (finished / name).read_bytes()


def test_every_policy_is_measured_in_every_batch(finished):
    records = read_records(finished / "eval")
    found = [(r.method, r.concurrency, r.draft_policy) for r in records]
    policies = ("fixed", "threshold", "scheduler")
    assert found == [
        ("none", 1, "fixed"),
        ("none", 3, "fixed"),
        *(("dspark", batch, policy) for batch in (1, 3) for policy in policies),
    ]
    for record in records:
        assert record.method == "none" or record.output_identical
        assert (record.confidence is not None) == (record.method == "dspark" and record.draft_policy == "fixed")
        assert (record.draft_threshold is not None) == (record.draft_policy == "threshold")
    fixed, threshold = records[2], records[3]
    assert fixed.drafted_tokens == 3 * fixed.rounds
    assert 0 < threshold.drafted_tokens < 3 * threshold.rounds
    assert fixed.simulated_acceptance_length == fixed.acceptance_length
    assert threshold.simulated_acceptance_length is None
    assert len(fixed.confidence.ece) == len(fixed.confidence.auroc) == 3
    assert sum(count for _, _, count in fixed.confidence.bins) == sum(
        count for _, _, count in fixed.confidence.raw_bins
    )


def test_costs_are_saved_and_shown(finished):
    for size in (1, 3):
        cost = json.loads((finished / f"eval/steps/heldout-c{size}.json").read_text())
        assert cost["verify"][0][0] == 1
        assert cost["verify"][-1][0] == 4 * size
        assert all(seconds > 0 and math.isfinite(seconds) for _, seconds in cost["verify"] + cost["draft"])
    page = (finished / "report.html").read_text()
    for words in (
        "How far to draft",
        "threshold 0.15",
        "scheduler",
        "AUROC",
        "What a step costs",
        "Predicted and true",
    ):
        assert words in page, words


def test_measuring_again_does_nothing(arguments, finished, capsys):
    compared = [
        "suite.policies=[fixed,threshold,scheduler]",
        "suite.batches=[1,3]",
        "suite.max_prompts=6",
        "suite.baselines=[none]",
    ]
    assert cli.main(["eval", *arguments, f"run.dir={finished}", *compared, "decoding.threshold=0.15"]) == 0
    assert "unchanged, skipped" in capsys.readouterr().err


def test_a_drafter_without_confidence_is_refused_before_anything_happens(arguments, finished, tmp_path, capsys):
    folder = shutil.copytree(finished / "drafter", tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"enable_confidence_head": False}))
    code = cli.main(
        [
            "eval",
            *arguments,
            f"run.dir={tmp_path / 'run'}",
            f"drafter.path={folder}",
            "decoding.draft_policy=threshold",
        ],
    )
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert "no confidence head" in err
    assert not (tmp_path / "run").exists()
    code = cli.main(
        [
            "run",
            *arguments,
            f"run.dir={tmp_path / 'run'}",
            "drafter.dspark.confidence=false",
            "suite.policies=[scheduler]",
        ]
    )
    assert (code, "no confidence head" in capsys.readouterr().err) == (2, True)
