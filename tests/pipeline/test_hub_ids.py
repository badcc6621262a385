"""``drafter.path`` and ``target.path`` as Hub ids with a revision, for every command that takes them, against a local
Hub.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_tools import turn_to
from local_hub import BREAK, LocalHub, local_hub

from spectrain import cli
from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.loading import compose
from spectrain.config.target_schema import TargetConfig
from spectrain.drafters.hub_drafters import drafter_name, drafter_path
from spectrain.errors import ConfigError, InputError

DRAFTER, TARGET = "org/tiny-eagle3", "org/tiny"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, finished: Path, arguments: list[str]):
    """With the finished run's drafter as the branch v1, and something else as main; and its target."""
    with local_hub() as found:
        turn_to(found, monkeypatch, tmp_path / "cache")
        files = content(finished / "drafter")
        found.add(DRAFTER, {**files, "README.md": b"a card", "training_args.bin": b"no"}, branch="v1")
        found.add(DRAFTER, {"config.json": b"{}", "model.safetensors": files["model.safetensors"]})
        target = Path(next(word for word in arguments if word.startswith("target.path=")).partition("=")[2])
        found.add(TARGET, content(target), branch="r1")
        found.add(TARGET, {"README.md": b"nothing yet"})
        yield found


def commit(hub: LocalHub, branch: str = "v1", repo: str = DRAFTER) -> str:
    return hub.repos[repo].branches[branch][-1]


@pytest.mark.parametrize(
    ("path", "revision", "found"),
    [
        ("org/name@v1", None, ("org/name", "v1")),
        ("org/name@refs/pr/3", None, ("org/name", "refs/pr/3")),
        ("org/name", "v1", ("org/name", "v1")),
        ("org/name@v1", "v1", ("org/name", "v1")),
        ("runs/mine@home/drafter", None, ("runs/mine", "home/drafter")),
        ("/data/mine@home", None, ("/data/mine@home", None)),
        ("mine@home", None, ("mine@home", None)),
    ],
)
def test_how_an_id_and_its_revision_are_written(path: str, revision: str | None, found: tuple[str, str | None]):
    for section in (DrafterConfig(path=path, revision=revision), TargetConfig(path=path, revision=revision)):
        assert (section.path, section.revision) == found


def test_a_folder_of_that_name_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "runs" / "mine@home").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert DrafterConfig(path="runs/mine@home").revision is None
    assert drafter_path(DrafterConfig(path="runs/mine@home")) == Path("runs/mine@home")


def test_two_revisions_are_a_mistake():
    with pytest.raises(ConfigError, match=r"drafter.revision=v2"):
        DrafterConfig(path="org/name@v1", revision="v2")


