"""Commands in the documentation are commands that the program takes: commands, options, groups and keys exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from spectrain import cli
from spectrain.config.loading import compose, sweep_jobs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("spectrain ")]


@pytest.mark.parametrize("command", [pytest.param(line, id=line) for page in PAGES for line in commands(page)])
def test_it_can_be_typed_as_it_stands(command: str) -> None:
    parsed = cli.parse(shlex.split(command, comments=True)[1:])
    assert parsed.command
    if parsed.multirun:
        assert len(sweep_jobs(parsed.overrides)) > 1
    else:
        compose(parsed.overrides)


def test_each_page_has_some() -> None:
    assert all(len(commands(page)) >= 3 for page in PAGES)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    explained = {name for row in rows for name in row.split(", ")}
    assert {re.split("[<>=]", dependency)[0] for dependency in project["dependencies"]} <= explained
