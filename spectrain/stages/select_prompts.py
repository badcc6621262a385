"""Prompts that a run draws from data sets (``data.path``, ``data.mix``), kept in its directory once they are drawn.

``prompts/`` holds ``train.jsonl`` and ``heldout.jsonl``, in the form of prompt files, and ``selection.json``: what was
asked for, and what became of the rows of each set. Later commands read these, so a run's prompts stay those of the
revision that they were drawn from, and only the first command needs the Hub.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from spectrain.config.data_schema import DataConfig
from spectrain.config.evaluation_schema import SuiteConfig
from spectrain.config.folders import group_options, prompt_roots
from spectrain.config.schema import SpectrainConfig
from spectrain.console import say
from spectrain.data.hub_sets import find_set
from spectrain.data.near_copies import SuiteOverlap
from spectrain.data.prompt_files import find_prompt_file
from spectrain.data.prompt_selection import PromptSource, select_prompts
from spectrain.data.prompts import Conversation, PromptSplit, load_prompts, split_prompts
from spectrain.errors import ConfigError, InputError, SpectrainError
from spectrain.evaluation.suites import load_suite
from spectrain.files import digest_strings, replace_folder
from spectrain.reading import read_json

_FILES = {"train": "train.jsonl", "heldout": "heldout.jsonl"}
_SELECTION = "selection.json"
_FOLDER = "prompts"
# Keys of ``data`` that a source has of its own.
_OF_SOURCE = ("path", "subset", "revision", "split", "columns", "license")
# What plan assumes of prompts that it does not read.
PLANNED_CHARS = 1000
_ALL_PROMPTS = 1 << 30


@dataclass(frozen=True)
class DrawnPrompts:
    """``split``: with ``data.system`` where a prompt has none. ``stored``: whether they came from the run directory."""

    split: PromptSplit
    record: list[dict[str, Any]]
    asked: str
    stored: bool

    def store(self, run_dir: Path) -> None:
        """Write them into the run directory, in one move."""

        def fill(folder: Path) -> None:
            for side, name in _FILES.items():
                lines = [json.dumps(_line(c), ensure_ascii=False) for c in getattr(self.split, side)]
                (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
            content = {"asked": self.asked, "sources": self.record}
            (folder / _SELECTION).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

        if not self.stored:
            replace_folder(run_dir / _FOLDER, fill, "the prompts")


def run_prompts(
    config: SpectrainConfig, run_dir: Path, planning: bool
) -> tuple[PromptSplit | None, DrawnPrompts | None]:
    """Training and held-out prompts, and how they were drawn where that was done; raises for a file or set that is
    missing, empty or broken, and for prompts that are both. ``planning``: a set that would have to be fetched is not
    read, and gives no prompts.
    """
    if not config.data.selects:
        return split_prompts(config.data, prompt_roots()), None
    if planning and not are_here(config.data, run_dir):
        return None, None
    drawn = drawn_prompts(config, run_dir)
    return drawn.split, drawn


def drawn_prompts(config: SpectrainConfig, run_dir: Path) -> DrawnPrompts:
    """The run's prompts: those of its directory where they are what is asked for, else drawn anew. Raises InputError
    for a set that cannot be reached or read, and where too few prompts are left.
    """
    data = config.data
    asked = _asked(data)
    folder = run_dir / _FOLDER
    content = stored_selection(config, run_dir)
    if content is not None:
        train, heldout = (load_prompts(folder / name) for name in _FILES.values())
        split = PromptSplit(_with_system(train, data.system), _with_system(heldout, data.system))
        return DrawnPrompts(split, content.get("sources", []), asked, stored=True)
    selection = select_prompts(
        _sources(data), data.heldout_fraction, data.seed, data.max_rows, data.near_duplicates, _overlap(data)
    )
    for report in selection.reports:
        say(report.note())
    split = PromptSplit(_with_system(selection.train, data.system), _with_system(selection.heldout, data.system))
    return DrawnPrompts(split, selection.record(), asked, stored=False)


def stored_selection(config: SpectrainConfig, run_dir: Path) -> dict[str, Any] | None:
    """How the prompts in the run directory were drawn, where they are what is asked for."""
    path = run_dir / _FOLDER / _SELECTION
    content: dict[str, Any] = read_json(path) if path.is_file() else {}
    return content if content and content.get("asked") == _asked(config.data) else None


def stored_files(run_dir: Path) -> list[Path]:
    """Those that a selection is stored in."""
    return [run_dir / _FOLDER / name for name in (*_FILES.values(), _SELECTION)]


def are_here(data: DataConfig, run_dir: Path) -> bool:
    """Whether the prompts can be had without a network."""
    stored = (run_dir / _FOLDER / _SELECTION).is_file() and read_json(run_dir / _FOLDER / _SELECTION)
    if stored and stored.get("asked") == _asked(data):
        return True
    return all(Path(own.path).expanduser().exists() for own in _settings(data).values())


def planned_prompts(data: DataConfig) -> PromptSplit | None:
    """Stands for prompts that a plan does not read: as many as are asked for, of one length. None where all are."""
    if data.max_train is None or data.max_heldout is None:
        return None
    one = Conversation(id="planned", turns=("x" * PLANNED_CHARS,))
    return PromptSplit([one] * data.max_train, [one] * data.max_heldout)


# --- sources -------------------------------------------------------------------------------------------------------


def _settings(data: DataConfig) -> dict[str, DataConfig]:
    """Name of each source -> its settings."""
    if not data.mix:
        return {Path(data.path).stem or "data": data}
    return {name: _option(name) for name in data.mix}


def _option(name: str) -> DataConfig:
    """The option of that name in the group ``data``."""
    options = group_options("data")
    if name not in options:
        raise ConfigError(f"data.mix.{name} is no option of data=: use {', '.join(sorted(options))}")
    values = yaml.safe_load(options[name].read_text(encoding="utf-8")) or {}
    settings = {key: values[key] for key in _OF_SOURCE if key in values}
    files: list[str] = list(values.get("train") or ())
    if not settings.get("path"):
        if len(files) != 1:
            raise ConfigError(f"data.mix.{name}: {options[name]} names neither one prompt file nor a data set")
        settings = {"path": str(find_prompt_file(files[0], prompt_roots(), f"data.mix.{name}"))}
    return DataConfig(**settings)


def _sources(data: DataConfig) -> list[PromptSource]:
    settings = _settings(data)
    total = sum(data.mix.values())
    shares = {name: data.mix[name] / total for name in settings} if data.mix else dict.fromkeys(settings, 1.0)
    return [
        PromptSource(
            name=name,
            found=find_set(own.path, own.subset, own.split, own.revision),
            columns=own.columns,
            license=own.license,
            train=_part(data.max_train, shares[name]),
            heldout=_part(data.max_heldout, shares[name]),
        )
        for name, own in settings.items()
    ]


def _part(most: int | None, share: float) -> int | None:
    return None if most is None else max(1, round(most * share))


def _asked(data: DataConfig) -> str:
    """Digest of everything that decides which prompts are drawn; of a local set its files, too."""
    chosen = ("heldout_fraction", "max_train", "max_heldout", "max_rows", "near_duplicates", "overlap_words", "seed")
    sources = {}
    for name, own in _settings(data).items():
        values: dict[str, Any] = {key: getattr(own, key) for key in _OF_SOURCE if key != "license"}
        if Path(own.path).expanduser().exists():
            values["files"] = find_set(own.path, own.subset, own.split, own.revision).revision
        sources[name] = values
    return digest_strings([sources, dict(data.mix), [getattr(data, name) for name in chosen]])


# --- suites --------------------------------------------------------------------------------------------------------


def _overlap(data: DataConfig) -> SuiteOverlap | None:
    """All suites there are but for the run's own prompts. Says which cannot be compared with."""
    if data.overlap_words is None:
        return None
    texts: dict[str, list[str]] = {}
    missing = []
    for name, file in group_options("suite").items():
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        try:
            found = _suite_texts(values)
        except SpectrainError:
            missing.append(name)
            continue
        if found:
            texts[name] = found
    if missing:
        say(f"note: prompts are not compared with the suites {', '.join(missing)}, which cannot be read here")
    return SuiteOverlap(texts, data.overlap_words)


