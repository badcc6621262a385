"""Prompt files of every usual kind are read to the same prompts; what is none is named for what it is."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spectrain.config.data_schema import DataConfig
from spectrain.data.prompts import Conversation, load_prompts, read_prompts, split_prompts
from spectrain.errors import InputError

RECORDS = [
    {"id": "a", "turns": ["one", "two"], "system": "be brief"},
    {"turns": ["three"], "category": "chat"},
    {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def parquet(path: Path) -> None:
    """As a table has it: every column in every row, null where a record lacks it."""
    names = ("id", "turns", "system", "category", "messages")
    pq.write_table(pa.Table.from_pylist([{name: r.get(name) for name in names} for r in RECORDS]), path)


WRITERS: dict[str, Callable[[Path], object]] = {
    "p.jsonl": lambda path: path.write_bytes(LINES),
    "p.json": lambda path: path.write_text(json.dumps(RECORDS, indent=1)),
    "p.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "p.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(RECORDS).encode())),
    "p.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "p.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES)),
    "p.parquet": parquet,
    "p": lambda path: path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + LINES)),  # the content decides, not the name
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_is_read_alike(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    found = load_prompts(path)
    assert found == [
        Conversation(id="a", turns=("one", "two"), system="be brief"),
        Conversation(id="p-2", turns=("three",), domain="chat"),
        Conversation(id="p-3", turns=("u",), answers=("a",)),
    ]
    assert all(
        str(path) in conversation.where and str(n) in conversation.where for n, conversation in enumerate(found, 1)
    )


BAD = {"turns": [3]}


def bad_array(path: Path) -> None:
    path.write_text(json.dumps([*RECORDS, BAD], indent=2))


def bad_parquet(path: Path) -> None:
    pq.write_table(pa.table({"turns": [["a"], ["b"], ["c"], ["  "]]}), path)


@pytest.mark.parametrize(
    ("write", "where", "what"),
    [
        (bad_array, ", entry 4: ", "turns[0] is a number"),
        (bad_parquet, ", row 4: ", "turns[0] is blank"),
        (lambda path: path.write_text('[{"turns": ["a"]},\n{"turns": ["b"],}\n]'), ":2: ", "not JSON"),
        (lambda path: path.write_text('[\n{"turns": ["a"]}'), ":2: ", "not JSON"),
        (lambda path: path.write_text('["a"]\n["b"]\n'), ":1: ", "a list instead of an object"),
        (lambda path: path.write_text("[]"), " holds no prompts", ""),
        (lambda path: pq.write_table(pa.table({"turns": pa.array([], pa.list_(pa.string()))}), path), " holds no", ""),
        (lambda path: pq.write_table(pa.table({"text": ["a"]}), path), ", row 1: ", "unknown field 'text'"),
        (lambda path: pq.write_table(pa.table({"id": [b"\xff"]}), path), ", row 1: ", "type bytes"),
        (lambda path: path.write_bytes(gzip.compress(LINES)[:-20]), " cannot be unpacked", "damaged"),
        (lambda path: path.write_bytes(b"PAR1 and nothing more"), " cannot be read as Parquet", ""),
        (lambda path: path.write_bytes(gzip.compress(LINES + b'{"turn": []}')), ":4: ", "did you mean 'turns'"),
    ],
)
def test_what_is_wrong_inside_is_said_with_its_place(
    tmp_path: Path, write: Callable[[Path], object], where: str, what: str
) -> None:
    path = tmp_path / "bad"
    write(path)
    with pytest.raises(InputError) as caught:
        load_prompts(path)
    message = str(caught.value)
    assert message.startswith(f"{path}{where}")
    assert what in message
    assert "\n" not in message


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("p.jsonl", LINES)


def arrow(path: Path) -> None:
    table = pa.table({"turns": [["a"]]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("create table t (x)")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (zipped, "zip archive"),
        (arrow, "an Arrow file"),
        (database, "SQLite"),
        (lambda path: path.write_bytes(pa.compress(LINES, codec="zstd", asbytes=True)), "zstd"),
        (lambda path: path.write_bytes(LINES.decode().encode("utf-16")), "UTF-16"),
        (lambda path: path.write_bytes(pickle.dumps(RECORDS)), "pickle"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "Git LFS"),
        (lambda path: path.write_text("<!DOCTYPE html><html></html>"), "HTML"),
    ],
)
def test_other_files_are_named_for_what_they_are(tmp_path: Path, write: Callable[[Path], object], what: str) -> None:
    path = tmp_path / "other.jsonl"
    write(path)
    with pytest.raises(InputError, match=what):
        load_prompts(path)


def test_folders_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, root = tmp_path / "here", tmp_path / "root"
    for folder in (here / "set", here / "empty", root / "more"):
        folder.mkdir(parents=True)
    for path, text in (
        (here / "set" / "b.jsonl", "b"),
        (here / "set" / "a.json", "a"),
        (here / "set" / "c.jsonl.gz", "c"),
        (root / "more" / "x1.jsonl", "x1"),
        (root / "more" / "x2.jsonl", "x2"),
        (here / "odd[1].jsonl", "odd"),
    ):
        line = json.dumps({"turns": [text]}).encode()
        path.write_bytes(gzip.compress(line) if path.suffix == ".gz" else line)
    (here / "set" / "README.md").write_text("no prompts")
    (here / "set" / ".hidden.jsonl").write_text("no prompts")
    monkeypatch.chdir(here)

    def texts(name: str) -> list[str]:
        return [conversation.turns[0] for conversation in read_prompts(name, [root], "data.train")]

    assert texts("set") == texts("set/") == ["a", "b", "c"]
    assert texts("set/*.json*") == ["a", "b", "c"]
    assert texts("set/[ab].json*") == ["a", "b"]
    assert texts("more/x?.jsonl") == ["x1", "x2"]  # from the second place that is looked into
    assert texts("**/x2.jsonl") == ["x2"]
    assert texts("odd[1].jsonl") == ["odd"]  # a file of that name comes before a pattern
    for name, what in (
        ("empty", "holds no prompt files"),
        ("set/*.csv", "no file matches set/*.csv"),
        ("sets", "no prompt file sets"),
        ("", "no prompt file"),
        ("a\0*", "no file matches"),
    ):
        with pytest.raises(InputError, match=r"^data\.train: ") as caught:
            read_prompts(name, [root], "data.train")
        assert what in str(caught.value)


# Several samples of a prompt


def answered(question: str, answer: str | None) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages + ([{"role": "assistant", "content": answer}] if answer else [])}


def write(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_other_answers_to_a_question_are_samples_and_equal_ones_repeat(tmp_path: Path) -> None:
    pairs = [("q", "1"), ("q", "2"), ("r", "1"), ("q", "1"), ("q", None), ("q", None), ("q", "3")]
    name = write(tmp_path / "train.jsonl", *(answered(*pair) for pair in pairs))
    heldout = write(tmp_path / "heldout.jsonl", answered("h", "1"), answered("h", "2"), answered("h", "2"))
    split = split_prompts(DataConfig(train=(name,), heldout=(heldout,), max_heldout=None), [])
    assert [(c.turns[0], c.answers) for c in split.train] == [
        ("q", ("1",)),
        ("q", ("2",)),
        ("r", ("1",)),
        ("q", None),
        ("q", ("3",)),
    ]
    assert [c.answers for c in split.heldout] == [("1",), ("2",)]
    assert (split.samples, split.repeated) == (4, 3)
    assert [note.split()[2] for note in split.notes()] == ["4", "3"]


def test_samples_of_a_prompt_are_on_one_side_and_each_is_drawn_by_itself(tmp_path: Path) -> None:
    name = write(tmp_path / "train.jsonl", *(answered(f"q{n}", f"a{k}") for k in range(4) for n in range(50)))
    whole = split_prompts(DataConfig(train=(name,), heldout_fraction=0.3, max_heldout=None), [])
    train, heldout = ({c.turns[0] for c in side} for side in (whole.train, whole.heldout))
    assert len(train) + len(heldout) == 50 and not train & heldout
    assert len(whole.train) == 4 * len(train) and len(whole.heldout) == 4 * len(heldout)
    part = split_prompts(DataConfig(train=(name,), heldout_fraction=0.3, max_train=60, max_heldout=10), [])
    assert (len(part.train), len(part.heldout)) == (60, 10)
    assert len({c.turns[0] for c in part.train}) > 25  # not whole prompts alone
    assert set(map(id_of, part.train)) <= set(map(id_of, whole.train))


def id_of(conversation: Conversation) -> str:
    return conversation.id
