"""Responses: keys name what decides a response, and the store is a set of them whatever is killed or comes twice."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spectrain.config.data_schema import SamplingConfig
from spectrain.data.asked_documents import Asked
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, ResponseStore, Sampling, resolve_sampling, response_key
from spectrain.data.stored_responses import StoredResponses, longest_first
from spectrain.data.string_column import Strings
from spectrain.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=64, seed=3)


def make_response(number: int, length: int = 5, **changes: object) -> Response:
    conversation = Conversation(
        id=f"c{number}",
        turns=(f"turn {number}", "ünïcode 🙂\n"),
        system="s" if number % 2 else None,
        tools=({"z": 1, "a": [None]},) if number % 3 == 0 else None,
        domain="chat",
        answers=("a", "b") if number % 5 == 0 else None,
        language="fr" if number % 4 == 0 else None,
    )
    fields = {
        "conversation": conversation,
        "input_ids": np.arange(number, number + length, dtype=np.int32),
        "loss_mask": np.arange(length, dtype=np.uint8) % 2,
        "finish_reason": "stop",
        "sampling": SAMPLING,
        "domain": "chat",
        "split": "train",
        "key": response_key(conversation, SAMPLING, "target", "revision"),
    }
    return Response(**(fields | changes))  # type: ignore[arg-type]


def content(response: Response) -> tuple[object, ...]:
    values = {field.name: getattr(response, field.name) for field in dataclasses.fields(response)}
    arrays = {name: (value.dtype, value.tolist()) for name, value in values.items() if isinstance(value, np.ndarray)}
    return tuple((values | arrays).items())


def contents(responses: list[Response]) -> list[tuple[object, ...]]:
    return [content(response) for response in responses]


# Sampling and keys


def generation_config(**fields: object) -> object:
    from transformers import GenerationConfig  # here, so that the process that is killed below starts quickly

    return GenerationConfig(**fields)


@pytest.mark.parametrize(
    ("asked", "own", "expected"),
    [
        ({}, {}, (0.0, 1.0, 0)),
        ({}, {"do_sample": True}, (1.0, 1.0, 0)),
        ({}, {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, (0.6, 0.95, 20)),
        ({}, {"temperature": 0.6, "top_k": -1}, (0.6, 1.0, 0)),
        ({}, {"do_sample": False, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, (0.0, 1.0, 0)),
        ({"temperature": 0.0}, {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, (0.0, 1.0, 0)),
        ({"temperature": 1.0}, {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, (1.0, 0.95, 20)),
        (
            {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
            (1.0, 1.0, 0),
        ),
        ({"temperature": 0.8, "top_p": 0.5, "top_k": 7}, {}, (0.8, 0.5, 7)),
        ({"top_p": 0.5, "top_k": 7}, {}, (0.0, 1.0, 0)),
    ],
)
def test_resolved_sampling(asked: dict[str, float], own: dict[str, float], expected: tuple[float, float, int]) -> None:
    sampling = resolve_sampling(SamplingConfig(max_new_tokens=9, seed=4, **asked), generation_config(**own))  # type: ignore[arg-type]
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == expected
    assert sampling.max_new_tokens == 9
    assert sampling.seed == (4 if sampling.temperature else 0)


def test_greedy_without_a_generation_config() -> None:
    assert resolve_sampling(SamplingConfig()) == Sampling(
        temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=512, seed=0
    )


def test_unapplied_generation_fields_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("spectrain.data.responses.say", told.append)
    resolve_sampling(SamplingConfig(), generation_config(repetition_penalty=1.0, top_k=3))
    assert told == []
    resolve_sampling(SamplingConfig(), generation_config(repetition_penalty=1.05))
    assert len(told) == 1
    assert "repetition_penalty=1.05" in told[0]


def test_key_changes_with_all_that_decides_a_response_and_nothing_else() -> None:
    base = Conversation(id="a", turns=("t",), system="s")
    imported = dataclasses.replace(base, answers=("x",))
    keys = [
        response_key(base, SAMPLING, "target", "revision"),
        response_key(dataclasses.replace(base, turns=("u",)), SAMPLING, "target", "revision"),
        response_key(dataclasses.replace(base, system=None), SAMPLING, "target", "revision"),
        response_key(base, SAMPLING, "other", "revision"),
        response_key(base, SAMPLING, "target", "other"),
        response_key(base, SAMPLING, "target", "revision", {"enable_thinking": False}),
        response_key(base, SAMPLING, "target", "revision", {"enable_thinking": True}),
        *(
            response_key(base, dataclasses.replace(SAMPLING, **{name: value}), "target", "revision")
            for name, value in {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "max_new_tokens": 5, "seed": 5}.items()
        ),
        response_key(imported, SAMPLING, "target", "revision"),
        response_key(dataclasses.replace(base, answers=("y",)), SAMPLING, "target", "revision"),
    ]
    assert len(set(keys)) == len(keys)
    renamed = dataclasses.replace(base, id="b", domain="d", language="en", source="f:1")
    assert response_key(renamed, SAMPLING, "target", "revision") == keys[0]
    resampled = dataclasses.replace(SAMPLING, seed=9)
    assert response_key(imported, resampled, "target", "revision") == response_key(
        imported, SAMPLING, "target", "revision"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": "eos"},
        {"split": "test"},
        {"loss_mask": np.zeros(4, dtype=np.uint8)},
        {"loss_mask": np.zeros(5, dtype=np.int64)},
        {"input_ids": np.zeros(5, dtype=np.int64)},
        {"input_ids": np.zeros((1, 5), dtype=np.int32), "loss_mask": np.zeros((1, 5), dtype=np.uint8)},
    ],
)
def test_impossible_responses(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be|is not one of"):
        make_response(1, **changes)


# The store


def test_parts_without_a_language_are_read(tmp_path: Path) -> None:
    """Of versions that stored none."""
    store, response = ResponseStore(tmp_path), make_response(4)
    written = store.append([response])
    assert written is not None
    table = pq.ParquetFile(written).read()
    assert table["conversation_language"].to_pylist() == ["fr"]
    older = table.drop_columns(["conversation_language"])
    written.unlink()
    pq.write_table(older, tmp_path / "part-00000.parquet")
    (found,) = ResponseStore(tmp_path).load()
    assert found.conversation == dataclasses.replace(response.conversation, language=None)
    assert found.key == response.key
    kept = ResponseStore(tmp_path)
    kept.append([make_response(8)])
    assert [r.conversation.language for r in kept.load([response.key, make_response(8).key])] == [None, "fr"]


def test_what_is_loaded_is_what_was_appended(tmp_path: Path) -> None:
    folder = tmp_path / "lr=0.1" / "responses"  # a name that table readers take for a partition
    responses = [make_response(i, length=i % 4 + 1) for i in range(12)]
    responses[3] = make_response(3, finish_reason="length", split="heldout", domain=None)
    responses[5] = make_response(5, finish_reason="imported")
    store = ResponseStore(folder)
    assert not folder.exists()
    assert (store.keys(), store.load(), store.load([])) == (set(), [], [])
    store.append(responses[:7])
    store.append(responses[7:])
    assert [path.name[:10] for path in sorted(folder.iterdir())] == ["part-00000", "part-00001"]
    for reader in (store, ResponseStore(folder)):
        assert reader.keys() == {response.key for response in responses}
        shuffled = random.Random(0).sample(responses, 9)
        assert contents(reader.load([response.key for response in shuffled])) == contents(shuffled)


def test_order_of_completion_does_not_matter(tmp_path: Path) -> None:
    responses = [make_response(i) for i in range(8)]
    stores = []
    for name, order, size in (("a", responses, 8), ("b", responses[::-1], 3), ("c", responses[4:] + responses[:4], 1)):
        store = ResponseStore(tmp_path / name)
        for start in range(0, 8, size):
            store.append(order[start : start + size])
        stores.append(store)
    assert contents(stores[0].load()) == contents(stores[1].load()) == contents(stores[2].load())
    assert len(stores[0].load()) == 8


def test_duplicates_are_ignored_and_the_first_kept(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path)
    first, second = make_response(1), make_response(2)
    store.append([first, make_response(1, finish_reason="length")])
    store.append([make_response(1, finish_reason="length"), second, make_response(2, split="heldout")])
    assert store.append([first, second]) is None
    assert len(list(tmp_path.iterdir())) == 2
    assert contents(ResponseStore(tmp_path).load([first.key, second.key])) == contents([first, second])
    # Two writers that did not see each other: the same key in two parts.
    (part,) = tmp_path.glob("part-00000-*.parquet")
    pq.write_table(pq.ParquetFile(part).read(), tmp_path / "part-00007.parquet")  # as earlier versions named it
    doubled = ResponseStore(tmp_path)
    assert len(doubled.load()) == 2
    written = doubled.append([make_response(3)])
    assert written is not None and written.name.startswith("part-00008-")


def test_parts_of_another_writer_are_seen(tmp_path: Path) -> None:
    mine, other = ResponseStore(tmp_path), ResponseStore(tmp_path)
    mine.append([make_response(1)])
    other.append([make_response(2)])
    assert len(mine.keys()) == len(mine.load()) == 2


def test_splits_are_a_choice_of_the_run(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path)
    responses = [make_response(i) for i in range(3)]
    store.append(responses)
    keys = [response.key for response in responses]
    assert [response.split for response in store.load(keys, splits={keys[1]: "heldout"})] == [
        "train",
        "heldout",
        "train",
    ]


def test_missing_responses_are_named(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path)
    store.append([make_response(1)])
    missing = make_response(2).key
    with pytest.raises(InputError, match=f"lacks 1 of 2 responses .*{missing[:16]}"):
        store.load([make_response(1).key, missing])


def test_broken_and_foreign_parts(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path)
    part = store.append([make_response(1)])
    assert part is not None
    whole, named = part.read_bytes(), part
    part = part.rename(tmp_path / "part-00000.parquet")  # as earlier versions named it: nothing to compare with
    for broken in (b"", whole[: len(whole) // 2], b"PAR1" + bytes(40) + b"PAR1"):
        part.write_bytes(broken)
        with pytest.raises(InputError, match=r"part-00000\.parquet cannot be read .* remove it"):
            ResponseStore(tmp_path).keys()
        part.rename(named)
        with pytest.raises(InputError, match=f"{named.name} has changed since it was written.* remove it"):
            ResponseStore(tmp_path).keys()
        named.rename(part)
    pq.write_table(pa.table({"key": ["a"]}), part)
    with pytest.raises(InputError, match=r"part-00000\.parquet has schema version none"):
        ResponseStore(tmp_path).keys()


def test_no_changed_bit_goes_unnoticed(tmp_path: Path) -> None:
    """Without a digest about a fifth of them change an id or a mask, and nothing else shows it."""
    part = ResponseStore(tmp_path).append([make_response(i, length=20) for i in range(4)])
    assert part is not None
    whole, draw = part.read_bytes(), random.Random(0)
    for bit in draw.sample(range(8 * len(whole)), 400):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        part.write_bytes(changed)
        with pytest.raises(InputError, match=part.name):
            ResponseStore(tmp_path).load()
    part.write_bytes(whole)
    assert len(ResponseStore(tmp_path).load()) == 4


def test_a_part_that_was_removed_is_made_again_alone(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path)
    first = store.append([make_response(1), make_response(2)])
    store.append([make_response(3)])
    assert first is not None
    first.unlink()
    assert ResponseStore(tmp_path).keys() == {make_response(3).key}


@pytest.mark.parametrize("dies_at", ["files.os.fsync", "files.os.replace"])
def test_death_at_each_step_of_writing_leaves_the_store_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    store = ResponseStore(tmp_path)
    store.append([make_response(1)])
    with monkeypatch.context() as patch:
        patch.setattr(f"spectrain.{dies_at}", die)
        with pytest.raises(Killed):
            store.append([make_response(2)])
    assert len(list(tmp_path.iterdir())) == 2  # the temporary file is left, as after a kill
    again = ResponseStore(tmp_path)
    assert again.keys() == {make_response(1).key}
    again.append([make_response(2)])
    assert [path.name[:10] for path in sorted(tmp_path.iterdir())] == ["part-00000", "part-00001"]
    assert len(again.load()) == 2


WRITER = """
    import sys
    from test_responses import make_response
    from spectrain.data.responses import ResponseStore
    store = ResponseStore(sys.argv[1])
    done = store.keys()
    for number in range(int(sys.argv[2])):
        if make_response(number).key not in done:
            store.append([make_response(number, length=2000)])
