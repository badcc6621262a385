"""Shards that come from outside: what belongs to stored responses is adopted byte for byte, nothing else gets into the
store.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_tools import HIDDEN, VOCAB, head_reference, random_head

from spectrain.data.hidden_states import StoredHiddenStates, StoreMeta, TargetStates
from spectrain.data.hidden_states_shard import ShardBuffer
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling
from spectrain.data.state_types import as_stored
from spectrain.engines.vllm.adopt_states import META, Adopter, AdoptionThread, Session, has_leftovers
from spectrain.engines.vllm.shard_thread import CopiedDocument, ShardWriter
from spectrain.errors import RunError

TAPS = (1, 4)
SAMPLING = Sampling(0.0, 1.0, 0, 8, 0)
HEAD = random_head(dtype=torch.float32)
DIGESTS = ("target", "target_revision", "config_digest", "tokenizer_digest", "template_digest")


def make_meta(dtype: str = "float32", **changes: object) -> StoreMeta:
    fields = {"tap_ids": TAPS, "hidden_size": HIDDEN, "num_layers": 5, "dtype": dtype}
    return StoreMeta(**(dict.fromkeys(DIGESTS, "x") | fields | changes))


def make_response(number: int, length: int) -> Response:
    random = np.random.default_rng(number)
    ids = random.integers(0, VOCAB, length).astype(np.int32)
    mask = (np.arange(length) >= 2).astype(np.uint8)
    return Response(
        Conversation(id=str(number), turns=("a",)), ids, mask, "stop", SAMPLING, None, "train", f"key-{number}"
    )


def captured(response: Response) -> torch.Tensor:
    """[S, I, H]: both taps and the last layer; no states for the last token."""
    generator = torch.Generator().manual_seed(len(response.input_ids) * 100 + int(response.input_ids[0]))
    states_SIH = torch.randn(len(response.input_ids), 3, HIDDEN, generator=generator)
    states_SIH[-1] = 0
    return states_SIH


def document(response: Response, states_SIH: torch.Tensor | None = None, **changes: object) -> TargetStates:
    states_SIH = captured(response) if states_SIH is None else states_SIH
    ids, mask = torch.from_numpy(response.input_ids), torch.from_numpy(response.loss_mask)
    whole = TargetStates(ids, mask, states_SIH[:, :2], states_SIH[:, 2], None, response.key, response.split)
    return dataclasses.replace(whole, **changes)


def leave_shard(folder: Path, meta: StoreMeta, documents: list[TargetStates], name: str = "w-0") -> Path:
    buffer = ShardBuffer(meta, 1 << 20)
    for states in documents:
        buffer.add(states)
    path = folder / f"{name}.safetensors"
    buffer.write(path, {META: json.dumps(dataclasses.asdict(meta))})
    return path


def assert_stored(store: StoredHiddenStates, responses: list[Response]) -> None:
    """The store holds exactly these documents with their states and the log-normalizer that belongs to the states as
    stored.
    """
    assert store.keys == sorted(response.key for response in responses)
    store.verify_checksums()
    by_key = {response.key: response for response in responses}
    reference = head_reference(HEAD)
    for number, key in enumerate(store.keys):
        found, wanted = store[number], captured(by_key[key])
        assert found.input_ids.tolist() == by_key[key].input_ids.tolist()
        assert found.loss_mask.tolist() == by_key[key].loss_mask.tolist()
        kept = as_stored(wanted, store.meta.dtype)
        assert found.taps.equal(kept[:, :2]) and found.last_hidden.equal(kept[:, 2])
        needed = [*by_key[key].loss_mask[1:].astype(bool), False]
        expected = [
            float(torch.logsumexp(reference.logits(y.double()), 0)) if need else float("nan")
            for y, need in zip(kept[:, 2], needed, strict=True)
        ]
        assert found.log_normalizer is not None
        np.testing.assert_allclose(found.log_normalizer.numpy(), expected, rtol=1e-5)


def adopter(folder: Path, responses: list[Response], meta: StoreMeta) -> tuple[HiddenStatesWriter, Adopter]:
    writer = HiddenStatesWriter(folder, meta)
    return writer, Adopter(writer, HEAD, {response.key: response for response in responses})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int8_grouped", "float8_e4m3"])
def test_a_shard_whose_documents_are_all_wanted_becomes_part_of_the_store(tmp_path: Path, dtype: str) -> None:
    meta, responses = make_meta(dtype), [make_response(n, 5 + n) for n in range(4)]
    session = Session(tmp_path, meta)
    path = leave_shard(session.folder, meta, [document(response) for response in responses])
    assert session.arrived() == {response.key for response in responses}
    writer, adopting = adopter(tmp_path, responses, meta)
    assert adopting.adopt(path) == sum(len(response.input_ids) for response in responses)
    writer.close()
    session.remove()
    assert_stored(StoredHiddenStates(tmp_path), responses)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "index.copy.json",
        "index.json",
        "shard-00000.safetensors",
    ]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_log_normalizers_are_found_where_the_last_hidden_state_is_a_tap(tmp_path: Path, dtype: str) -> None:
    """The connector copies such a layer once, and shards hold it once; one unwanted document, so that they are
    rewritten.
    """
    responses = [make_response(n, 5 + n) for n in range(3)]
    contents: list[list[torch.Tensor]] = []
    for tap_ids, taps in (((1, 3), slice(0, 2)), ((1, 3, 5), slice(0, 3))):
        meta, folder = make_meta(dtype, tap_ids=tap_ids), tmp_path / str(len(tap_ids))
        session = Session(folder, meta)
        documents = [document(response, taps=captured(response)[:, taps]) for response in responses]
        path = leave_shard(session.folder, meta, documents)
        writer, adopting = adopter(folder, responses[:2], meta)
        assert adopting.adopt(path) == 5 + 6
        writer.close()
        store = StoredHiddenStates(folder)
        contents.append([value for d in store for value in (d.taps[:, :2], d.last_hidden, d.log_normalizer)])
    assert len(contents[0]) == 6
    for apart, once in zip(*contents, strict=True):
        torch.testing.assert_close(once, apart, rtol=0, atol=0, equal_nan=True)


def test_leftovers_are_adopted_document_by_document(tmp_path: Path) -> None:
    meta, responses = make_meta(), [make_response(n, 6 + n) for n in range(6)]
    with HiddenStatesWriter(tmp_path, meta) as writer:
        stored = document(responses[0])
        writer.add(dataclasses.replace(stored, log_normalizer=torch.full((6,), torch.nan)))
    first, second = Session(tmp_path, meta), Session(tmp_path, meta)
    other_ids = document(responses[3], input_ids=torch.from_numpy(responses[3].input_ids).roll(1))
    other_mask = document(responses[4], loss_mask=torch.ones(10, dtype=torch.uint8))
    other_split = document(responses[5], split="heldout")
    unknown = document(make_response(77, 9))
    leave_shard(first.folder, meta, [document(responses[0]), document(responses[1]), other_ids, unknown])
    leave_shard(first.folder, meta, [document(responses[1])], "w-1")  # once more
    leave_shard(second.folder, meta, [other_mask, document(responses[2]), other_split])
    leave_shard(second.folder, make_meta(tap_ids=(1, 3)), [document(responses[3])], "w-1")  # of other layers
    (second.folder / "w-2.safetensors").write_bytes(b"half a shard")
    (second.folder / ".w-3.partial").write_bytes(b"what a killed worker was writing")

    assert has_leftovers(tmp_path)
    writer, adopting = adopter(tmp_path, responses, meta)
    assert adopting.adopt_leftovers() == len(responses[1].input_ids) + len(responses[2].input_ids)
    writer.close()
    store = StoredHiddenStates(tmp_path)
    store.verify_checksums()
    assert store.keys == ["key-0", "key-1", "key-2"]
    for number in (1, 2):
        assert store[number].taps.equal(captured(responses[number])[:, :2])
        assert store[number].log_normalizer.isfinite().sum() == len(responses[number].input_ids) - 2
    assert not (tmp_path / ".incoming").exists()


def test_a_document_that_a_shard_holds_twice_is_adopted_once(tmp_path: Path) -> None:
    """As after a request that was sent again."""
    meta, responses = make_meta(), [make_response(n, 6 + n) for n in range(2)]
    session = Session(tmp_path, meta)
    twice = [document(responses[0]), document(responses[1]), document(responses[0])]
    path = leave_shard(session.folder, meta, twice)
    writer, adopting = adopter(tmp_path, responses, meta)
    assert adopting.adopt(path) == 6 + 7
    writer.close()
    assert_stored(StoredHiddenStates(tmp_path), responses)


def test_adopted_shards_survive_the_next_writer_and_unlisted_ones_do_not(tmp_path: Path) -> None:
    meta, responses = make_meta(), [make_response(n, 7) for n in range(3)]
    session = Session(tmp_path, meta)
    writer, adopting = adopter(tmp_path, responses, meta)
    adopting.adopt(leave_shard(session.folder, meta, [document(responses[0])]))
    # Killed between the move into the store and the index.
    leave_shard(session.folder, meta, [document(responses[1])]).rename(tmp_path / "shard-00001.safetensors")
    writer, adopting = adopter(tmp_path, responses, meta)
    assert writer.done_keys() == {"key-0"}
    assert not (tmp_path / "shard-00001.safetensors").exists()
    adopting.adopt(leave_shard(session.folder, meta, [document(response) for response in responses]))
    writer.close()
    assert_stored(StoredHiddenStates(tmp_path), responses)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_state_that_is_not_finite_is_named_and_not_stored(tmp_path: Path, dtype: str) -> None:
    meta, responses = make_meta(dtype), [make_response(n, 7) for n in range(3)]
    session = Session(tmp_path, meta)
    broken = captured(responses[1])
    broken[3, 0, 5] = torch.inf
    path = leave_shard(
        session.folder, meta, [document(responses[0]), document(responses[1], broken), document(responses[2])]
    )
    _, adopting = adopter(tmp_path, responses, meta)
    with pytest.raises(RunError, match="computed taps that are not finite for response key-1"):
        adopting.adopt(path)
    assert not list(tmp_path.glob("shard-*"))


def test_shards_are_adopted_while_others_come_and_the_last_ones_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spectrain.engines.vllm.adopt_states._LOOK_S", 0.0)
    meta, responses = make_meta(), [make_response(n, 7) for n in range(3)]
    session = Session(tmp_path, meta)
    writer, adopting = adopter(tmp_path, responses, meta)
    with AdoptionThread(session, adopting) as adoption:
        leave_shard(session.folder, meta, [document(responses[0])], "w-0")
        adoption.look()
        assert wait_for(lambda: writer.done_keys() == {"key-0"})
        leave_shard(session.folder, meta, [document(responses[1]), document(responses[2])], "w-1")
    assert session.shards() == [] and session.arrived() == {"key-0", "key-1", "key-2"}
    writer.close()
    assert_stored(StoredHiddenStates(tmp_path), responses)


def test_shards_are_adopted_side_by_side_and_each_document_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both servers were asked for the document in the middle, as one had been silent for long."""
    monkeypatch.setattr("spectrain.engines.vllm.adopt_states.adopters", lambda: 2)
    meta, responses = make_meta(), [make_response(n, 7) for n in range(3)]
    session = Session(tmp_path, meta)
    writer, adopting = adopter(tmp_path, responses, meta)
    both, normalizer = threading.Barrier(2, timeout=20.0), adopting._log_normalizer

    def together(*arguments: Any) -> torch.Tensor:
        both.wait()
        return normalizer(*arguments)

    monkeypatch.setattr(adopting, "_log_normalizer", together)
    with AdoptionThread(session, adopting):
        leave_shard(session.folder, meta, [document(responses[0]), document(responses[1])], "w-0")
        leave_shard(session.folder, meta, [document(responses[1]), document(responses[2])], "w-1")
    writer.close()
    assert_stored(StoredHiddenStates(tmp_path), responses)


