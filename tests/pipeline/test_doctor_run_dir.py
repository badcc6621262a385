"""``doctor run.dir=…`` on a finished run, and on copies of it with one thing damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from spectrain.files import with_digest, without_digest
from spectrain.stages.run_dir_checks import check_run_dir


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit(path: Path, change: Callable[[dict], None]) -> None:
    content = without_digest(json.loads(path.read_text()))
    change(content)
    path.write_text(json.dumps(with_digest(content)))


def first(folder: Path, pattern: str) -> Path:
    return min(folder.glob(pattern))


def test_a_finished_run_is_whole(run_dir: Path):
    found = list(check_run_dir(str(run_dir)))
    assert {finding.level for finding in found} == {"ok"}
    assert {finding.name for finding in found} >= {
        "manifest",
        "responses",
        "hidden states",
        "drafter",
        "records",
        "lineage",
    }


@pytest.mark.parametrize(
    ("name", "level", "damage"),
    [
        ("manifest", "warning", lambda run: (run / "manifest.json").write_text("{}")),
        ("manifest", "failure", lambda run: [path.write_text("{}") for path in run.glob("*manifest*")]),
        ("responses", "failure", lambda run: flip(first(run / "responses", "*.parquet"))),
        ("responses", "failure", lambda run: first(run / "responses", "*.parquet").unlink()),
        ("hidden states", "failure", lambda run: flip(first(run / "hidden_states", "*.safetensors"))),
        ("hidden states", "failure", lambda run: first(run / "hidden_states", "*.safetensors").unlink()),
        ("checkpoints", "warning", lambda run: flip(max((run / "checkpoints").glob("*/model.safetensors")))),
        ("drafter", "failure", lambda run: flip(run / "drafter" / "model.safetensors")),
        ("records", "failure", lambda run: flip_word(first(run / "eval", "*.json"))),
        (
            "lineage",
            "failure",
            lambda run: edit(run / "manifest.json", lambda m: m["target"].update(revision="0" * 64)),
        ),
        (
            "lineage",
            "warning",
            lambda run: edit(
                run / "manifest.json", lambda m: m["stages"]["capture"]["inputs"]["growing"].update(responses="9 (x)")
            ),
        ),
        (
            "lineage",
            "failure",
            lambda run: edit(run / "manifest.json", lambda m: m["stages"]["fit"]["outputs"].update(weights="0" * 16)),
        ),
    ],
)
def test_one_thing_damaged_is_one_thing_found(run_dir: Path, name: str, level: str, damage: Callable[[Path], None]):
    damage(run_dir)
    found = {(finding.name, finding.level) for finding in check_run_dir(str(run_dir))}
    assert (name, level) in found


def flip_word(path: Path) -> None:
    path.write_text(path.read_text().replace('"num_prompts": 3', '"num_prompts": 4'))


def test_a_drafter_of_another_run(run_dir: Path, tmp_path: Path):
    """Whole in itself, but not what this run trained, and not what was measured."""
    config = json.loads((run_dir / "drafter" / "config.json").read_text())
    config["spectrain"]["target_revision"] = "f" * 64
    (run_dir / "drafter" / "config.json").write_text(json.dumps(config))
    found = [(finding.name, finding.level) for finding in check_run_dir(str(run_dir))]
    assert (
        found.count(("lineage", "failure")) == 1 and ("lineage", "warning") in found and ("drafter", "warning") in found
    )


def test_no_run_directory(tmp_path: Path):
    (finding,) = check_run_dir(str(tmp_path / "nothing"))
    assert finding.level == "warning"
    shutil.rmtree(tmp_path)