"""


@pytest.mark.slow
def test_killed_at_any_moment_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    """SIGKILL a process that appends without pause, three times, then let it finish."""
    total, moments, folder = 300, random.Random(0), tmp_path / "responses"
    script = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(total)]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(Path(__file__).parent)))}
    kept: set[str] = set()
    for _ in range(3):
        with subprocess.Popen(script, env=paths) as process:
            deadline = time.monotonic() + 120
            while len(list(folder.glob("part-*.parquet"))) <= len(kept) and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(moments.uniform(0.0, 0.05))
            process.send_signal(signal.SIGKILL)
        keys = ResponseStore(folder).keys()
        assert kept < keys
        kept = keys
    assert len(kept) < total  # the kills came in the midst of the work
    subprocess.run(script, env=paths, check=True)
    store = ResponseStore(folder)
    expected = [make_response(number, length=2000) for number in range(total)]
    assert contents(store.load([response.key for response in expected])) == contents(expected)
    rows = [key for path in folder.glob("*") for key in pq.ParquetFile(path).read(["key"])["key"].to_pylist()]
    assert sorted(rows) == sorted(response.key for response in expected)


def test_responses_are_counted_without_being_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a kill left in two parts counts once; those that nobody asked for do not count."""
    store = ResponseStore(tmp_path)
    made = [make_response(n, n + 1, finish_reason="length" if n % 3 == 0 else "stop") for n in range(9)]
    store.append(made[:4])
    store.append(made[4:])
    other = ResponseStore(tmp_path / "other")
    repeated = other.append([dataclasses.replace(made[2], loss_mask=np.ones(3, dtype=np.uint8)), made[5]])
    assert repeated is not None
    repeated.rename(tmp_path / repeated.name.replace("part-00000", "part-00002"))
    asked = [response for number, response in enumerate(made) if number not in (0, 7)]
    monkeypatch.setattr(ResponseStore, "load", lambda *_: pytest.fail("loads responses"))
    assert store.counts(Strings(response.key for response in asked)) == {
        "generated_tokens": sum(int(response.loss_mask.sum()) for response in asked),
        "tokens": sum(len(response.input_ids) for response in asked),
        "cut_off": sum(response.finish_reason == "length" for response in asked),
    }
    assert set(store.key_column()) == store.keys() == {response.key for response in made}
    assert store.counts(Strings()) == {"generated_tokens": 0, "tokens": 0, "cut_off": 0}


def test_responses_are_read_when_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spectrain.data.stored_responses._KEPT_PARTS", 1)
    store, lengths = ResponseStore(tmp_path), [4, 9, 4, 1, 12, 7]
    made = [make_response(number, length) for number, length in enumerate(lengths)]
    for part in (made[:2], made[2:5], made[5:]):
        store.append(part)
    keys = [made[number].key for number in (5, 0, 4, 2, 1)]
    asked = Asked.of(keys[:3], keys[3:])
    responses, splits = StoredResponses(store, asked), dict(asked.splits())
    assert contents(list(responses)) == contents(store.load(keys, splits))
    assert content(responses[-2]) == contents(responses[3:4])[0] == contents(store.load(keys, splits))[3]
    assert responses.lengths_D.tolist() == [7, 4, 12, 4, 9]
    assert [r.key for r in longest_first(responses)] == [r.key for r in longest_first(list(responses))]
    assert [len(r.input_ids) for r in longest_first(responses)] == [12, 9, 7, 4, 4]
    with pytest.raises(InputError, match="lacks 1 of 2 responses"):
        StoredResponses(store, Asked.of([made[3].key, "none"], []))
