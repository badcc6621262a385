"""Prompts drawn from data sets: every form and file, what is left out and counted, which side a prompt is on."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spectrain.config.data_schema import DATA_COLUMNS, DataConfig
from spectrain.config.loading import compose
from spectrain.data.hub_sets import HubSet, UnreachableError, find_set
from spectrain.data.near_copies import NearDuplicates, SuiteOverlap
from spectrain.data.prompt_selection import PromptSource, Selection, select_prompts
from spectrain.data.prompts import Conversation
from spectrain.data.row_forms import COLUMNS, UnusableRowError, conversation_of
from spectrain.errors import ConfigError, InputError
from spectrain.stages.select_prompts import are_here, drawn_prompts, planned_prompts

WORDS = [f"{a}{b}{c}" for a in "bdkls" for b in "aeiou" for c in ("ra", "to", "mi", "nu", "fel")]


def texts(count: int, seed: int = 0) -> list[str]:
    """Unlike one another: twelve words of 125 each."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=12)) for _ in range(count)]


class Rows(HubSet):
    """Rows in memory, which counts those that were read."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        super().__init__("set", None, "train", "r" * 40)
        object.__setattr__(self, "given", rows)

    def rows(self) -> Any:
        return iter(self.given)


def select(
    rows: Sequence[Mapping[str, Any]], train: int | None = None, heldout: int | None = None, **options: Any
) -> Selection:
    return select_prompts([PromptSource("set", Rows(rows), {}, None, train, heldout)], 0.2, 0, **options)


# --- forms ---------------------------------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
TOOL = {"name": "weather", "description": "d", "parameters": {}}
USABLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "messages": (
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "x"},
                {"role": "user", "content": "b"},
            ]
        },
        {"turns": ("a", "b"), "system": "s"},
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}], "id": "7"},
        {"turns": ("a",)},
    ),
    "prompt": ({"prompt": "a", "completion": "x"}, {"turns": ("a",)}),
    "prompt of messages": ({"prompt": [{"role": "user", "content": "a"}]}, {"turns": ("a",)}),
    "instruction": ({"instruction": "a", "input": "", "output": "x"}, {"turns": ("a",)}),
    "instruction and input": ({"instruction": "a", "input": "b", "output": "x"}, {"turns": ("a\n\nb",)}),
    "parts": ({"messages": [{"role": "user", "content": PARTS}]}, {"turns": ("What is this?",)}),
    "a language": ({"prompt": "a", "language": "Deutsch"}, {"turns": ("a",), "language": "Deutsch"}),
    "turns": ({"turns": ["a", "b"], "category": "c"}, {"turns": ("a", "b"), "domain": "c"}),
    "tools": (
        {"query": "a", "tools": json.dumps([TOOL])},
        {"turns": ("a",), "tools": ({"type": "function", "function": TOOL},)},
    ),
    "messages as JSON": ({"messages": json.dumps([{"role": "user", "content": "a"}])}, {"turns": ("a",)}),
    "an own system prompt": ({"prompt": "a", "system": "s"}, {"turns": ("a",), "system": "s"}),
}
UNUSABLE: dict[str, dict[str, Any]] = {
    "no prompt in it": {"text": "a"},
    "an empty prompt": {"prompt": "  "},
    "it begins with an answer": {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "a"}]},
    "roles that do not alternate": {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
    "a role that is neither system, user nor assistant": {
        "messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "x"}]
    },
    "parts that are no text": {"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]},
    "a prompt that is no text": {"prompt": 5},
    "JSON that cannot be read": {"prompt": "a", "tools": "[{"},
    "tools that are no list of objects": {"prompt": "a", "tools": ["weather"]},
    "messages that are no list of messages": {"messages": ["a"]},
    "half of a surrogate pair": {"prompt": "a \ud800"},
}


@pytest.mark.parametrize("name", USABLE)
def test_forms_that_people_have(name: str) -> None:
    row, wanted = USABLE[name]
    found = conversation_of(row, {}, "n", "w")
    assert found == Conversation(**{"id": "n", **wanted}) and found.answers is None and found.where == "w"


@pytest.mark.parametrize("reason", UNUSABLE)
def test_what_cannot_be_used_says_why(reason: str) -> None:
    with pytest.raises(UnusableRowError) as caught:
        conversation_of(UNUSABLE[reason], {}, "n", "w")
    assert str(caught.value) == reason


def test_named_columns_are_taken_and_others_of_their_kind_are_not() -> None:
    row = {"prompt": "not this", "problem": "this", "messages": [{"role": "user", "content": "nor this"}]}
    assert conversation_of(row, {"prompt": "problem"}, "n", "w").turns == ("this",)
    assert tuple(COLUMNS) != () and set(COLUMNS) == set(DATA_COLUMNS)
    with pytest.raises(ConfigError, match=r"data\.columns\.promt"):
        DataConfig(path="x", columns={"promt": "a"})
    with pytest.raises(InputError, match=r"no column 'question': its columns are a, b"):
        select_prompts([PromptSource("set", Rows([{"a": 1, "b": 2}]), {"prompt": "question"}, None, 1, 1)], 0.2, 0)


# --- files ---------------------------------------------------------------------------------------------------------


def write_set(kind: str, folder: Path, found: list[str]) -> Path:
    """A local copy of a small set."""
    folder.mkdir()
    rows = [{"prompt": text, "answer": "x"} for text in found]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows[:9]), folder / "train-00000.parquet")
        pq.write_table(pa.Table.from_pylist(rows[9:]), folder / "train-00001.parquet")
    elif kind == "arrow file":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(folder / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "saved to disk":
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
        return folder / "saved"
    elif kind == "csv":
        with (folder / "train.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "json file":
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder / "train.jsonl"
    else:
        (folder / "train.json").write_text(json.dumps(rows))
    return folder


@pytest.mark.parametrize("kind", ["parquet", "arrow file", "saved to disk", "csv", "json", "json file"])
def test_local_sets_give_the_same_prompts_whatever_they_are_stored_as(tmp_path: Path, kind: str) -> None:
    found = texts(20)
    path = write_set(kind, tmp_path / "set", found)
    local = find_set(str(path), None, "train", None)
    assert [row["prompt"] for row in local.rows()] == found
    other = write_set(kind, tmp_path / "other", texts(20, seed=1))
    assert find_set(str(other), None, "train", None).revision != local.revision


def test_what_cannot_be_read_is_one_line_that_names_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: Any, **options: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr("socket.socket.connect", unreachable)
    monkeypatch.setattr("socket.getaddrinfo", unreachable)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the five retries of the Hub's client
    with pytest.raises(UnreachableError, match=r"^data\.path=some/set is no folder here.*connect to the Hub") as caught:
        find_set("some/set", None, "train", None)
    assert "\n" not in str(caught.value)
    with pytest.raises(UnreachableError, match="some/set"):
        list(find_set("some/set", None, "train", "a" * 40).rows())
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.parquet").write_bytes(b"no parquet")
    with pytest.raises(InputError, match=f"data.path={tmp_path / 'set'} cannot be read as a data set"):
        list(find_set(str(tmp_path / "set"), None, "train", None).rows())
    with pytest.raises(InputError, match="leave it out"):
        find_set(str(tmp_path / "set"), None, "train", "main")


# --- what is left out ----------------------------------------------------------------------------------------------


def test_every_row_is_counted_once() -> None:
    found = texts(40)
    suite = " ".join(["one two three four five six seven eight nine", found[3]])
    rows: list[Mapping[str, Any]] = [{"prompt": text} for text in found]
    rows += [{"prompt": found[5]}, {"prompt": found[6]}, {"prompt": ""}, {"prompt": " "}, {"text": "a"}]
    rows += [{"prompt": found[0] + " indeed"}]  # 10 of 11 triples are those of another
    selection = select(rows, near_duplicates=0.8, overlap=SuiteOverlap({"gsm8k": [suite]}, 8))
    (report,) = selection.reports
    assert (report.rows, report.repeated, report.near_duplicates) == (46, 2, 1)
    assert report.unusable == {"an empty prompt": 2, "no prompt in it": 1} and report.overlapping == {"gsm8k": 1}
    assert report.train + report.heldout == 39 == len(selection.train) + len(selection.heldout)
    assert report.train + report.heldout + 2 + 1 + 3 + 1 == 46
    assert selection.record()[0]["revision"] == "r" * 40
    for part in ("46 rows", "2 an empty prompt", "2 equal to another", "1 nearly another", "suite gsm8k"):
        assert part in report.note()


def test_near_duplicates_are_those_that_share_most_triples_of_words() -> None:
    one, other = texts(2)
    words = one.split()
    near, far = " ".join([*words[:11], "x"]), " ".join([*words[:6], *"abcdef"])
    remembered = NearDuplicates(0.8)
    assert [remembered.add(text) for text in (one, other, near, far, one.upper() + "!")] == [
        *(False, False, True, False, True)  # 9 of 11 triples; 4 of 16
    ]


def test_overlap_is_with_a_suites_prompts_and_not_with_their_form() -> None:
    form = "please reason step by step and put your final answer within boxed"
    suite = [f"{text} {form}" for text in texts(4)]
    overlap = SuiteOverlap({"math": suite, "short": ["how are you"]}, 8)
    words = suite[2].split()
    assert overlap.suite_of("Well, " + " ".join(words[2:10]).upper() + "?") == "math"
    assert overlap.suite_of(" ".join(words[2:9])) is None  # seven words
    assert overlap.suite_of(f"something else {form}") is None
    assert overlap.suite_of("How are you?") == "short" and overlap.suite_of("how are you today") is None


# --- the draw ------------------------------------------------------------------------------------------------------


def test_a_prompt_stays_on_its_side_whatever_else_there_is() -> None:
    found = texts(60)
    sides: dict[str, str] = {}
    for rows in (found, found[::-1], found[:30]):
        selection = select([{"prompt": text} for text in rows])
        for side in ("train", "heldout"):
            for conversation in getattr(selection, side):
                assert sides.setdefault(conversation.turns[0], side) == side
    assert 5 <= Counter(sides.values())["heldout"] <= 20  # a fifth of 60


def test_the_draw_is_part_of_all_in_the_order_of_the_set() -> None:
    rows = [{"prompt": text} for text in texts(60)]
    whole, drawn = select(rows), select(rows, 10, 4)
    assert (len(drawn.train), len(drawn.heldout)) == (10, 4)
    for side in ("train", "heldout"):
        order = [conversation.turns for conversation in getattr(whole, side)]
        places = [order.index(conversation.turns) for conversation in getattr(drawn, side)]
        assert places == sorted(places)
    assert {c.turns for c in select(rows[:59], 10, 4).train} ^ {c.turns for c in drawn.train} <= {
        *(c.turns for c in whole.train)
    }


def test_a_training_prompt_that_resembles_a_held_out_one_is_the_one_left_out() -> None:
    found = texts(30)
    rows = [{"prompt": text} for text in found] + [{"prompt": text + " indeed"} for text in found]
    selection = select(rows, near_duplicates=0.8)
    held = {c.turns[0].removesuffix(" indeed") for c in selection.heldout}
    trained = {c.turns[0].removesuffix(" indeed") for c in selection.train}
    assert not held & trained and held | trained == set(found)
    assert held == {c.turns[0].removesuffix(" indeed") for c in select(rows).heldout}
    assert selection.reports[0].near_duplicates == 30


def test_no_more_is_kept_than_is_drawn_and_a_little() -> None:
    from spectrain.data.prompt_selection import _read

    rows = [{"prompt": text} for text in texts(400)]
    _, drawn = _read(PromptSource("set", Rows(rows), {}, None, 20, 4), 0.2, 0, None, None, set())
    assert len(drawn["train"].heap) == 41 and len(drawn["heldout"].heap) == 21  # 1.25 times as many, and 16


def test_a_single_prompt_cannot_be_divided() -> None:
    with pytest.raises(InputError, match=r"1 rows read, 1 training, 0 held out.*too few prompts"):
        select([{"prompt": "a b c"}])
    assert len(select([{"prompt": text} for text in texts(2)]).heldout) == 1


# --- a run ---------------------------------------------------------------------------------------------------------


def config_of(path: Path, *more: str) -> Any:
    return compose(["data=hub", f"data.path={path}", "data.overlap_words=null", *more])


def test_what_was_drawn_is_kept_in_the_run_directory(tmp_path: Path) -> None:
    path = write_set("json file", tmp_path / "set", texts(40))
    fraction = "data.heldout_fraction=0.3"
    config = config_of(path, "data.max_train=8", "data.max_heldout=3", "data.system=Be brief.", fraction)
    drawn = drawn_prompts(config, tmp_path / "run")
    assert not drawn.stored and (len(drawn.split.train), len(drawn.split.heldout)) == (8, 3)
    (tmp_path / "run").mkdir()
    drawn.store(tmp_path / "run")
    again = drawn_prompts(config, tmp_path / "run")
    assert again.stored and again.split == drawn.split and again.record == drawn.record
    assert {c.system for c in again.split.train} == {"Be brief."}
    assert not drawn_prompts(config_of(path, "data.max_train=9"), tmp_path / "run").stored
    with path.open("a") as file:
        file.write(json.dumps({"prompt": "one more"}) + "\n")
    assert not drawn_prompts(config, tmp_path / "run").stored


def test_a_mix_has_its_shares_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_gen" / "data").mkdir(parents=True)
    for number, name in enumerate(("first", "second")):
        path = write_set("json file", tmp_path / name, texts(60, seed=number))
        (tmp_path / "data_gen" / "data" / f"{name}.yaml").write_text(f"path: {path}\nlicense: mit\n")
    arguments = ["data=mix", "data.mix={ultrachat: 0, first: 3, second: 1}", "data.max_train=20", "data.max_heldout=8"]
    with pytest.raises(ConfigError, match=r"data\.mix"):
        compose(arguments)
    arguments[1] = "data.mix={first: 3, second: 1}"
    config = compose([*arguments, "data.overlap_words=null", "data.heldout_fraction=0.3"])
    drawn = drawn_prompts(config, tmp_path / "run")
    counts = [(entry["name"], entry["train"], entry["heldout"], entry["license"]) for entry in drawn.record]
    assert counts == [("first", 15, 6, "mit"), ("second", 5, 2, "mit")]
    with pytest.raises(ConfigError, match=r"data\.mix\.third is no option"):
        drawn_prompts(compose(["data=mix", "data.mix={third: 1}", "data.max_train=20"]), tmp_path / "run")


def test_a_plan_reads_no_set_that_is_not_here(tmp_path: Path) -> None:
    config = compose(["data=ultrachat", "data.max_train=100"])
    assert not are_here(config.data, tmp_path)
    planned = planned_prompts(config.data)
    assert planned is not None and (len(planned.train), len(planned.heldout)) == (100, 64)
    assert planned_prompts(compose(["data=ultrachat", "data.max_train=null"]).data) is None
    assert are_here(config_of(write_set("csv", tmp_path / "set", texts(3))).data, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "ultrachat",
        "magpie",
        "nemotron_post",
        "openmathinstruct",
        "code_alpaca",
        "opencodeinstruct",
        "sharegpt",
        "xlam",
        "aya",
    ],
)
def test_named_sets_say_where_they_are_and_under_which_licence(name: str) -> None:
    data = compose([f"data={name}"]).data
    assert data.path.count("/") == 1 and data.license and data.max_train and not data.train


def test_contradictions_are_refused() -> None:
    for given, key in (
        ({"path": "a", "train": ("b",)}, r"data\.train and data\.path"),
        ({"path": "a", "heldout": ("b",)}, r"data\.heldout"),
        ({"mix": {"a": 1.0}}, r"data\.max_train"),
    ):
        with pytest.raises(ConfigError, match=key):
            DataConfig(**given)
