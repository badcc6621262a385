"""A damaged shard costs its own documents and no others; one that was found whole is not read again."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
from state_stores import make_meta, make_states, shard_of_tokens

from spectrain.data.hidden_states import ShardFile, StoredHiddenStates
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.shard_damage import (
    damaged_shards,
    found_damaged,
    readable_shards,
    stored_keys,
    take_out,
    unverified,
    verify_at_first_read,
)
from spectrain.errors import InputError, RunError
from spectrain.files import FileState

NAMES = [f"shard-0000{number}.safetensors" for number in range(3)]


def write(folder: Path, numbers: range) -> list[int]:
    """Two documents a shard. Returns the numbers of those that were missing."""
    meta, added = make_meta(), []
    with HiddenStatesWriter(folder, meta, shard_of_tokens(meta, 20)) as writer:
        for number in numbers:
            states = make_states(number, 10)
            if states.key not in writer.done_keys():
                writer.add(states)
                added.append(number)
    return added


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write(tmp_path, range(6))
    return tmp_path


def damage(folder: Path) -> set[str]:
    return set(damaged_shards(folder, StoredHiddenStates(folder).shards))


@pytest.mark.parametrize("byte", [-1, -2000], ids=["a tensor's last byte", "another"])
def test_only_the_damaged_shard_is_captured_again(store: Path, byte: int, capsys: pytest.CaptureFixture[str]) -> None:
    untouched = {name: (store / name).read_bytes() for name in (NAMES[0], NAMES[2])}
    flip(store / NAMES[1], byte)
    assert damage(store) == {NAMES[1]}
    take_out(store, [NAMES[1]])
    assert stored_keys(store) == {f"key-00{number}" for number in (0, 1, 4, 5)}
    assert write(store, range(6)) == [2, 3]
    assert damage(store) == set()
    again = StoredHiddenStates(store)
    assert again.keys == [f"key-00{number}" for number in range(6)]
    assert again[2].taps.equal(make_states(2, 10).taps)
    # No shard takes the name of one that is there.
    assert {name: (store / name).read_bytes() for name in untouched} == untouched


@pytest.mark.parametrize("kind", ["missing", "cut", "header", "empty"])
def test_a_shard_that_cannot_be_read_is_taken_out_by_the_next_capture(
    store: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store / NAMES[0]
    whole = path.read_bytes()
    if kind == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": whole[:-9], "header": b"\xff" * 16 + whole[16:], "empty": b""}[kind])
    shards, keys, broken = readable_shards(store)
    assert ([shard.path.name for shard in shards], set(broken)) == (NAMES[1:], {NAMES[0]})
    assert set(keys) == stored_keys(store) == {f"key-00{number}" for number in range(2, 6)}
    with pytest.raises(InputError, match=NAMES[0]):
        StoredHiddenStates(store)
    assert write(store, range(6)) == [0, 1]
    assert NAMES[0] in capsys.readouterr().err
    assert len(StoredHiddenStates(store)) == 6 and damage(store) == set()


def test_what_was_verified_is_not_read_again_until_it_changes(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    verify = ShardFile.verify
    monkeypatch.setattr(ShardFile, "verify", lambda shard, on: (read.append(shard.path.name), verify(shard, on)))

    def look() -> list[str]:
        read.clear()
        shards = unverified(store, StoredHiddenStates(store).shards)
        assert not damaged_shards(store, shards)
        return list(read)

    assert look() == NAMES
    assert look() == NAMES  # so new that another change would not show
    monkeypatch.setattr(FileState, "settled", True)
    assert look() == NAMES
    assert look() == []
    state = (store / NAMES[2]).stat()
    os.utime(store / NAMES[2], ns=(state.st_atime_ns, state.st_mtime_ns))  # the same content, the same times
    assert look() == [NAMES[2]]
    (store / "verified.json").write_text("[")
    assert look() == NAMES
    flip(store / NAMES[1], -1)
    state = (store / NAMES[1]).stat()
    os.utime(store / NAMES[1], ns=(state.st_atime_ns, state.st_mtime_ns - 10**9))
    assert damage(store) == {NAMES[1]}
    assert damage(store) == {NAMES[1]}  # what is damaged is not remembered as read


def test_a_shard_that_was_never_read_is_compared_by_whoever_reads_it_first(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in another process, which gets the source pickled; and once, whoever it was."""
    monkeypatch.setattr(FileState, "settled", True)
    flip(store / NAMES[1], -1)
    read: list[str] = []
    verify = ShardFile.verify
    monkeypatch.setattr(ShardFile, "verify", lambda shard, on: (read.append(shard.path.name), verify(shard, on)))
    opened = StoredHiddenStates(store)
    verify_at_first_read(store, opened.shards)
    assert read == []
    elsewhere = pickle.loads(pickle.dumps(opened))
    for source in (elsewhere, opened):
        assert source[0].taps.equal(make_states(0, 10).taps)
        with pytest.raises(RunError, match=f"{NAMES[1]} has changed"):
            source[2]
        assert source[5].taps.equal(make_states(5, 10).taps)
    assert read == [*NAMES, NAMES[1]]  # what was whole is not read again
    again = StoredHiddenStates(store)
    assert [shard.path.name for shard in unverified(store, again.shards)] == [NAMES[1]]
    assert [shard.path.name for shard in found_damaged(store, again.shards)] == [NAMES[1]]
    os.utime(store / NAMES[1])  # somebody has put another file there
    assert found_damaged(store, again.shards) == []


