"""What the documentation has that nobody should write by hand: the reference of all keys, groups and commands, and on
each command's page what it reads, writes and takes.

Each generated part stands between two comments, so a page holds other text as well. ``make reference`` writes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

from spectrain.config.commands import COMMANDS, SWITCHES, Command
from spectrain.config.folders import GROUP_FOLDERS, shipped_folder
from spectrain.config.help_text import default_of, first_comment, help_of, keys_by_section, type_of
from spectrain.config.overrides import flatten, sections
from spectrain.config.schema import SpectrainConfig

KEYS, COMMAND_PAGES = "reference.md", "commands"  # a file and a folder of docs/


# --- parts of a page -----------------------------------------------------------------------------------------------


def part(name: str, content: str) -> str:
    """``content`` between the comments that mark a generated part of a page."""
    begin, end = _marks(name)
    return f"{begin}\n\n{content.strip()}\n\n{end}"


def part_in(text: str, name: str) -> str:
    """The part of a page, comments included. ValueError where the page has none."""
    begin, end = _marks(name)
    return text[text.index(begin) : text.index(end) + len(end)]


def write_part(path: Path, name: str, content: str) -> None:
    """Replaces the part of a page by the present one."""
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(part_in(text, name), part(name, content)), encoding="utf-8")


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by `make {name}` -->", f"<!-- end of {name} -->"


# --- content -------------------------------------------------------------------------------------------------------


def all_keys_text() -> str:
    """Every section with its keys, and every group with its options."""
    lines = ["## Sections and their keys", ""]
    for section, keys in keys_by_section(flatten(SpectrainConfig())):
        lines += [f"### {section}", "", _about(section), "", *_table(keys), ""]
    lines += ["## Groups and their options", "", "A file each, which sets keys of the sections above.", ""]
    for group, folder in GROUP_FOLDERS.items():
        lines += [f"### Group {group}", "", f"`{group}=OPTION`, from `{folder}/{group}/`", ""]
        lines += ["[The table of recipes](../recipes/README.md)"] if group == "recipe" else [*_options(group)]
        lines += [""]
    return "\n".join(lines)


def _options(group: str) -> Iterator[str]:
    """Those that ship, whatever lies beside the working directory."""
    folder = shipped_folder(GROUP_FOLDERS[group])
    yield from ("| option | |", "|---|---|")
    for file in sorted((folder / group).glob("*.yaml")) if folder is not None else ():
        yield f"| `{file.stem}` | {_cell(first_comment(file))} |"


def _about(section: str) -> str:
    return " ".join((inspect.getdoc(sections()[section]) or "").split()).replace("``", "`")


def _table(keys: Sequence[str]) -> Iterator[str]:
    yield from ("| key | default | value | meaning |", "|---|---|---|---|")
    for key in keys:
        default = default_of(key)
        shown = f"`{_cell(default)}`" if default else ""
        yield f"| `{key}` | {shown} | {_cell(type_of(key))} | {_cell(help_of(key))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").strip()


def command_text(command: Command) -> str:
    """What one command reads, writes and takes, for its page; then the same of the words that may follow it."""
    words = [text for word in command.words for text in ("", f"## spectrain {word.name}", "", *_command_lines(word))]
    return "\n".join([*(() if command.needs_word else _command_lines(command)), *words]).strip()


def _command_lines(command: Command) -> Iterator[str]:
    yield from (
        command.detail,
        "",
        "| | |",
        "|---|---|",
        f"| reads | {command.reads} |",
        f"| writes | {command.writes} |",
    )
    for option in command.options:
        yield f"| `{' '.join(filter(None, (option.flag, option.metavar)))}` | {_cell(option.help)} |"
    groups = [group for group in command.sections if group in GROUP_FOLDERS]
    if groups:
        yield f"| groups | {', '.join(f'[`{group}=`](../{KEYS}#group-{group})' for group in groups)} |"
    yield from ("", "```bash", *command.examples, "```")
    if command.keys:
        yield from ("", f"Keys that matter here ([all keys](../{KEYS})):", "", *_table(command.keys))


def switches_text() -> str:
    """The options that every command takes."""
    lines = ["| option of every command | |", "|---|---|"]
    lines += [f"| `{', '.join(switch.flags)}` | {switch.help} |" for switch in SWITCHES]
    lines += ["", "| command | |", "|---|---|"]
    for entry in COMMANDS.values():
        for command in (entry, *entry.words):
            page = f"{COMMAND_PAGES}/{entry.name}.md"
            anchor = "" if command is entry else f"#spectrain-{command.name.replace(' ', '-')}"
            lines.append(f"| [`spectrain {command.name}`]({page}{anchor}) | {_cell(command.summary)} |")
    return "\n".join(lines)


def pages(docs: Path) -> dict[Path, str]:
    """Page -> its generated part."""
    found = {docs / "index.md": switches_text(), docs / KEYS: all_keys_text()}
    return found | {docs / COMMAND_PAGES / f"{name}.md": command_text(command) for name, command in COMMANDS.items()}


if __name__ == "__main__":
    import sys

    for path, content in pages(Path(sys.argv[1])).items():
        write_part(path, "reference", content)