def test_a_revision_goes_with_its_drafter(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("drafter: {path: org/name, revision: v1}\n")
    assert compose([f"run.dir={tmp_path}"]).drafter.revision == "v1"
    assert compose([f"run.dir={tmp_path}", "drafter.path=org/other"]).drafter.revision is None
    assert compose([f"run.dir={tmp_path}", "drafter.path=org/other@v2"]).drafter.revision == "v2"


def test_only_the_drafter_is_fetched_and_only_once(hub: LocalHub, finished: Path):
    config = DrafterConfig(path=f"{DRAFTER}@v1")
    folder = drafter_path(config)
    assert content(folder) == content(finished / "drafter")
    assert drafter_name(config) == f"{DRAFTER}@{commit(hub)}"
    hub.requests.clear()
    assert drafter_path(config) == folder and not hub.requests


@pytest.mark.parametrize(
    ("path", "says"),
    [("org/nothing", "org/nothing"), (f"{DRAFTER}@v9", DRAFTER), ("no_owner", "no folder here")],
)
def test_what_is_not_there_is_one_line(hub: LocalHub, run_dir: Path, capsys, path: str, says: str):
    assert cli.main(["eval", f"run.dir={run_dir}", f"drafter.path={path}"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and says in last and "unexpected" not in last


def test_a_download_that_breaks_off_is_one_line_and_goes_on(hub: LocalHub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.fail("GET", "model.safetensors", BREAK, count=100)
    with pytest.raises(InputError, match="run again"):
        drafter_path(DrafterConfig(path=f"{DRAFTER}@v1"))
    hub.faults.clear()
    assert (drafter_path(DrafterConfig(path=f"{DRAFTER}@v1")) / "model.safetensors").is_file()


def test_eval_records_which_drafter_it_was(hub: LocalHub, run_dir: Path, finished: Path):
    suite = ("suite.max_prompts=2", "suite.baselines=[]", "suite.name=again")
    assert cli.main(["eval", f"run.dir={run_dir}", f"drafter.path={DRAFTER}@v1", *suite]) == 0
    record = json.loads((run_dir / "eval" / "again-hf-eagle3-n3-t0.json").read_text())
    assert record["drafter"] == f"{DRAFTER}@{commit(hub)}"


def test_fit_goes_on_from_it(hub: LocalHub, tmp_path: Path, arguments: list[str], finished: Path, run_dir: Path):
    command = ["fit", *arguments, f"run.dir={run_dir}", f"drafter.path={DRAFTER}", "drafter.revision=v1"]
    assert cli.main([*command, "trainer.epochs=1"]) == 0
    fixed = json.loads((run_dir / "manifest.json").read_text())["stages"]["fit"]["inputs"]["fixed"]
    weights = json.loads((finished / "manifest.json").read_text())["stages"]["fit"]["outputs"]["weights"]
    assert (fixed["weights of drafter.path"], fixed["drafter.revision"]) == (weights, "v1")


def test_serve_names_the_commit(hub: LocalHub, arguments: list[str], capsys):
    target = next(word for word in arguments if word.startswith("target.path="))
    assert cli.main(["serve", f"drafter.path={DRAFTER}@v1", target, "--print"]) == 0
    said = capsys.readouterr().out
    assert f'"model": "{DRAFTER}"' in said and f'"revision": "{commit(hub)}"' in said
    assert hub.count("GET", "model.safetensors") == 0  # vLLM fetches it


def test_convert_takes_it(hub: LocalHub, tmp_path: Path):
    out = tmp_path / "eagle"
    assert cli.main(["convert", f"drafter.path={DRAFTER}@v1", "convert.to=eagle", f"convert.out={out}"]) == 0
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]


def test_a_target_by_its_id_and_revision(hub: LocalHub, tmp_path: Path, arguments: list[str]):
    others = [word for word in arguments if not word.startswith("target.path=")]
    run = tmp_path / "of_the_hub"
    command = [
        "generate",
        *others,
        f"target.path={TARGET}@r1",
        f"run.dir={run}",
        "data.max_train=2",
        "data.max_heldout=1",
    ]
    assert cli.main(command) == 0
    assert json.loads((run / "manifest.json").read_text())["target"] == {
        "id": TARGET,
        "revision": commit(hub, "r1", TARGET),
    }


def test_records_published_with_a_drafter_are_compared(hub, finished: Path, capsys: pytest.CaptureFixture[str]):
    records = {f"eval/{path.name}": path.read_bytes() for path in (finished / "eval").glob("*.json")}
    assert len(records) > 2
    hub.add("org/measured", records, branch="v1")
    hub.add("org/measured", {"README.md": b"nothing else"})
    assert cli.main(["eval", "compare", str(finished), "org/measured@v1"]) == 0
    shown = capsys.readouterr().out
    assert "B org/measured@v1" in shown and "3 of 3" in shown and "+0.000" in shown
    for name, reason in (
        ("org/measured", "was published without evaluation records"),
        ("org/absent", "the Hub does not hand it out"),
        ("no/such/folder", "neither a record"),
    ):
        assert cli.main(["eval", "compare", str(finished), name]) == 2
        assert reason in capsys.readouterr().err
