"""Suites: which prompts an evaluation answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spectrain.config.evaluation_schema import SuiteConfig
from spectrain.data.prompts import Conversation
from spectrain.errors import InputError
from spectrain.evaluation.suites import load_suite


def conversations(count: int) -> list[Conversation]:
    return [Conversation(id=f"c{i}", turns=(f"question {i}",)) for i in range(count)]


def write(path: Path, lines: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_heldout_suite_takes_the_runs_own_prompts_evenly_spaced():
    chosen = load_suite(SuiteConfig(prompts="heldout", max_prompts=4), conversations(10), roots=[])
    assert [c.id for c in chosen] == ["c0", "c2", "c5", "c7"]
    everything = load_suite(SuiteConfig(prompts="heldout", max_prompts=99), conversations(3), roots=[])
    assert [c.id for c in everything] == ["c0", "c1", "c2"]


def test_heldout_suite_without_heldout_prompts_is_an_error():
    with pytest.raises(InputError, match=r"data\.heldout"):
        load_suite(SuiteConfig(prompts="heldout"), [], roots=[])


def test_file_in_the_working_directory_comes_before_the_shipped_one(tmp_path, monkeypatch):
    shipped, work = tmp_path / "shipped", tmp_path / "work"
    write(shipped / "mine.jsonl", [{"turns": ["shipped"]}])
    write(shipped / "other.jsonl", [{"turns": ["other"]}])
    write(work / "mine.jsonl", [{"turns": ["own"]}])
    monkeypatch.chdir(work)

    def turns(prompts: str) -> list[tuple[str, ...]]:
        return [c.turns for c in load_suite(SuiteConfig(prompts=prompts), [], [shipped])]

    assert turns("mine.jsonl") == [("own",)]
    assert turns("other") == [("other",)]
    assert turns(str(shipped / "mine.jsonl")) == [("shipped",)]


def test_missing_or_broken_file_names_the_field_or_the_line(tmp_path):
    with pytest.raises(InputError, match=r"suite\.prompts.*nowhere"):
        load_suite(SuiteConfig(prompts="nowhere"), [], [tmp_path])
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"turns": ["fine"]}\n{"turns": [\n')
    with pytest.raises(InputError, match=r"broken\.jsonl:2"):
        load_suite(SuiteConfig(prompts=str(broken)), [], [])


def test_equal_prompts_count_once_and_answers_are_left_behind(tmp_path):
    answered = {
        "id": "b",
        "messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "an answer"}],
    }
    file = write(
        tmp_path / "p.jsonl",
        [{"id": "a", "turns": ["one"]}, answered, {"id": "c", "turns": ["one"]}, {"id": "d", "turns": ["three"]}],
    )
    chosen = load_suite(SuiteConfig(prompts=str(file)), [], [])
    assert [(c.id, c.turns, c.answers) for c in chosen] == [
        ("a", ("one",), None),
        ("b", ("two",), None),
        ("d", ("three",), None),
    ]


def test_system_prompt_is_given_only_to_those_without(tmp_path):
    file = write(tmp_path / "p.jsonl", [{"turns": ["one"]}, {"turns": ["two"], "system": "own"}])
    assert [c.system for c in load_suite(SuiteConfig(prompts=str(file)), [], [], system="given")] == ["given", "own"]
    assert [c.system for c in load_suite(SuiteConfig(prompts=str(file)), [], [])] == [None, "own"]
