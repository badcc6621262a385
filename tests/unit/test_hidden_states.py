"""The hidden-state store: what is read is what was written, whatever happened in between."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from spectrain.data.hidden_states import StoredHiddenStates, StoreMeta, TargetStates, bytes_per_token
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.state_types import STATE_DTYPES, as_stored, dequantize, quantize
from spectrain.errors import InputError, RunError

HIDDEN, LAYERS, TAPS = 16, 4, (0, 3)
LAST_IS_A_TAP = {"tap_ids": (1, LAYERS)}


def make_meta(dtype: str = "float32", **changes: object) -> StoreMeta:
    fields = {
        "target": "tiny",
        "target_revision": "r1",
        "config_digest": "c",
        "tokenizer_digest": "t",
        "template_digest": "p",
    }
    return StoreMeta(
        **(fields | {"tap_ids": TAPS, "hidden_size": HIDDEN, "num_layers": LAYERS, "dtype": dtype} | changes)
    )


def make_states(number: int, length: int, dtype: str = "float32") -> TargetStates:
    generator = torch.Generator().manual_seed(number)
    taps = torch.randn(length, len(TAPS), HIDDEN, generator=generator)
    last_hidden = torch.randn(length, HIDDEN, generator=generator)
    float_dtype = STATE_DTYPES[dtype] if dtype in ("float32", "bfloat16") else torch.float32
    return TargetStates(
        input_ids=torch.randint(0, 99, (length,), generator=generator, dtype=torch.int32),
        loss_mask=torch.randint(0, 2, (length,), generator=generator, dtype=torch.uint8),
        taps=taps.to(float_dtype),
        last_hidden=last_hidden.to(float_dtype),
        log_normalizer=torch.randn(length, generator=generator).where(torch.arange(length) % 2 == 0, torch.nan),
        key=f"key-{number:03d}",
        split="heldout" if number % 3 == 0 else "train",
    )


def assert_same(found: TargetStates, wanted: TargetStates) -> None:
    assert (found.key, found.split) == (wanted.key, wanted.split)
    for name in ("input_ids", "loss_mask", "taps", "last_hidden", "log_normalizer"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def shard_of_tokens(meta: StoreMeta, tokens: int) -> int:
    return bytes_per_token(meta) * tokens


def with_last_tap(states: TargetStates) -> TargetStates:
    """The last hidden state is the second tap."""
    return dataclasses.replace(states, last_hidden=states.taps[:, 1].clone())


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


def test_a_last_layers_tap_that_is_not_the_last_hidden_state_is_not_stored(tmp_path: Path) -> None:
    with (
        HiddenStatesWriter(tmp_path, make_meta(**LAST_IS_A_TAP)) as writer,
        pytest.raises(ValueError, match="key-000: tap 4 is not the last hidden state"),
    ):
        writer.add(make_states(0, 5))


def test_a_store_can_be_sent_to_another_process(tmp_path: Path) -> None:
    with HiddenStatesWriter(tmp_path, make_meta()) as writer:
        writer.add(make_states(0, 5))
    store = StoredHiddenStates(tmp_path)
    assert_same(store[0], make_states(0, 5))  # opens the map, which must not travel
    assert_same(pickle.loads(pickle.dumps(store))[0], make_states(0, 5))


@pytest.mark.parametrize("last", [{}, LAST_IS_A_TAP], ids=["apart", "last layer is a tap"])
def test_int8_keeps_every_row_although_an_attention_sink_stands_beside_it(
    tmp_path: Path, last: dict[str, object]
) -> None:
    states = make_states(0, 64)
    taps, last_hidden = states.taps * 6, states.last_hidden * 6
    taps[0] *= 24894 / taps[0].abs().amax(dim=-1, keepdim=True)
    last_hidden[0] *= 24894 / last_hidden[0].abs().max()
    last_hidden[5] = 0
    if last:
        taps[:, 1] = last_hidden
    states = dataclasses.replace(states, taps=taps, last_hidden=last_hidden)
    with HiddenStatesWriter(tmp_path, make_meta("int8", **last)) as writer:
        writer.add(states)
    found = StoredHiddenStates(tmp_path)[0]
    for ours, wanted in ((found.taps, taps), (found.last_hidden, last_hidden)):
        assert ours.dtype == torch.float32
        largest = wanted.abs().amax(dim=-1, keepdim=True)
        assert bool(((ours - wanted).abs() <= largest * (0.5 / 127 + 1e-6)).all())
        assert bool(((ours - wanted).norm(dim=-1) <= 0.01 * wanted.norm(dim=-1)).all())
        assert ours[0].abs().max().item() == pytest.approx(24894, rel=1e-6)
        torch.testing.assert_close(ours, as_stored(wanted, "int8"), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["int8", "int8_grouped", "float8_e4m3"])
@pytest.mark.parametrize("width", [32, 64, 200])
def test_quantisation_is_stable_when_repeated(dtype: str, width: int) -> None:
    x = torch.randn(100, width, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 100)[:, None]
    once, scale = quantize(x, dtype)
    again, _ = quantize(dequantize(once, scale), dtype)
    assert torch.equal(once.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.parametrize("last", [{}, LAST_IS_A_TAP], ids=["apart", "last layer is a tap"])
@pytest.mark.parametrize("width", [128, 200])  # 200: the last group has 8 channels
def test_in_groups_an_outlier_channel_spoils_its_own_group_alone(
    tmp_path: Path, width: int, last: dict[str, object]
) -> None:
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(20, 2, width, generator=generator)
    taps[:, :, 3] = 2000.0
    states = dataclasses.replace(make_states(0, 20), taps=taps, last_hidden=taps[:, 1].clone())
    errors = {}
    for dtype in ("int8", "int8_grouped"):
        folder = tmp_path / dtype
        meta = make_meta(dtype, hidden_size=width, **last)
        with HiddenStatesWriter(folder, meta) as writer:
            writer.add(states)
        store = StoredHiddenStates(folder)
        assert (store.shards[0].record.bytes // 20) in range(bytes_per_token(meta), bytes_per_token(meta) + 60)
        errors[dtype] = (store[0].taps - taps).abs().double()
        assert torch.equal(store[0].last_hidden, store[0].taps[:, 1])
    # By hand: half a step is 2000 / 254 beside the outlier, and the group's largest value / 254 elsewhere.
    assert float(errors["int8"].max()) > 0.7  # nearly all that the other channels hold
    assert float(errors["int8_grouped"][..., :64].max()) > 0.7
    for first in range(64, width, 64):
        group = slice(first, min(first + 64, width))
        most = taps[..., group].abs().amax(-1, keepdim=True) / 254 * 1.001
        assert bool((errors["int8_grouped"][..., group] <= most).all())


def test_float8_keeps_three_bits_of_every_value_from_its_largest_down(tmp_path: Path) -> None:
    states = make_states(0, 16)
    with HiddenStatesWriter(tmp_path, make_meta("float8_e4m3")) as writer:
        writer.add(states)
    store = StoredHiddenStates(tmp_path)
    wanted, found = states.taps.double(), store[0].taps.double()
    # OCP 8-bit floats, E4M3: 3 bits of fraction, so half a unit in the last place is 1/16; below 2^-6 steps of 2^-9.
    largest = wanted.abs().amax(-1, keepdim=True)
    most = torch.maximum(wanted.abs() / 16, largest / 448 * 2.0**-10) * 1.001
    assert bool(((found - wanted).abs() <= most).all())
    assert float(((found - wanted).abs() / wanted.abs()).max()) > 0.05
    torch.testing.assert_close(found.abs().amax(-1, keepdim=True), largest, rtol=1e-6, atol=0)
    assert store.as_stored(0).taps.dtype == torch.float8_e4m3fn


def test_capture_killed_between_shard_and_index_is_repeated_without_that_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = make_meta()
    documents = [make_states(number, 10) for number in range(6)]

    class KilledError(Exception):
        pass

    def kill(self: HiddenStatesWriter) -> None:
        if len(self._shards) == 2:
            raise KilledError

        real(self)

    real = HiddenStatesWriter._write_index
    writer = HiddenStatesWriter(tmp_path, meta, shard_of_tokens(meta, 20))
    with monkeypatch.context() as patch:
        patch.setattr(HiddenStatesWriter, "_write_index", kill)
        for states in documents[:3]:
            writer.add(states)
        with pytest.raises(KilledError):
            writer.add(documents[3])
    (tmp_path / ".shard-00002.safetensors.partial").write_bytes(b"half a shard")
    (tmp_path / ".tmpXYZ").write_bytes(b"half a shard, under the name that safetensors gave it")
    assert (tmp_path / "shard-00001.safetensors").exists()
    assert len(StoredHiddenStates(tmp_path)) == 2  # a reader does not see the shard that is not listed

    resumed = HiddenStatesWriter(tmp_path, meta, shard_of_tokens(meta, 20))
    assert resumed.done_keys() == {documents[0].key, documents[1].key}
    assert not (tmp_path / "shard-00001.safetensors").exists()
    with resumed:
        for states in documents[2:]:
            resumed.add(states)
    store = StoredHiddenStates(tmp_path)
    for index, states in enumerate(documents):
        assert_same(store[index], states)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("index.copy.json", "index.json"),
        *(f"shard-0000{n}.safetensors" for n in range(3)),
    ]


def test_a_document_is_done_when_its_shard_is(tmp_path: Path) -> None:
    """What is only gathered in memory would be lost in a kill, so it does not count as captured."""
    meta = make_meta()
    with HiddenStatesWriter(tmp_path, meta, shard_of_tokens(meta, 20)) as writer:
        writer.add(make_states(0, 10))
        assert writer.done_keys() == set()
        writer.flush()
        assert writer.done_keys() == {make_states(0, 10).key}


@pytest.mark.slow
def test_sigkill_at_any_moment_leaves_a_store_that_can_be_read_and_continued(tmp_path: Path) -> None:
    program = """
        import sys
        from tests.unit.test_hidden_states import make_meta, make_states, shard_of_tokens
        from spectrain.data.hidden_states_writer import HiddenStatesWriter
        writer = HiddenStatesWriter(sys.argv[1], make_meta(), shard_of_tokens(make_meta(), 25))
        for number in range(1000):
            writer.add(make_states(number, 10))
    """
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    deadline = time.monotonic() + 120
    while child.poll() is None and len(list(tmp_path.glob("shard-*"))) < 20 and time.monotonic() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    begun = StoredHiddenStates(tmp_path)
    begun.verify_checksums()
    assert 2 * 19 <= len(begun) < 1000
    for index in range(len(begun)):
        assert_same(begun[index], make_states(index, 10))
    with HiddenStatesWriter(tmp_path, make_meta()) as writer:
        assert writer.done_keys() == set(begun.keys)
        writer.add(make_states(len(begun), 10))
    assert_same(StoredHiddenStates(tmp_path)[len(begun)], make_states(len(begun), 10))


def test_documents_gathered_before_an_error_are_kept(tmp_path: Path) -> None:
    def interrupted_capture() -> None:
        with HiddenStatesWriter(tmp_path, make_meta()) as writer:
            writer.add(make_states(0, 5))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_capture()
    assert StoredHiddenStates(tmp_path).keys == ["key-000"]


def test_a_capture_of_nothing_is_an_empty_store(tmp_path: Path) -> None:
    HiddenStatesWriter(tmp_path, make_meta()).close()
    assert len(StoredHiddenStates(tmp_path)) == 0


def test_files_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    with HiddenStatesWriter(tmp_path, make_meta()) as writer:
        writer.add(make_states(0, 5))
    (tmp_path / "plain").touch()
    assert (tmp_path / "shard-00000.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


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


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("field", ["taps", "last_hidden"])
def test_states_that_are_not_finite_are_refused_by_name(tmp_path: Path, field: str, value: float) -> None:
    states = make_states(7, 5)
    getattr(states, field)[3, ..., 2] = value
    with HiddenStatesWriter(tmp_path, make_meta()) as writer:
        writer.add(make_states(0, 5))
        with pytest.raises(RunError, match=f"{field}.*key-007"):
            writer.add(states)
    assert StoredHiddenStates(tmp_path).keys == ["key-000"]


def test_a_document_is_never_stored_twice(tmp_path: Path) -> None:
    with HiddenStatesWriter(tmp_path, make_meta()) as writer:
        writer.add(make_states(0, 5))
        with pytest.raises(ValueError, match="key-000"):
            writer.add(make_states(0, 5))
    with HiddenStatesWriter(tmp_path, make_meta()) as writer, pytest.raises(ValueError, match="key-000"):
        writer.add(make_states(0, 5))


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