def _suite_texts(values: Mapping[str, Any]) -> list[str]:
    """Of a suite, by its file; none for one that has no prompts of its own."""
    known = [name for name in SuiteConfig.__dataclass_fields__ if name in values]
    settings: dict[str, Any] = {
        name: tuple(values[name]) if isinstance(values[name], list) else values[name] for name in known
    }
    suite = SuiteConfig(**{**settings, "max_prompts": _ALL_PROMPTS})
    try:
        conversations = load_suite(suite, (), prompt_roots())
    except InputError:
        if suite.prompts in ("heldout", "") and not values.get("hub"):
            return []
        raise
    return ["\n".join(conversation.turns) for conversation in conversations]


def _with_system(conversations: list[Conversation], system: str | None) -> list[Conversation]:
    return [c if c.system is not None or system is None else replace(c, system=system) for c in conversations]


def _line(conversation: Conversation) -> dict[str, Any]:
    """As in a prompt file."""
    line: dict[str, Any] = {"id": conversation.id, "turns": list(conversation.turns)}
    line |= {} if conversation.system is None else {"system": conversation.system}
    line |= {} if conversation.tools is None else {"tools": list(conversation.tools)}
    line |= {} if conversation.domain is None else {"category": conversation.domain}
    return line | ({} if conversation.language is None else {"language": conversation.language})
