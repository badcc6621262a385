"""A finished run of the tiny target, once a module, and copies of it: fixtures, for the conftest.py of a folder."""

import shutil
from pathlib import Path

import pytest
from workplace import make

from spectrain import cli


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    return make(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="module")
def finished(arguments, tmp_path_factory):
    """A run directory after ``spectrain run``."""
    path = tmp_path_factory.mktemp("runs") / "finished"
    assert cli.main(["run", *arguments, f"run.dir={path}"]) == 0
    return path


@pytest.fixture
def run_dir(finished, tmp_path):
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))
