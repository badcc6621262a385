"""The hidden-state store: what is read is what was written, bit for bit, in the order of keys."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from state_stores import (
    HIDDEN,
    LAST_IS_A_TAP,
    TAPS,
    assert_same,
    make_meta,
    make_states,
    shard_of_tokens,
    with_last_tap,
)

from spectrain.data.hidden_states import StoredHiddenStates, bytes_per_token
from spectrain.data.hidden_states_writer import HiddenStatesWriter


@pytest.mark.parametrize("last", [{}, LAST_IS_A_TAP], ids=["apart", "last layer is a tap"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float_states_come_back_bit_for_bit_in_the_order_of_keys(
    tmp_path: Path, dtype: str, last: dict[str, object]
) -> None:
    meta = make_meta(dtype, **last)
    documents = [make_states(number, length, dtype) for number, length in [(4, 7), (1, 12), (3, 1), (2, 30), (0, 9)]]
    documents = [with_last_tap(states) for states in documents] if last else documents
    with HiddenStatesWriter(tmp_path, meta, shard_of_tokens(meta, 20)) as writer:
        for states in documents:
            writer.add(states)
    store = StoredHiddenStates(tmp_path)
    ordered = sorted(documents, key=lambda states: states.key)
    assert store.keys == [states.key for states in ordered]
    assert store.splits == [states.split for states in ordered]
    assert store.lengths.tolist() == [9, 12, 30, 1, 7]
    assert store.loss_counts.tolist() == [int(states.loss_mask.sum()) for states in ordered]
    assert store.indices("heldout") == [0, 3]
    assert store.meta == meta
    for index, states in enumerate(ordered):
        assert_same(store[index], states)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) == 3  # 7 + 12 + 1, then 30, which is longer than a whole shard, then 9
    store.verify_checksums()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) == store.total_bytes


def test_reading_takes_views_of_the_map(tmp_path: Path) -> None:
    with HiddenStatesWriter(tmp_path, make_meta()) as writer:
        writer.add(make_states(0, 50))
        writer.add(make_states(1, 70))
    store = StoredHiddenStates(tmp_path)
    first, second = store[0], store[1]
    row_bytes = len(TAPS) * HIDDEN * 4
    assert second.taps.data_ptr() - first.taps.data_ptr() == 50 * row_bytes
    assert store[0].taps.data_ptr() == first.taps.data_ptr()
    if sys.platform == "linux":
        spans = [
            line.split()[0].split("-")
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "shard-00000" in line
        ]
        assert any(int(low, 16) <= first.taps.data_ptr() < int(high, 16) for low, high in spans)
    first.taps.zero_()  # the map is private: nobody can damage the store through a view
    assert_same(StoredHiddenStates(tmp_path)[1], make_states(1, 70))
    store.verify_checksums()


def test_a_last_hidden_state_that_is_a_tap_is_stored_once_and_read_as_a_view(tmp_path: Path) -> None:
    states, meta = with_last_tap(make_states(0, 50)), make_meta(**LAST_IS_A_TAP)
    assert bytes_per_token(make_meta()) - bytes_per_token(meta) == HIDDEN * 4
    with HiddenStatesWriter(tmp_path, meta) as writer:
        writer.add(states)
    found = StoredHiddenStates(tmp_path)[0]
    assert found.last_hidden.data_ptr() == found.taps[:, 1].data_ptr()
    with safe_open(tmp_path / "shard-00000.safetensors", framework="pt") as shard:
        assert "last_hidden" not in set(shard.keys()) and tuple(shard.get_slice("taps").get_shape()) == (50, 2, HIDDEN)


def test_a_store_can_be_sent_to_another_process(tmp_path: Path) -> None:
    with HiddenStatesWriter(tmp_path, make_meta()) as writer:
        writer.add(make_states(0, 5))
    store = StoredHiddenStates(tmp_path)
    assert_same(store[0], make_states(0, 5))  # opens the map, which must not travel
    assert_same(pickle.loads(pickle.dumps(store))[0], make_states(0, 5))


def test_the_index_says_what_the_shards_are(tmp_path: Path) -> None:
    with HiddenStatesWriter(tmp_path, make_meta("int8")) as writer:
        writer.add(make_states(0, 5))
        writer.add(make_states(1, 6))
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["meta"] == json.loads(json.dumps(dataclasses.asdict(make_meta("int8"))))
    (record,) = index["shards"]
    assert (record["file"], record["documents"], record["tokens"]) == ("shard-00000.safetensors", 2, 11)
    assert record["bytes"] == (tmp_path / record["file"]).stat().st_size
    assert len(record["sha256"]) == 64
