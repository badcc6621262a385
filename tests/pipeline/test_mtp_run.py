"""A native head through the whole pipeline: the recipe's own tiny target, the untuned head beside the tuned one, the
folder that is served; what fit and eval say where tuning makes nothing better.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_tools import turn_to
from local_hub import local_hub
from safetensors.torch import load_file

from spectrain import cli
from spectrain.target.smoke_targets import tiny_folder

RECIPE = ["recipe=mtp_smoke", "data.max_train=12", "data.max_heldout=4", "suite.max_prompts=2", "trainer.epochs=4"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
        assert cli.main(["run", *RECIPE, f"run.dir={folder}"]) == 0
    return folder


def record(run: Path, method: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "eval" / f"heldout-hf-{method}-n3-t0.json").read_text())
    return found


def test_the_untuned_head_is_measured_beside_the_tuned_one(run: Path) -> None:
    tuned, untuned = record(run, "mtp"), record(run, "mtp-untuned")
    assert tuned["output_identical"] and untuned["output_identical"]
    assert tuned["acceptance_length"] >= untuned["acceptance_length"] >= 1.0
    assert untuned["drafter"] is None and tuned["drafter"] is not None
    assert tuned["simulated_acceptance_length"] == pytest.approx(tuned["acceptance_length"], abs=5e-4)
    assert "native MTP, untuned" in (run / "report.html").read_text()


def test_it_is_served_in_the_targets_place(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", f"run.dir={run}", "--print"]) == 0
    words = capsys.readouterr().out
    assert str(run / "drafter") in words
    assert '{"method": "mtp", "num_speculative_tokens": ' in words and '"model"' not in words


def test_the_best_drafter_is_the_untuned_head_where_training_spoils_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(run.parent / "cache"))
    spoiled = ["drafter.loss.weights={ce: 0.0, tv: 1.0}", "trainer.learning_rate=1e-12", f"run.dir={tmp_path / 'run'}"]
    assert cli.main(["fit", *RECIPE, *spoiled]) == 0
    assert "the weights it began with are kept" in " ".join(capsys.readouterr().err.split())
    own = load_file(tiny_folder("mimo") / "model.safetensors")
    written = load_file(tmp_path / "run" / "drafter" / "tuned-mtp.safetensors")
    assert all(bool((tensor == own[name]).all()) for name, tensor in written.items())


def test_stitching_is_done_without_training_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(run.parent / "cache"))
    drafter = run / "drafter"
    assert any(path.is_symlink() for path in drafter.iterdir())
    before = (drafter / "tuned-mtp.safetensors").read_bytes()
    assert cli.main(["fit", *RECIPE, f"run.dir={run}", "export.stitch=true"]) == 0
    assert not any(path.is_symlink() for path in drafter.iterdir())
    assert (drafter / "tuned-mtp.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recipe=quickstart", "drafter.init=last_layer"], "drafter.init=last_layer"),
        (["recipe=quickstart", "export.stitch=true"], "export.stitch"),
        (["recipe=mtp_smoke", "drafter.num_layers=2"], "drafter.num_layers"),
    ],
)
def test_what_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_head_alone_is_published_and_served_from_the_hub(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(run.parent / "cache"))
    asked = [f"run.dir={run}", "publish.repo=org/tuned", "publish.base_model=org/tiny", "publish.unverified=true"]
    assert cli.main(["publish", *asked, "publish.dry_run=true"]) == 0
    folder = run / "publish"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("README.md", "config.json", "model.safetensors.index.json", "tuned-mtp.safetensors")
    ]
    assert (folder / "tuned-mtp.safetensors").read_bytes() == (run / "drafter" / "tuned-mtp.safetensors").read_bytes()
    card = (folder / "README.md").read_text()
    assert (
        "\nspectrain serve drafter.path=org/tuned\n" in card and '{"method": "mtp", "num_speculative_tokens": ' in card
    )
    assert "library_name: vllm" in card and "base_model: org/tiny" in card
    assert not [path for path in folder.iterdir() if str(run.parent).encode() in path.read_bytes()]
    with local_hub() as hub:
        turn_to(hub, monkeypatch, tmp_path / "hub")
        hub.add("org/tuned", {path.name: path.read_bytes() for path in folder.iterdir()})
        capsys.readouterr()
        target = tiny_folder("mimo")
        assert cli.main(["serve", "drafter.path=org/tuned", f"target.path={target}", "--print"]) == 0
    served = Path(next(word for word in capsys.readouterr().out.split() if "/snapshots/" in word))
    # What vLLM is given is the target with this head: its names lead to the head's file, all others to the target's.
    tensors = {name: load_file(served / file)[name] for name, file in index(served).items()}
    assert set(tensors) == set(load_file(target / "model.safetensors"))
    ours, theirs = load_file(folder / "tuned-mtp.safetensors"), load_file(target / "model.safetensors")
    assert all(torch.equal(tensor, ours.get(name, theirs[name])) for name, tensor in tensors.items())
    assert (served / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()


def index(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return found
