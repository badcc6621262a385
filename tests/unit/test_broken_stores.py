"""A store that is damaged, of another target or of another version: refused, with the file or the field."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from state_stores import (
    make_meta,
    make_states,
)

from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.errors import InputError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_revision", "r2"),
        ("tap_ids", (1, 3)),
        ("num_layers", 5),
        ("template_digest", "x"),
        ("tokenizer_digest", "x"),
        ("dtype", "bfloat16"),
        ("last_hidden_pre_norm", False),
    ],
)
def test_a_mismatch_names_the_field(tmp_path: Path, field: str, value: object) -> None:
    with HiddenStatesWriter(tmp_path, make_meta()) as writer:
        writer.add(make_states(0, 5))
    store = StoredHiddenStates(tmp_path)
    store.check(dataclasses.asdict(make_meta()))
    with pytest.raises(InputError, match=field):
        store.check({"target": "tiny", field: value})
    with pytest.raises(InputError, match=field):
        HiddenStatesWriter(tmp_path, make_meta(**{field: value}))


def break_truncate(folder: Path) -> None:
    path = folder / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def break_remove(folder: Path) -> None:
    (folder / "shard-00000.safetensors").unlink()


def break_header(folder: Path) -> None:
    path = folder / "shard-00000.safetensors"
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])


def break_swap(folder: Path) -> None:
    """A shard of another store, of the same size: the header must not be believed blindly."""
    path = folder / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"last_hidden"', b'"last_hiddem"'))


@pytest.mark.parametrize("damage", [break_truncate, break_remove, break_header, break_swap])
def test_a_broken_shard_is_named(tmp_path: Path, damage: object) -> None:
    with HiddenStatesWriter(tmp_path, make_meta()) as writer:
        writer.add(make_states(0, 5))
    damage(tmp_path)
    with pytest.raises(InputError, match="shard-00000"):
        StoredHiddenStates(tmp_path)[0]


def test_one_changed_byte_is_found_by_the_checksum(tmp_path: Path) -> None:
    with HiddenStatesWriter(tmp_path, make_meta()) as writer:
        writer.add(make_states(0, 5))
    path = tmp_path / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    store = StoredHiddenStates(tmp_path)
    with pytest.raises(InputError, match=r"shard-00000.*checksum"):
        store.verify_checksums()


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"meta": {"schema_version": 99}}', '{"meta": {"schema_version": 2}, "shards": []}']
)
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(InputError, match=r"index\.json"):
        StoredHiddenStates(tmp_path)


def test_a_store_of_an_older_schema_is_captured_again(tmp_path: Path) -> None:
    with HiddenStatesWriter(tmp_path, make_meta()) as writer:
        writer.add(make_states(0, 5))
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["meta"].pop("schema_version") == 2
    del index["meta"]["num_layers"]  # what version 1 did not have
    (tmp_path / "index.copy.json").unlink()  # nor this
    (tmp_path / "index.json").write_text(json.dumps(index | {"meta": index["meta"] | {"schema_version": 1}}))
    with pytest.raises(InputError, match=r"index\.json has schema version 1.*capture again") as error:
        StoredHiddenStates(tmp_path)
    assert error.value.exit_code == 2


def test_a_folder_without_states_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="spectrain capture"):
        StoredHiddenStates(tmp_path)