@pytest.mark.parametrize("when", ["while vLLM works", "at the end"])
def test_what_cannot_be_adopted_ends_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    monkeypatch.setattr("spectrain.engines.vllm.adopt_states._LOOK_S", 0.0)
    meta, response = make_meta(), make_response(0, 7)
    session = Session(tmp_path, meta)
    broken = captured(response)
    broken[3, 0, 5] = torch.nan
    _, adopting = adopter(tmp_path, [response], meta)
    leave_shard(session.folder, meta, [document(response, broken)])

    def capture() -> None:
        with AdoptionThread(session, adopting) as adoption:
            while when != "at the end":
                adoption.look()

    with pytest.raises(RunError, match="not finite"):
        capture()


def test_without_an_adopter_shards_are_left_where_they_are(tmp_path: Path) -> None:
    meta, response = make_meta(), make_response(0, 7)
    session = Session(tmp_path, meta)
    with AdoptionThread(session, None):
        leave_shard(session.folder, meta, [document(response)])
    assert len(session.shards()) == 1


def put(writer: ShardWriter, response: Response, event: object = None) -> None:
    ids, mask = torch.from_numpy(response.input_ids), torch.from_numpy(response.loss_mask)
    writer.put(CopiedDocument(response.key, response.split, ids, mask, captured(response), event))  # type: ignore[arg-type]


