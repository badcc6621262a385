"""What the documentation names exists: commands, options, groups and keys, files and links."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from spectrain import cli
from spectrain.config.folders import GROUP_FOLDERS
from spectrain.config.loading import compose, sweep_jobs
from spectrain.config.overrides import all_keys, mappings, sections

ROOT = Path(__file__).parents[2]
MANUAL = [
    ROOT / name for name in ("README.md", "docs/drafters.md", "docs/vllm.md", "recipes/README.md", "eval/README.md")
]
PAGES = [*dict.fromkeys((*MANUAL, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))))]
YAML = sorted(file for folder in ("conf", "recipes", "eval", "data_gen") for file in (ROOT / folder).rglob("*.yaml"))


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```(?:bash)?\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
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


def test_each_page_of_the_manual_has_some() -> None:
    assert all(len(commands(page)) >= 2 for page in MANUAL)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "data_gen/README.md", *YAML], ids=lambda page: str(page.relative_to(ROOT))
)
def test_keys_exist(page: Path) -> None:
    """Words such as ``drafter.taps`` that begin with the name of a section."""
    names = "|".join(field for field in sections() if "." not in field)
    text = re.sub(r"\b[\w/.-]+\.(py|md|json|jsonl|yaml|html|safetensors)\b", "", page.read_text(encoding="utf-8"))
    found = set(re.findall(rf"(?<![\w/.-])(?:{names})(?:\.[a-z_0-9]+)+(?![\w/(])", text))
    known = {*all_keys(), *sections()}
    assert {
        key for key in found if key not in known and not key.startswith(tuple(f"{m}." for m in mappings()))
    } == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_exist(page: Path) -> None:
    """Paths such as ``spectrain/cli.py`` and ``data/loader.py``, the latter inside the package."""
    named = set(re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|svg|yaml|txt))`", page.read_text(encoding="utf-8")))
    roots = (ROOT, ROOT / "spectrain", ROOT / "spectrain" / "drafters", page.parent)
    assert {name for name in named if "NAME" not in name and not any((root / name).exists() for root in roots)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_groups_and_options_exist(page: Path) -> None:
    """``trainer=muon`` in running text."""
    groups = "|".join(GROUP_FOLDERS)
    for group, option in re.findall(rf"`({groups})=([a-z]\w*)`", page.read_text(encoding="utf-8")):
        compose([f"{group}={option}"])


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    explained = {name for row in rows for name in row.split(", ")}
    assert {re.split("[<>=]", dependency)[0] for dependency in project["dependencies"]} <= explained
