"""Hidden states that are asked for: as a store would give them, tried again, kept within a budget, never replaced."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_tools import HIDDEN, VOCAB
from torch import Tensor

from spectrain.data import computed_states, states_cache
from spectrain.data.computed_states import ComputedHiddenStates, Keep, KeptInMemory
from spectrain.data.hidden_states import StoredHiddenStates, StoreMeta, TargetStates
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.loader import BatchLoader, BatchRequest
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling
from spectrain.data.states_cache import KeptOnDisk
from spectrain.errors import NotFiniteError, RunError

SAMPLING = Sampling(0.0, 1.0, 0, 8, 0)
LENGTHS = (9, 4, 7, 12, 5, 3)
KEYS = [f"key-{number}" for number in (3, 0, 5, 1, 4, 2)]  # of LENGTHS, not in their order


def make_meta(dtype: str = "float32", taps: tuple[int, ...] = (1, 4), kv: bool = False) -> StoreMeta:
    kv_layers = ((3, 2, 4),) if kv else ()
    names = ("target", "target_revision", "config_digest", "tokenizer_digest", "template_digest")
    return StoreMeta(
        **dict.fromkeys(names, "x"), tap_ids=taps, hidden_size=HIDDEN, num_layers=5, dtype=dtype, kv_layers=kv_layers
    )


def make_responses() -> list[Response]:
    made = []
    for key, length in zip(KEYS, LENGTHS, strict=True):
        random = np.random.default_rng(length)
        ids, mask = random.integers(0, VOCAB, length).astype(np.int32), (np.arange(length) >= 2).astype(np.uint8)
        conversation = Conversation(id=key, turns=("a",))
        made.append(Response(conversation, ids, mask, "stop", SAMPLING, None, "train", key))
    return made


def states_of(response: Response, meta: StoreMeta) -> TargetStates:
    """What a target in float32 computes."""
    length = len(response.input_ids)
    generator = torch.Generator().manual_seed(length)
    taps = torch.randn(length, len(meta.tap_ids), HIDDEN, generator=generator)
    last = torch.randn(length, HIDDEN, generator=generator)
    if meta.last_hidden_tap is not None:
        last = taps[:, meta.last_hidden_tap]
    kv = {
        layer: (torch.randn(length, heads, d, generator=generator), torch.randn(length, heads, d, generator=generator))
        for layer, heads, d in meta.kv_layers
    }
    ids, mask = torch.from_numpy(response.input_ids), torch.from_numpy(response.loss_mask)
    normalizer = torch.randn(length, generator=generator)
    return TargetStates(ids, mask, taps, last, normalizer, response.key, response.split, kv)


class Target:
    """An ``Asker``. ``together``: documents that are computed with one another; ``fails``: key -> times."""

    def __init__(self, meta: StoreMeta, together: Sequence[Response] = (), fails: dict[str, int] | None = None) -> None:
        self.meta, self.together, self.fails = meta, list(together), dict(fails or {})
        self.error: Exception = RunError("no answer")
        self.asked: list[str] = []
        self.expected: list[list[str]] = []

    def expect(self, responses: Sequence[Response]) -> None:
        self.expected.append([response.key for response in responses])

    def ask(self, response: Response) -> list[TargetStates]:
        self.asked.append(response.key)
        if self.fails.get(response.key, 0):
            self.fails[response.key] -= 1
            raise self.error
        return [states_of(one, self.meta) for one in self.together or [response]]


def make_source(target: Target, keep: Keep | None = None, retries: int = 0) -> ComputedHiddenStates:
    keep = KeptInMemory(target.meta, 0) if keep is None else keep
    return ComputedHiddenStates(make_responses(), target, keep, target.meta, retries)


def tensors(states: TargetStates) -> dict[str, Tensor]:
    found = {f.name: value for f in dataclasses.fields(states) if isinstance(value := getattr(states, f.name), Tensor)}
    pairs = {f"{name}{layer}": x for layer, kv in states.target_kv.items() for name, x in zip("kv", kv, strict=True)}
    return found | pairs


def assert_same(found: TargetStates, expected: TargetStates) -> None:
    assert (found.key, found.split) == (expected.key, expected.split)
    ours, theirs = tensors(found), tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        assert ours[name].dtype == wanted.dtype, name
        torch.testing.assert_close(ours[name], wanted, rtol=0, atol=0, equal_nan=True)


METAS = {
    **{dtype: make_meta(dtype) for dtype in ("float32", "bfloat16", "int8")},
    "last tap": make_meta("bfloat16", taps=(5, 1)),
    "last tap in 8 bits": make_meta("int8", taps=(1, 5)),
    "keys and values": make_meta("int8", taps=(), kv=True),
    "groups of channels": make_meta("int8_grouped", taps=(1, 5)),
    "keys and values in groups": make_meta("int8_grouped", taps=(), kv=True),
    "floats of 8 bits": make_meta("float8_e4m3", kv=True),
}


@pytest.mark.parametrize("meta", METAS.values(), ids=METAS)
@pytest.mark.parametrize("keep", ["nothing", "memory", "disk"])
def test_documents_are_those_of_a_store_to_the_bit(meta: StoreMeta, keep: str, tmp_path: Path) -> None:
    responses = make_responses()
    with HiddenStatesWriter(tmp_path / "store", meta) as writer:
        for response in responses:
            writer.add(states_of(response, meta))
    store = StoredHiddenStates(tmp_path / "store")
    kept: dict[str, Keep] = {
        "nothing": KeptInMemory(meta, 0),
        "memory": KeptInMemory(meta, 1 << 20),
        "disk": KeptOnDisk(tmp_path / "cache", meta, 1 << 20),
    }
    target = Target(meta)
    source = make_source(target, kept[keep])
    assert source.keys == store.keys and source.splits == store.splits and len(source) == len(store)
    assert source.lengths.tolist() == store.lengths.tolist()
    assert source.loss_counts.tolist() == store.loss_counts.tolist()
    for _ in range(2):
        for number in range(len(store)):
            assert_same(source[number], store[number])
    assert len(target.asked) == (12 if keep == "nothing" else 6)
    requests = [BatchRequest((5, 0, 2), 8), BatchRequest((1,), 8)]
    batches = [list(BatchLoader(states, iter(requests), torch.device("cpu"))) for states in (source, store)]
    for ours, theirs in zip(*((batch.to("cpu") for batch in one) for one in batches), strict=True):
        assert ours.taps_TAH.equal(theirs.taps_TAH) and ours.last_hidden_TH.equal(theirs.last_hidden_TH)
        assert ours.input_ids_T.equal(theirs.input_ids_T) and ours.loss_mask_T.equal(theirs.loss_mask_T)


def test_a_document_that_fails_is_asked_for_again_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(computed_states.time, "sleep", waits.append)
    target = Target(make_meta(), fails={"key-3": 2})
    assert make_source(target, retries=2)[3].key == "key-3"
    assert target.asked == ["key-3"] * 3 and waits == [0.5, 1.0]
    target = Target(make_meta(), fails={"key-3": 3})
    source = make_source(target, retries=2)
    with pytest.raises(RunError, match=r"document key-3 .* 3 times .*states\.retries.*no answer") as error:
        source[3]
    assert error.value.exit_code == 1
    # The loader says it once, and the batch is not made of the others.
    target.fails["key-3"] = 3
    with (
        pytest.raises(RunError) as error,
        BatchLoader(source, [BatchRequest((2, 3), 8)], torch.device("cpu")) as loader,
    ):
        next(loader)
    assert str(error.value).count("key-3") == 1


def test_numbers_that_are_not_finite_are_not_asked_for_again() -> None:
    target = Target(make_meta(), fails={"key-1": 1})
    target.error = NotFiniteError("taps", "float16")
    with pytest.raises(RunError, match="key-1"):
        make_source(target, retries=5)[1]
    assert target.asked == ["key-1"]


@pytest.mark.parametrize("what", ["other documents", "other tokens"])
def test_what_was_not_asked_for_is_never_taken(what: str) -> None:
    target = Target(make_meta())
    wrong = make_responses()[0]
    if what == "other tokens":
        wrong = dataclasses.replace(make_responses()[0], key="key-1")  # key-3's tokens
    target.together = [wrong]
    with pytest.raises(RunError, match=f"key-1.*{what}"):
        make_source(target)[1]


def test_memory_holds_the_newest_within_its_budget() -> None:
    """What came along with a document need not be computed again; what was there first makes room."""
    meta, responses = make_meta(), make_responses()
    sizes = {r.key: sum(x.nbytes for x in tensors(states_of(r, meta)).values()) for r in responses}
    target = Target(meta, responses[:3])  # key-3, key-0, key-5
    source = make_source(target, KeptInMemory(meta, sizes["key-0"] + sizes["key-5"]))
    for number, asked in ((0, 1), (5, 1), (0, 1), (3, 2)):
        assert source[number].key == f"key-{number}" and len(target.asked) == asked
    target.together = []
    assert source[2].key == "key-2"  # the smallest: key-0 makes room
    target.asked.clear()
    assert [source[number].key for number in (5, 2)] == ["key-5", "key-2"] and target.asked == []
    assert source[0].key == "key-0" and target.asked == ["key-0"]


def cache_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_disk_holds_the_newest_within_its_budget_and_for_the_next_training(tmp_path: Path) -> None:
    meta, order = make_meta(), (4, 1, 3, 0, 2, 5)
    source = make_source(Target(meta), KeptOnDisk(tmp_path / "all", meta, 1 << 20))
    for number in order:
        source[number]
    budget = cache_bytes(tmp_path / "all") - 1  # one document too many: the oldest, key-4, makes room
    target = Target(meta)
    source = make_source(target, KeptOnDisk(tmp_path / "some", meta, budget))
    for number in (*order, *order[1:], 4, 1):
        source[number]
        assert cache_bytes(tmp_path / "some") <= budget
    assert target.asked == [*(f"key-{number}" for number in order), "key-4", "key-1"]
    # The next training finds what is there: all but the oldest then, key-3.
    target.asked.clear()
    source = make_source(target, KeptOnDisk(tmp_path / "some", meta, budget))
    for number in (0, 1, 2, 4, 5, 3):
        source[number]
    assert target.asked == ["key-3"]
    target.asked.clear()
    make_source(target, KeptOnDisk(tmp_path / "some", meta, 0))
    assert cache_bytes(tmp_path / "some") == 0


def test_a_cache_of_something_else_is_removed(tmp_path: Path) -> None:
    target = Target(make_meta())
    make_source(target, KeptOnDisk(tmp_path, target.meta, 1 << 20))[0]
    other = Target(make_meta(taps=(0, 4)))
    make_source(other, KeptOnDisk(tmp_path, other.meta, 1 << 20))[0]
    assert other.asked == ["key-0"]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "other tokens"])
def test_a_damaged_file_is_asked_for_again(damage: str, tmp_path: Path) -> None:
    target = Target(make_meta())
    make_source(target, KeptOnDisk(tmp_path, target.meta, 1 << 20))[3]
    (path,) = tmp_path.rglob("*.safetensors")
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-5])
    elif damage == "flipped":
        header_bytes = int.from_bytes(content[:8], "little")
        first, _ = json.loads(content[8 : 8 + header_bytes])["taps"]["data_offsets"]
        content[8 + header_bytes + first] ^= 1  # of a number, which is as good a number as before
        path.write_bytes(content)
    responses = make_responses()
    if damage == "other tokens":
        responses[0].input_ids[4] += 1
    source = ComputedHiddenStates(responses, target, KeptOnDisk(tmp_path, target.meta, 1 << 20), target.meta, 0)
    assert_same(source[3], states_of(responses[0], target.meta))
    assert target.asked == ["key-3"] * 2
    source[3]
    assert target.asked == ["key-3"] * 2


def test_ranks_read_what_others_wrote_and_remove_their_own(tmp_path: Path) -> None:
    meta, targets = make_meta(), [Target(make_meta()), Target(make_meta())]
    keeps = [KeptOnDisk(tmp_path, meta, 1 << 20, (rank, 2)) for rank in range(2)]
    first, second = (make_source(target, keep) for target, keep in zip(targets, keeps, strict=True))
    first[0], second[1], second[0], first[1]
    assert [target.asked for target in targets] == [["key-0"], ["key-1"]]
    # Each has half of the budget, and every file of an earlier training belongs to exactly one.
    keeps = [KeptOnDisk(tmp_path, meta, 1 << 20, (rank, 2)) for rank in range(2)]
    assert sorted(path for keep in keeps for path in keep._own) == sorted(tmp_path.rglob("*.safetensors"))


def test_ranks_that_write_the_same_document_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computes a whole batch, so both may have one at the same moment; what a kill leaves is removed."""
    target = Target(make_meta())
    keeps = [KeptOnDisk(tmp_path, target.meta, 1 << 20, (rank, 2)) for rank in range(2)]
    states, write = states_of(make_responses()[0], target.meta), states_cache.ShardBuffer.write
    written: list[Path] = []

    def both(buffer: states_cache.ShardBuffer, path: Path, metadata: dict[str, str]) -> str:
        written.append(path)
        if len(written) == 1:  # the other one writes before this one is done
            keeps[1].put(states)
        return write(buffer, path, metadata)

    monkeypatch.setattr(states_cache.ShardBuffer, "write", both)
    keeps[0].put(states)
    assert len(set(written)) == 2
    (path,) = tmp_path.rglob("*.safetensors")
    for keep in keeps:
        found = keep.get(make_responses()[0])
        assert found is not None
        assert_same(found, states)
    path.with_name(f"{path.name}.1").touch()
    path.with_name(".tmp1").touch()
    KeptOnDisk(tmp_path, target.meta, 1 << 20, (0, 2))
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]


def test_a_loader_says_what_comes_next_before_it_is_wanted() -> None:
    target = Target(make_meta())
    source = make_source(target)
    requests = [BatchRequest((number,), 8) for number in (2, 0, 1, 5)]
    with BatchLoader(source, iter(requests), torch.device("cpu"), prefetch=2) as loader:
        next(loader)
        assert target.expected == [["key-2"], ["key-0"], ["key-1"]] and target.asked == ["key-2"]
        next(loader)
        assert target.expected[3:] == [["key-5"]] and target.asked == ["key-2", "key-0"]
        assert len(list(loader)) == 2


def test_what_is_kept_is_not_announced() -> None:
    target = Target(make_meta())
    source = make_source(target, KeptInMemory(target.meta, 1 << 20))
    source[1]
    source.expect([0, 1, 2])
    assert target.expected == [["key-0", "key-2"]]
