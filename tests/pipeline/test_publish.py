"""``spectrain publish`` against a local Hub, with the Hub's own client: what is uploaded, what is refused, and what
happens when the Hub fails.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from hub_tools import turn_to
from local_hub import BREAK, TOKEN, LocalHub, local_hub
from safetensors.torch import load_file

from spectrain import cli
from spectrain.drafters.drafter_folder import load_drafter
from spectrain.drafters.serving_config import drafter_digest
from spectrain.hub import upload
from spectrain.stages.run_dir import RunDir

REPO, BASE = "org/tiny-eagle3", "org/tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with local_hub() as found:
        turn_to(found, monkeypatch, tmp_path / "cache")
        monkeypatch.setattr(upload.time, "sleep", lambda seconds: None)
        yield found


def publish(run_dir: Path, *overrides: str) -> int:
    return cli.main(["publish", f"run.dir={run_dir}", f"publish.repo={REPO}", f"publish.base_model={BASE}", *overrides])


def let_parity_pass(path: Path, passed: bool = True) -> None:
    """What ``eval parity`` records."""
    run_dir = RunDir(path)
    found = {"drafter": drafter_digest(run_dir.drafter), "passed": passed, "vllm": "0.32.0", "rounds": 40, "equal": 40}
    found |= {"near_ties": 0, "different": 0, "num_speculative_tokens": 3}
    with run_dir.locked():
        run_dir._put(
            "eval/parity-n3",
            {"status": "done", "inputs": {"fixed": {}, "growing": {}}} | {"outputs": {"parity": found}},
        )


def metadata(card: bytes) -> dict[str, Any]:
    return yaml.safe_load(card.decode().split("---\n")[1])


def test_what_is_uploaded_comes_back_bit_for_bit_and_loads(run_dir: Path, hub: LocalHub, tmp_path: Path):
    from huggingface_hub import snapshot_download

    let_parity_pass(run_dir)
    assert publish(run_dir, "publish.report=true", "publish.license=mit", "publish.languages=[en]") == 0
    assert hub.repos[REPO].private
    files = hub.newest(REPO)
    assert {"README.md", "config.json", "model.safetensors", "report.html", "eval/heldout-hf-eagle3-n3-t0.json"} < set(
        files
    )

    plot = ElementTree.fromstring(files["plots/acceptance_by_position.svg"].decode())
    assert plot.tag.endswith("svg") and b"var(--" not in files["plots/acceptance_by_position.svg"]

    folder = Path(snapshot_download(REPO, cache_dir=tmp_path / "other"))
    for name, content in files.items():
        assert (folder / name).read_bytes() == content
    assert (folder / "model.safetensors").read_bytes() == (run_dir / "drafter" / "model.safetensors").read_bytes()
    again, ours = load_drafter(folder), load_drafter(run_dir / "drafter")
    assert again.shape == ours.shape
    config = json.loads(files["config.json"])
    assert config["speculators_config"]["verifier"]["name_or_path"] == BASE

    found = metadata(files["README.md"])
    assert found["library_name"] == "speculators" and found["pipeline_tag"] == "text-generation"
    assert found["tags"] == ["speculative-decoding", "eagle3", "vllm"]
    assert (found["base_model"], found["license"], found["language"]) == (BASE, "mit", ["en"])
    record = json.loads((run_dir / "eval" / "heldout-hf-eagle3-n3-t0.json").read_text())
    (result,) = found["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == pytest.approx(record["acceptance_length"], abs=1e-4)
    card = files["README.md"].decode()
    assert f"vllm serve {BASE} --speculative-config" in card and f'"model": "{REPO}"' in card
    assert "Unverified" not in card and "equal" in card


def test_nothing_of_the_machine_is_in_any_file(run_dir: Path, arguments: list[str], tmp_path: Path):
    assert publish(run_dir, "publish.dry_run=true", "publish.unverified=true", "publish.report=true") == 0
    folder = run_dir / "publish"
    prompts = [json.loads(line)["turns"][0] for line in Path(_value(arguments, "data.train")).read_text().splitlines()]
    places = [str(run_dir), str(tmp_path), _value(arguments, "target.path"), str(Path.home()), "/tmp/", *prompts]
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not [place for place in places if place.encode() in content], path
    assert load_file(folder / "model.safetensors").keys()
    assert (folder / "eval").stat().st_mode & 0o111 == 0o111  # can be entered


def _value(arguments: list[str], key: str) -> str:
    return next(word.partition("=")[2] for word in arguments if word.startswith(f"{key}="))


@pytest.mark.parametrize("name", ["verifier", "spectrain"])
def test_a_path_that_has_crept_into_the_configuration_is_refused(run_dir: Path, capsys, name: str):
    file = run_dir / "drafter" / "config.json"
    config = json.loads(file.read_text())
    config["auto_map"] = {"AutoModel": "/somewhere/else.py"}
    file.write_text(json.dumps(config))
    assert publish(run_dir, "publish.dry_run=true", "publish.unverified=true") == 1
    assert "auto_map.AutoModel" in capsys.readouterr().err
    assert not (run_dir / "publish").exists()


def test_unverified_weights_need_to_be_called_so(run_dir: Path, hub: LocalHub, capsys):
    assert publish(run_dir) == 2
    assert "eval parity" in capsys.readouterr().err and not hub.repos
    let_parity_pass(run_dir, passed=False)
    assert publish(run_dir) == 2
    assert publish(run_dir, "publish.unverified=true") == 0
    assert "**Unverified.**" in hub.newest(REPO)["README.md"].decode()


def test_a_check_of_other_weights_does_not_count(run_dir: Path, hub: LocalHub):
    let_parity_pass(run_dir)
    config = run_dir / "drafter" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert publish(run_dir) == 2


def test_a_local_target_is_asked_for_its_name(run_dir: Path, hub: LocalHub, capsys):
    let_parity_pass(run_dir)
    assert cli.main(["publish", f"run.dir={run_dir}", f"publish.repo={REPO}"]) == 2
    assert "publish.base_model" in capsys.readouterr().err and not hub.requests
    assert cli.main(["publish", f"run.dir={run_dir}", f"publish.repo={REPO}", "publish.dry_run=true"]) == 0
    assert "publish.base_model" in capsys.readouterr().err


def test_options_of_the_repository(run_dir: Path, hub: LocalHub):
    let_parity_pass(run_dir)
    options = (
        "publish.private=false",
        "publish.gated=manual",
        "publish.collection=org/drafters-1",
        "publish.branch=v2",
    )
    assert publish(run_dir, *options) == 0 and publish(run_dir, *options) == 0
    repo = hub.repos[REPO]
    assert (repo.private, repo.gated, hub.collections) == (False, "manual", {"org/drafters-1": [REPO]})
    assert "config.json" in hub.newest(REPO, "v2") and "config.json" not in hub.newest(REPO)
    assert len(repo.branches["v2"]) == 2  # where it began, and one commit: the second time nothing was new


def test_a_public_repository_is_not_written_to_by_default(run_dir: Path, hub: LocalHub, capsys):
    let_parity_pass(run_dir)
    hub.add(REPO, {"README.md": b"theirs"})
    assert publish(run_dir) == 2
    assert "publish.private=false" in capsys.readouterr().err
    assert hub.newest(REPO) == {"README.md": b"theirs"}


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "says"),
    [
        ("GET", "whoami", 401, 2, "hf auth login"),
        ("POST", "repos/create", 403, 1, "write access"),
        ("POST", "/commit/", 403, 1, "write access"),
        ("POST", "/commit/", 404, 1, "404"),
        ("POST", "/commit/", 400, 1, "400"),
        ("PUT", "/lfs/", 403, 1, "same command"),
    ],
)
def test_what_does_not_pass_by_itself_is_said_once(
    run_dir: Path, hub: LocalHub, capsys, method: str, path: str, status: int, code: int, says: str
):
    let_parity_pass(run_dir)
    hub.fail(method, path, status, count=100)
    assert publish(run_dir) == code
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and says in last and "unexpected" not in last and TOKEN not in last
    assert hub.count(method, path) == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "repos/create", 429),
        ("POST", "/commit/", 500),
        ("POST", "/commit/", 409),
        ("POST", "/commit/", BREAK),
        ("GET", "whoami", BREAK),
        ("POST", "preupload", 503),
        ("PUT", "/lfs/", 500),
        ("PUT", "/lfs/", BREAK),
    ],
)
def test_what_passes_is_tried_again(
    run_dir: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch, method: str, path: str, status: int
):
    waits: list[float] = []
    monkeypatch.setattr(upload.time, "sleep", waits.append)
    let_parity_pass(run_dir)
    headers = {"Retry-After": "17"} if status == 429 else {}
    hub.fail(method, path, status, count=2, headers=headers)
    assert publish(run_dir) == 0
    assert hub.newest(REPO)["model.safetensors"] == (run_dir / "drafter" / "model.safetensors").read_bytes()
    assert len(hub.repos[REPO].branches["main"]) == 2
    if status == 429:
        assert waits == [17, 17]


def test_an_upload_that_broke_off_goes_on(run_dir: Path, hub: LocalHub, capsys):
    """The weights are there, the commit is not: they are not sent again."""
    let_parity_pass(run_dir)
    hub.fail("POST", "/commit/", BREAK, count=100)
    assert publish(run_dir) == 1
    assert "same command" in capsys.readouterr().err
    assert (hub.count("PUT", "/lfs/"), len(hub.repos[REPO].branches["main"])) == (1, 1)
    hub.faults.clear()
    assert publish(run_dir) == 0
    assert (hub.count("PUT", "/lfs/"), len(hub.repos[REPO].branches["main"])) == (1, 2)


def test_a_commit_whose_answer_was_lost_is_not_made_twice(run_dir: Path, hub: LocalHub, monkeypatch):
    let_parity_pass(run_dir)
    assert publish(run_dir) == 0
    hub.fail("POST", "/commit/", BREAK, count=100)
    assert publish(run_dir) == 0  # all is there: no commit is asked for
    assert len(hub.repos[REPO].branches["main"]) == 2
