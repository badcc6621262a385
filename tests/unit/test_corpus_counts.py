"""What is counted in the tokens of all documents, against a plain loop over documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_tools import MemoryStore
from state_stores import make_meta, make_states, shard_of_tokens

from spectrain.data import corpus_counts
from spectrain.data.corpus_counts import count_tokens, sampled_hidden
from spectrain.data.hidden_states import ShardFile, StoredHiddenStates, TargetStates
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.stages import fit

V = 400
LENGTHS = [9, 1, 14, 30, 2, 7, 21, 5, 12, 16]


def documents(dtype: str = "float32") -> list[TargetStates]:
    """Masks of several answers, of none, of all tokens, and of single tokens."""
    made = []
    for number, length in enumerate(LENGTHS):
        states = make_states(number, length, "float32" if dtype == "int8" else dtype)
        rng = np.random.default_rng(number)
        mask = (rng.random(length) < (0.0, 0.2, 0.5, 1.0)[number % 4]).astype(np.uint8)
        object.__setattr__(states, "loss_mask", torch.from_numpy(mask))
        object.__setattr__(states, "input_ids", torch.from_numpy(rng.integers(0, V, length, dtype=np.int32)))
        made.append(states)
    return made


def write(folder: Path, dtype: str) -> StoredHiddenStates:
    meta = make_meta(dtype)
    with HiddenStatesWriter(folder, meta, shard_of_tokens(meta, 40)) as writer:
        for states in reversed(documents(dtype)):
            writer.add(states)
    return StoredHiddenStates(folder)


def plain_counts(made: list[TargetStates], packed_length: int | None) -> tuple[list[bool], np.ndarray, np.ndarray]:
    teaches, generated_V, shown_V = [], np.zeros(V, dtype=int), np.zeros(V, dtype=int)
    for states in made:
        mask, ids = states.loss_mask.tolist(), states.input_ids.tolist()
        end = len(mask) if packed_length is None else min(packed_length, len(mask))
        pairs = [mask[i] and mask[i + 1] for i in range(end - 1)]
        teaches.append(packed_length is None or any(pairs))
        for token, chosen in zip(ids, mask, strict=True):
            if teaches[-1]:
                (generated_V if chosen else shown_V)[token] += 1
    return teaches, generated_V, shown_V


@pytest.mark.parametrize("packed_length", [None, 40, 6, 2])
@pytest.mark.parametrize("kind", ["int8", "bfloat16", "memory"])
def test_counts_are_those_of_a_loop_over_documents(
    tmp_path: Path, kind: str, packed_length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked = documents(), [8, 0, 3, 1, 9, 6, 5, 2]
    if kind == "memory":
        monkeypatch.setattr(corpus_counts, "_BLOCK_TOKENS", 25)
        source = MemoryStore(made)
    else:
        source = write(tmp_path, kind)
        assert len(source.shards) >= 3
        # Nothing but token columns is read: no hidden state, no memory map that stays.
        monkeypatch.setattr(ShardFile, "tensors", lambda shard: pytest.fail("reads hidden states"))
    found = count_tokens(source, asked, V, packed_length)
    teaches, generated_V, shown_V = plain_counts([made[number] for number in asked], packed_length)
    assert found.teaches_D.tolist() == teaches
    assert found.generated_V.tolist() == generated_V.tolist()
    assert found.shown_V.tolist() == shown_V.tolist()
    assert found.used_V.tolist() == (generated_V + shown_V).tolist()
    assert found.predicting_D.tolist() == [int(made[number].loss_mask[1:].sum()) for number in asked]
    numbers, kept = found.of_teaching(asked)
    assert list(numbers) == [number for number, teaching in zip(asked, teaches, strict=True) if teaching]
    assert kept.predicting_D.tolist() == [int(made[number].loss_mask[1:].sum()) for number in numbers]


def test_of_no_documents_there_is_nothing_to_count(tmp_path: Path) -> None:
    assert count_tokens(write(tmp_path, "float32"), [], V, 8).used_V.sum() == 0


def sampled(source: Any, asked: list[int], most: int) -> list[tuple[int, int]]:
    """Document and position of each hidden state of the sample, told by its values."""
    found = count_tokens(source, asked, V)
    rows = {h.numpy().tobytes(): (n, t) for n in asked for t, h in enumerate(source[n].last_hidden)}
    return [rows[h.numpy().tobytes()] for h in sampled_hidden(source, asked, found.predicting_D, most)]


def test_a_sample_that_holds_all_is_every_position_before_a_generated_token(tmp_path: Path) -> None:
    made, asked = documents(), [8, 0, 3, 1, 9, 6, 5, 2]
    wanted = [(n, t) for n in asked for t in range(len(made[n].loss_mask) - 1) if made[n].loss_mask[t + 1]]
    store = write(tmp_path, "int8")
    assert sampled(store, asked, 10_000) == wanted
    assert all(shard._tensors is None for shard in store.shards)  # no map stays, whose pages count as memory
    assert sampled(MemoryStore(made), asked, len(wanted)) == wanted


def test_a_sample_is_spread_over_all_documents_and_positions_alike() -> None:
    """50 documents of 41 tokens whose last 40 are generated: 100 of 2,000 positions."""
    made = []
    for number in range(50):
        states = make_states(number, 41)
        object.__setattr__(states, "loss_mask", torch.tensor([0] + [1] * 40, dtype=torch.uint8))
        made.append(states)
    found = sampled(MemoryStore(made), list(range(50)), 100)
    assert len(set(found)) == 100
    assert np.bincount([number for number, _ in found], minlength=50).tolist() == [2] * 50
    positions = [position for _, position in found]
    assert min(positions) < 5 and max(positions) > 34
    assert 15 < np.mean(positions) < 24  # 19.5, with a standard error of 1.2; each document's first ones: below 10


class PlainHead:
    vocab_size = V

    def __init__(self, hidden: int) -> None:
        self.weight = torch.randn(V, hidden, generator=torch.Generator().manual_seed(0))

    def hidden_to_logits(self, hidden_PH: torch.Tensor) -> torch.Tensor:
        return hidden_PH.float() @ self.weight.T


def test_expected_tokens_are_the_sum_of_the_targets_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "_SAMPLE_BATCH", 7)
    made, asked = documents(), [8, 0, 3, 1, 9, 6, 5, 2]
    head = PlainHead(made[0].last_hidden.shape[1])
    wanted_V, seen = torch.zeros(V, dtype=torch.float64), 0
    for number in asked:
        for t in range(len(made[number].loss_mask) - 1):
            if made[number].loss_mask[t + 1]:
                wanted_V += torch.softmax(head.weight.double() @ made[number].last_hidden[t].double(), dim=0)
                seen += 1
    generated = sum(int(made[number].loss_mask.sum()) for number in asked)
    for source in (write(tmp_path, "float32"), MemoryStore(made)):
        counts = count_tokens(source, asked, V)
        found_V = fit._expected_tokens(source, asked, counts, head)  # type: ignore[arg-type]
        torch.testing.assert_close(torch.from_numpy(found_V), wanted_V * generated / seen, rtol=1e-5, atol=1e-6)