def wait_for(condition: object, seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_writers_fill_shards_and_empty_them_when_asked(tmp_path: Path) -> None:
    meta, responses = make_meta("bfloat16"), [make_response(n, 10) for n in range(5)]
    session = Session(tmp_path, meta)
    per_token = 4 + 1 + 4 + 3 * HIDDEN * 2
    writers = [ShardWriter(session.folder, meta, 25 * per_token) for _ in range(2)]  # two documents a shard
    for number, response in enumerate(responses):
        put(writers[number == 4], response)
    assert wait_for(lambda: len(session.arrived()) == 2)  # a third document closed the first shard
    session.flush()
    assert wait_for(lambda: len(session.arrived()) == 5)
    session.flush()  # nothing is left: no empty shards
    for writer in writers:
        writer.close()
    assert len(session.shards()) == 3
    store, adopting = adopter(tmp_path, responses, meta)
    assert adopting.adopt_leftovers() == 50
    store.close()
    assert_stored(StoredHiddenStates(tmp_path), responses)


def test_closing_writes_what_is_queued_and_waits_for_copies(tmp_path: Path) -> None:
    class Copy:
        def __init__(self) -> None:
            self.done = threading.Event()

        def synchronize(self) -> None:
            assert self.done.wait(20)

    meta, response, copy = make_meta(), make_response(1, 9), Copy()
    session = Session(tmp_path, meta)
    writer = ShardWriter(session.folder, meta, 1 << 20)
    put(writer, response, copy)
    session.flush()
    time.sleep(0.3)
    assert session.shards() == []  # the copy is not done
    copy.done.set()
    writer.close()
    assert session.arrived() == {response.key}


def test_a_writer_that_fails_says_so_and_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = make_meta()
    session = Session(tmp_path, meta)

    def full(*args: object) -> str:
        raise OSError("No space left on device")

    monkeypatch.setattr(ShardBuffer, "write", full)
    writer = ShardWriter(session.folder, meta, 1)
    monkeypatch.setattr(writer, "_queue_limit", 1)
    for number in range(5):  # would wait for ever on a writer that is no more
        put(writer, make_response(number, 9))
    assert wait_for(lambda: any(session.folder.glob("*.error")))
    with pytest.raises(RunError, match="No space left on device"):
        session.check()
    writer.close()


def test_a_disk_so_full_that_it_does_not_take_the_reason_is_heard_of_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files can be made there, but not filled."""
    meta = make_meta()
    session = Session(tmp_path, meta)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardBuffer, "write", full)
    writer = ShardWriter(session.folder, meta, 1)
    with monkeypatch.context() as patch:
        patch.setattr("spectrain.files.os.fsync", full)
        put(writer, make_response(0, 9))
        assert wait_for(lambda: any(session.folder.glob("*.error")))
    with pytest.raises(RunError, match="see whether the disk is full"):
        session.check()
    for number in range(1, 5):
        put(writer, make_response(number, 9))
    assert wait_for(lambda: not writer._queue)  # what can no longer be written takes no memory
    writer.close()
