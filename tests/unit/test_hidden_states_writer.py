"""Writing a store: what a kill, an error or a bad document leaves behind, and how it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from state_stores import (
    LAST_IS_A_TAP,
    assert_same,
    make_meta,
    make_states,
    shard_of_tokens,
)

from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.errors import RunError


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
        from state_stores import make_meta, make_states, shard_of_tokens
        from spectrain.data.hidden_states_writer import HiddenStatesWriter
        writer = HiddenStatesWriter(sys.argv[1], make_meta(), shard_of_tokens(make_meta(), 25))
        for number in range(1000):
            writer.add(make_states(number, 10))
    """
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])},
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


def test_a_last_layers_tap_that_is_not_the_last_hidden_state_is_not_stored(tmp_path: Path) -> None:
    with (
        HiddenStatesWriter(tmp_path, make_meta(**LAST_IS_A_TAP)) as writer,
        pytest.raises(ValueError, match="key-000: tap 4 is not the last hidden state"),
    ):
        writer.add(make_states(0, 5))