def test_another_shard_of_the_same_name_was_not_verified(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index may name another content: what counts is that the content is that of the index."""
    monkeypatch.setattr(FileState, "settled", True)
    assert damage(store) == set()
    shards = StoredHiddenStates(store).shards
    assert unverified(store, shards) == []
    known = json.loads((store / "verified.json").read_text())
    known[NAMES[0]][-1] = "0" * 64
    (store / "verified.json").write_text(json.dumps(known))
    assert [shard.path.name for shard in unverified(store, shards)] == [NAMES[0]]


def test_a_changed_bit_of_the_index_is_found(store: Path) -> None:
    path = store / "index.json"
    index = json.loads(path.read_text())
    index["meta"]["tap_ids"] = [0, 2]  # a bit away from [0, 3]
    path.write_text(json.dumps(index))
    assert StoredHiddenStates(store).meta.tap_ids == (0, 3)  # of its copy
    (store / "index.copy.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"index\.json has changed since it was written"):
        StoredHiddenStates(store)


def test_what_was_digested_when_it_was_written_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, range(2))
    # The last one, which is so new that a change since would not show, is not believed.
    assert [shard.path.name for shard in unverified(tmp_path, StoredHiddenStates(tmp_path).shards)] == NAMES[:1]
    monkeypatch.setattr(FileState, "settled", True)
    assert write(tmp_path, range(6)) == [2, 3, 4, 5]
    assert [shard.path.name for shard in unverified(tmp_path, StoredHiddenStates(tmp_path).shards)] == NAMES[:1]
    flip(tmp_path / NAMES[1], -1)
    assert [shard.path.name for shard in unverified(tmp_path, StoredHiddenStates(tmp_path).shards)] == NAMES[:2]
    assert damage(tmp_path) == {NAMES[1]}


def test_each_of_several_damaged_shards_is_named_whoever_reads_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spectrain.data.shard_damage.available_cores", lambda: [0, 1, 2, 3])
    for name in (NAMES[0], NAMES[2]):
        flip(store / name, -1)
    shards, read = StoredHiddenStates(store).shards, []
    found = damaged_shards(store, shards, read.append)
    assert set(found) == {NAMES[0], NAMES[2]} and all(name in problem for name, problem in found.items())
    assert sum(read) == sum(shard.record.bytes for shard in shards)
