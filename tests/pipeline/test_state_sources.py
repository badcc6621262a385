"""``states.source``: the same batches, losses and weights wherever hidden states come from; what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
from test_ranks import SPECTRAIN, TORCHRUN, run

from spectrain import cli
from spectrain.evaluation.records import read_records
from spectrain.stages.run_dir import RunDir

# Of the tiny Llama, every other layer is read from the disk for each pass.
LAYERS = ", ".join(f"model.layers.{number}: {'disk' if number % 2 else 'cpu'}" for number in range(7))
PLACES = f"model.embed_tokens: cpu, {LAYERS}, model.norm: disk, lm_head: cpu"
TIMES = {"tokens_per_s", "data_wait_share", "seconds", "simulation_s"}


def lines(path: Path) -> list[dict]:
    """Lines of metrics without what a clock says."""
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.endswith("_s") and name not in TIMES} for line in found
    ]


def assert_same_training(ours: Path, theirs: Path) -> None:
    assert lines(ours) == lines(theirs)
    assert any("loss" in line for line in lines(theirs))
    assert any("simulated_acceptance_length" in line for line in lines(theirs))
    weights = [(path / "drafter/model.safetensors").read_bytes() for path in (ours, theirs)]
    assert weights[0] == weights[1]


def untrained(finished: Path, path: Path, states: bool = False) -> Path:
    """A copy of the finished run, with its responses alone or with hidden states, too."""
    path.mkdir()
    for name in ("responses", "hidden_states")[: 1 + states]:
        shutil.copytree(finished / name, path / name)
    manifest = json.loads((finished / "manifest.json").read_text())
    manifest.pop("digest")
    kept = ("generate", "capture")[: 1 + states]
    manifest["stages"] = {name: manifest["stages"][name] for name in kept}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.mark.parametrize(
    "given",
    [
        ("states.source=inprocess",),
        ("states.source=inprocess", f"target.device_map={{{PLACES}}}"),
        ("states.source=inprocess", "states.memory_bytes=0", "drafter.init=target"),
        ("states.source=cached",),
        ("states.source=cached", "states.cache_bytes=200000", "drafter.init=target"),
    ],
    ids=["inprocess", "layers on the disk", "nothing kept", "cached", "little room"],
)
def test_training_is_that_on_stored_hidden_states_to_the_bit(given, arguments, finished, tmp_path):
    stored = finished
    if "drafter.init=target" in given:
        stored = untrained(finished, tmp_path / "stored", states=True)
        assert cli.main(["fit", *arguments, f"run.dir={stored}", "drafter.init=target"]) == 0
    path = untrained(finished, tmp_path / "run")
    assert cli.main(["fit", *arguments, f"run.dir={path}", *given]) == 0
    assert_same_training(path, stored)
    assert not (path / "hidden_states").exists()
    assert RunDir(path).outputs("fit")["states_source"] == given[0].partition("=")[2]
    assert RunDir(stored).outputs("fit")["states_source"] == "stored"
    cached = [file.stat().st_size for file in (path / "states_cache").rglob("*.safetensors")]
    if "cached" not in given[0]:
        assert not (path / "states_cache").exists()
    else:
        assert cached and (len(given) == 1 or sum(cached) <= 200000)
        assert (len(cached) == 22) == (len(given) == 1)


def test_hidden_states_are_those_of_their_stored_type(arguments, finished, tmp_path):
    paths = [untrained(finished, tmp_path / name) for name in ("stored", "inprocess")]
    for path in paths:
        given = ["hidden_states.dtype=int8", f"states.source={path.name}", "trainer.max_steps=2"]
        assert cli.main(["fit", *arguments, f"run.dir={path}", *given]) == 0
    assert_same_training(paths[1], paths[0])
    assert lines(paths[0])[1]["loss"] != lines(finished)[1]["loss"]


def test_the_whole_pipeline_and_the_same_command_again(arguments, finished, tmp_path, capsys):
    """What simulation predicts of the suite is in the records, though nothing is stored."""
    command = ["run", *arguments, f"run.dir={tmp_path / 'run'}", "states.source=inprocess"]
    assert cli.main(command) == 0
    assert "states.source=inprocess" in (tmp_path / "run/report.html").read_text()
    simulated = [
        record.simulated_acceptance_length
        for folder in (tmp_path / "run", finished)
        for record in read_records(folder / "eval")
        if record.method == "eagle3"
    ]
    assert len(simulated) == 2 and simulated[0] == simulated[1] > 1
    capsys.readouterr()
    assert cli.main(command) == 0
    said = capsys.readouterr().err
    assert "fit: unchanged, skipped" in said and "capture" not in said


@pytest.mark.parametrize(
    ("command", "given", "named"),
    [
        ("run", ["states.source=online"], ["states.source=online", "engine=hf", "inprocess"]),
        ("capture", ["states.source=inprocess"], ["states.source=inprocess", "capture"]),
        ("fit", ["states.source=cached", "trainer.loader_workers=2"], ["trainer.loader_workers=2", "cached"]),
        (
            "run",
            ["states.source=online", "engine=vllm_server", "engine.urls=[http://a:1]"],
            ["engine.urls", "engine.connector=stock"],
        ),
        (
            "run",
            ["states.source=online", "engine=vllm", "capture.during_generation=true"],
            ["capture.during_generation", "online"],
        ),
        ("fit", ["states.source=disk"], ["states.source", "inprocess"]),
        ("fit", ["states.cache_bytes=0"], ["states.cache_bytes"]),
    ],
)
def test_what_cannot_be_is_refused_before_work(command, given, named, arguments, tmp_path, capsys):
    assert cli.main([command, *arguments, f"run.dir={tmp_path / 'run'}", *given]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert all(word in said for word in named), said
    assert not (tmp_path / "run").exists()


def test_a_plan_shows_the_disk_that_hidden_states_take(arguments, tmp_path, capsys):
    shown = {}
    for given in (["stored"], ["inprocess"], ["cached", "states.cache_bytes=500000"]):
        more = [f"states.source={given[0]}", *given[1:], "plan.device=h100"]
        assert cli.main(["plan", *arguments, f"run.dir={tmp_path / 'run'}", *more]) == 0
        out = capsys.readouterr().out
        shown[given[0]] = next(line for line in out.splitlines() if line.lstrip().startswith("disk"))
        assert ("the target beside it" in out) == (given[0] != "stored")  # engine=hf: computed by each rank
    assert "hidden states at most" in shown["stored"] and "states.cache_bytes" not in shown["stored"]
    assert "no hidden states" in shown["inprocess"]
    assert "500 kB of hidden states at most (float32, of " in shown["cached"]  # a line that is wrapped


def test_a_run_of_an_earlier_version_goes_on(arguments, run_dir):
    """Its configuration names hidden_states.source, which could only be stored."""
    file = run_dir / "config.yaml"
    text = file.read_text()
    assert "\nhidden_states:\n" in text and "source: stored" in text
    file.write_text(text.replace("\nhidden_states:\n", "\nhidden_states:\n  source: stored\n"))
    assert cli.main(["fit", f"run.dir={run_dir}"]) == 0


@pytest.mark.slow
def test_two_ranks_and_a_document_that_fails_on_one(arguments, finished, tmp_path):
    """Both ranks read what either has cached; a document that fails ends both with its key, once."""
    paths = {name: untrained(finished, tmp_path / name) for name in ("stored", "cached", "failing")}
    for name in ("stored", "cached"):
        given = ["trainer.devices=2", f"states.source={name}", f"run.dir={paths[name]}"]
        code, said = run(SPECTRAIN, ["fit", *arguments, *given])
        assert code == 0, said
    assert_same_training(paths["cached"], paths["stored"])
    files = list((paths["cached"] / "states_cache").rglob("*.safetensors"))
    assert len(files) == 22  # each once

    from spectrain.data.responses import ResponseStore

    response = next(r for r in ResponseStore(finished / "responses").load() if r.split == "train")
    launcher = (*TORCHRUN[: TORCHRUN.index("-m", 3)], str(Path(__file__).parents[1] / "failing_ask.py"), response.key)
    # Without room for what comes along with others, each document is asked for itself.
    given = ["states.source=inprocess", "states.retries=0", "states.memory_bytes=0", "trainer.epochs=6"]
    code, said = run(launcher, ["fit", *arguments, *given, f"run.dir={paths['failing']}"])
    assert code == 1
    (error,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert response.key in error and "the device is gone" in error
