"""What the documentation names exists: commands, options, groups and keys, files and links."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from spectrain import cli
from spectrain.config.commands import COMMANDS
from spectrain.config.folders import GROUP_FOLDERS
from spectrain.config.help_text import explain
from spectrain.config.key_reference import pages, part, part_in
from spectrain.config.loading import compose, sweep_jobs
from spectrain.config.overrides import all_keys, mappings, sections

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / folder / "README.md" for folder in ("recipes", "eval", "data_gen", "docker")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
YAML = sorted(file for folder in ("conf", "recipes", "eval", "data_gen") for file in (ROOT / folder).rglob("*.yaml"))
# What stands for a word of the reader's own, in place of a command or of what is explained.
PLACEHOLDERS = {"COMMAND", "KEY", "SECTION"}


def commands(page: Path) -> list[str]:
    """Every command line of ours: in blocks of code, also behind a launcher (``torchrun … -m spectrain fit``), and in
    running text.
    """
    text = page.read_text(encoding="utf-8")
    fence = r"^ *```\w*\n(.*?)^ *```"
    blocks = "\n".join(re.findall(fence, text, flags=re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    inline = re.findall(r"`(spectrain [^`]+)`", re.sub(fence, "", text, flags=re.DOTALL | re.MULTILINE))
    found = [line for line in blocks.splitlines() if not line.lstrip().startswith("#")]
    found = [m.group(1) for line in found if (m := re.search(r"(?:^ *|-m |\$\()(spectrain \w.*)", line))] + inline
    return [" ".join(line.split()) for line in found if "…" not in line and not PLACEHOLDERS & set(line.split())]


COMMAND_LINES = sorted({line for page in PAGES for line in commands(page)})


@pytest.mark.parametrize("command", COMMAND_LINES)
@pytest.mark.slow
def test_it_can_be_typed_as_it_stands(command: str) -> None:
    # What the shell puts there: the number of a task, and how many there are.
    line = re.sub(r"\$\{?\w+?_(ID|COUNT)\b\}?", lambda found: "0" if found[1] == "ID" else "4", command)
    words = shlex.split(line, comments=True)
    parsed = cli.parse(words[1:])
    assert parsed.command or parsed.help or parsed.version
    if parsed.command is None or parsed.command.takes_names:
        return
    if parsed.command.takes_topics:
        if parsed.command.name == "help":
            explain(parsed.topics)
    elif parsed.multirun and "launcher" not in command:
        assert len(sweep_jobs(parsed.overrides)) > 1
    elif not parsed.multirun:
        compose(parsed.overrides)


def test_the_ways_to_write_a_command_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Say `spectrain plan recipe=quickstart`, not `spectrain plan …` or `spectrain help KEY`.\n\n"
        "1. so:\n\n   ```bash\n   spectrain eval \\\n       run.dir=a   # why\n   ```\n\n"
        "```\n# spectrain is a word here\nsrun python -m spectrain fit run.dir=b\n```\n"
    )
    assert commands(page) == [
        "spectrain eval run.dir=a # why",
        "spectrain fit run.dir=b",
        "spectrain plan recipe=quickstart",
    ]


def test_each_command_has_a_page_with_an_example() -> None:
    for command in COMMANDS.values():
        lines = commands(ROOT / "docs" / "commands" / f"{command.name}.md")
        for each in (*(() if command.needs_word else (command,)), *command.words):
            assert any(f"{line} ".startswith(f"spectrain {each.name} ") for line in lines), each.name


@pytest.mark.parametrize("page", pages(ROOT / "docs"), ids=lambda page: page.name)
def test_the_generated_parts_are_up_to_date(page: Path) -> None:
    expected = part("reference", pages(ROOT / "docs")[page])
    assert part_in(page.read_text(encoding="utf-8"), "reference") == expected, "run make reference"


def test_the_reference_has_every_key_with_its_default_and_meaning() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z_.0-9]+)` \| (.*) \|$", text, flags=re.MULTILINE))
    assert set(all_keys()) - set(sections()) <= rows.keys()
    assert rows["trainer.epochs"].startswith("`3` | a whole number; at least 1")
    assert "how often every training document is seen" in rows["trainer.epochs"]
    assert {file.stem for file in (ROOT / "conf" / "target").glob("*.yaml")} <= rows.keys()


@pytest.mark.parametrize("page", [*PAGES, *YAML], ids=lambda page: str(page.relative_to(ROOT)))
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
@pytest.mark.slow
def test_groups_and_options_exist(page: Path) -> None:
    """``trainer=muon`` in running text. One that the page tells the reader to write is not there."""
    groups, text = "|".join(GROUP_FOLDERS), page.read_text(encoding="utf-8")
    for group, option in re.findall(rf"`({groups})=([a-z]\w*)`", text):
        if f"write a file `{option}.yaml`" not in text:
            compose([f"{group}={option}"])


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists() and other.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(other), link


def test_the_index_leads_to_every_page() -> None:
    reached, todo = set[Path](), [ROOT / "docs" / "index.md"]
    while todo:
        page = todo.pop()
        reached.add(page)
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+\.md)", page.read_text(encoding="utf-8")):
            other = (page.parent / link).resolve()
            todo += [other] if other not in reached else []
    assert {page for page in PAGES if page.name != "index.md"} <= reached
    assert "(docs/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    explained = {name for row in rows for name in row.split(", ")}
    assert {re.split("[<>=]", dependency)[0] for dependency in project["dependencies"]} <= explained
