"""Suites: which prompts an evaluation answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectrain.config.evaluation_schema import SuiteConfig
from spectrain.config.loading import compose
from spectrain.data.prompts import Conversation
from spectrain.errors import ConfigError, InputError
from spectrain.evaluation.suites import lengthened, load_suite, right_answers, source_size


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


# --- data sets of the Hub ------------------------------------------------------------------------------------------


def hub_suite(folder: Path, **keys: Any) -> SuiteConfig:
    return SuiteConfig(**{"name": "s", "prompts": "", "hub": str(folder), "files": ("rows.jsonl",), **keys})


def test_rows_become_prompts_by_the_suites_form(tmp_path):
    write(
        tmp_path / "rows.jsonl",
        [{"q": "2 + 2?", "kind": "sum", "a": "#### 4"}, {"q": "3 + 3?", "kind": "sum", "a": "6"}],
    )
    suite = hub_suite(tmp_path, turns=("{q}\nThink of {kind}.", "Sure?"), domain="{kind}", answer="a", grading="number")
    chosen = load_suite(suite, [], [])
    assert [c.turns for c in chosen] == [("2 + 2?\nThink of sum.", "Sure?"), ("3 + 3?\nThink of sum.", "Sure?")]
    assert {c.domain for c in chosen} == {"sum"} and [c.answers for c in chosen] == [None, None]
    assert right_answers(suite, []) == {
        chosen[0].prompt_digest(): "#### 4",
        chosen[1].prompt_digest(): "6",
    }


def test_a_column_of_several_texts_gives_a_turn_for_each_and_the_first_of_two_names_counts(tmp_path):
    write(tmp_path / "rows.jsonl", [{"turns": ["one", "two"]}])
    assert load_suite(hub_suite(tmp_path, turns=("{prompt|turns}",)), [], [])[0].turns == ("one", "two")


def test_files_are_categories_and_some_can_be_chosen(tmp_path):
    write(tmp_path / "qa.jsonl", [{"prompt": "who?"}])
    write(tmp_path / "rag.jsonl", [{"prompt": "what?"}])
    suite = {"turns": ("{prompt}",), "files": ("qa.jsonl", "rag.jsonl")}
    assert [(c.domain, c.turns) for c in load_suite(hub_suite(tmp_path, **suite), [], [])] == [
        ("qa", ("who?",)),
        ("rag", ("what?",)),
    ]
    chosen = load_suite(hub_suite(tmp_path, **suite, categories=("rag",)), [], [])
    assert [c.domain for c in chosen] == ["rag"]
    with pytest.raises(InputError, match=r"suite\.categories.*poem.*qa, rag"):
        load_suite(hub_suite(tmp_path, **suite, categories=("poem",)), [], [])


def test_whole_folders_are_read_by_their_split(tmp_path):
    write(tmp_path / "test.jsonl", [{"q": "of the test split"}])
    write(tmp_path / "train.jsonl", [{"q": "of the training split"}])
    chosen = load_suite(hub_suite(tmp_path, files=(), turns=("{q}",), split="test"), [], [])
    assert [c.turns for c in chosen] == [("of the test split",)]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"turns": ("{nothing}",)}, r"row 1 of rows has no column nothing.*: its columns are q"),
        ({"turns": ("{q}", " ")}, r"the turn ' ' is empty"),
        ({"turns": ("{q}",), "files": ("absent.jsonl",)}, r"suite\.hub=.*suite\.path=FILE"),
    ],
)
def test_what_a_source_lacks_is_named(tmp_path, keys, named):
    write(tmp_path / "rows.jsonl", [{"q": "why?"}])
    with pytest.raises(InputError, match=named):
        load_suite(hub_suite(tmp_path, **keys), [], [])


def test_a_data_set_needs_a_form(tmp_path):
    with pytest.raises(ConfigError, match=r"suite\.turns"):
        load_suite(hub_suite(tmp_path), [], [])


def test_a_file_stands_for_the_hub(tmp_path):
    own = write(tmp_path / "own.jsonl", [{"turns": ["mine"]}, {"turns": ["poem"], "category": "verse"}])
    suite = SuiteConfig(name="s", prompts="", hub="nobody/nothing", turns=("{q}",), path=str(own), domain="chat")
    assert [(c.turns, c.domain) for c in load_suite(suite, [], [])] == [(("mine",), "chat"), (("poem",), "verse")]
    assert source_size(suite, [], []) == 2
    with pytest.raises(InputError, match=r"suite\.path.*nowhere"):
        load_suite(replace(suite, path="nowhere"), [], [])


def test_every_shipped_suite_of_the_hub_says_how_a_row_becomes_a_prompt():
    for name in (
        "gsm8k",
        "math500",
        "aime25",
        "humaneval",
        "mbpp",
        "livecodebench",
        "mt_bench",
        "alpaca",
        "spec_bench",
    ):
        suite = compose([f"suite={name}"]).suite
        assert suite.name == name and suite.hub and suite.turns and not suite.uses_heldout
    assert len(compose(["suite=speculators"]).suite.files) == 9


def test_lengthened_prompts_end_with_their_question():
    asked = [Conversation(id=str(n), turns=(f"word{n} " * 5 + "?", "again")) for n in range(4)]
    longer = lengthened(asked, 23, lambda text: len(text.split()))
    for before, after in zip(asked, longer, strict=True):
        assert after.turns[0].endswith(before.turns[0]) and after.turns[1] == "again"
        assert 18 <= len(after.turns[0].split()) <= 24
    assert longer[0].turns[0].startswith("word1") and longer[3].turns[0].startswith("word0")
    assert lengthened(asked, 3, lambda text: len(text.split())) == asked
