"""The wheel, not the checkout: everything a user needs is inside, and works from a directory that holds nothing."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = ("conf", "data_gen", "recipes", "eval")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("spectrain-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Installed by pip into a folder; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        "--target",
        str(folder),
        str(wheel),
    ]
    subprocess.run(command, check=True)
    return folder


def spectrain(folder, working_dir, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "spectrain", *arguments]
    return subprocess.run(command, cwd=working_dir, env=environment, capture_output=True, text=True, check=False)


def test_all_shared_files_are_inside(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    for folder in SHARED:
        files = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.suffix in (".yaml", ".jsonl")]
        assert files
        assert {f"spectrain/_share/{file}" for file in files} <= inside
    assert "spectrain/evaluation/report/report.html.jinja" in inside
    assert {
        f"spectrain/{path.relative_to(ROOT / 'spectrain')}" for path in (ROOT / "spectrain").rglob("*.py")
    } <= inside
    assert not any(name.startswith(("tests/", "conf/")) for name in inside)


def test_the_package_comes_from_the_wheel(installed, tmp_path):
    code = "from spectrain.config import folders; print(folders.__file__); print(folders.shipped_folder('recipes'))"
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        str(installed / "spectrain/config/folders.py"),
        str(installed / "spectrain/_share/recipes"),
    ]


def test_help_from_an_empty_directory(installed, tmp_path):
    done = spectrain(installed, tmp_path, "fit", "--help")
    assert done.returncode == 0
    assert "quickstart" in done.stdout
    assert "drafter.draft_vocab_size=null" in done.stdout


def test_errors_from_an_empty_directory(installed, tmp_path):
    done = spectrain(installed, tmp_path, "run", "recipe=quickstart", "data.max_train=0")
    assert (done.returncode, done.stderr) == (2, "error: data.max_train=0 must be at least 1\n")


def test_a_dry_run_of_the_quickstart_finds_recipe_and_prompts(installed, tmp_path):
    from tiny import tiny_target

    target = tiny_target("llama", tmp_path / "target", num_hidden_layers=7)
    empty = tmp_path / "empty"
    empty.mkdir()
    more = [f"target.path={target}", "drafter.taps=[2,5,7]", "drafter.draft_vocab_size=100", "target.max_length=512"]
    done = spectrain(installed, empty, "run", "recipe=quickstart", *more, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "held out" in done.stdout
    assert list(empty.iterdir()) == []


def test_the_command_is_an_entry_point(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "spectrain = spectrain.cli:main" in archive.read(name).decode()
