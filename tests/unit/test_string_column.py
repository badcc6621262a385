"""Many strings in one block of memory, and the documents that are asked for: as lists and dicts have them."""

from __future__ import annotations

import hashlib
import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.data.asked_documents import Asked
from spectrain.data.responses import further_documents
from spectrain.data.string_column import Strings
from spectrain.files import digest_strings

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=30)
# Keys: many begin alike, differ in one digit at either end, or are no digests after all.
_hexadecimal = st.builds(
    lambda start, middle, end: f"{start}{middle * 62}{end}", *(st.sampled_from(some) for some in ("0af", "9a", "0af"))
)
_digests = st.lists(_hexadecimal, max_size=30)
_mixed = st.lists(st.one_of(_hexadecimal, st.builds("{}-2".format, _hexadecimal), st.just("A" * 64)), max_size=12)
columns = st.one_of(texts, _digests, _mixed)


@settings(max_examples=80, deadline=None)
@given(columns, columns)
def test_strings_are_a_list(some: list[str], wanted: list[str]) -> None:
    strings = Strings(some)
    assert strings.array.to_pylist() == some
    assert Strings.joined([strings, Strings(wanted)]) == some + wanted
    assert all(strings.containing(part) == [one for one in some if part in one] for part in ("-", "a0", "é"))
    assert strings == some and list(strings) == some and len(strings) == len(some)
    assert [strings[i] for i in range(-len(some), len(some))] == some * 2
    assert strings[1:] == some[1:] and strings[::-2] == some[::-2]
    assert strings.take(strings.order()) == sorted(some)
    assert strings.places_of(Strings(wanted)).tolist() == [some.index(w) if w in some else -1 for w in wanted]
    assert strings.hold(Strings(wanted)) == (set(wanted) <= set(some))
    assert pickle.loads(pickle.dumps(strings)) == some
    assert (strings == wanted) == (some == wanted)


keys = st.lists(st.sampled_from([f"k{number}" for number in range(12)]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(keys, keys, st.lists(st.tuples(st.integers(0, 11), st.integers(2, 11)), max_size=12))
def test_what_is_asked_for_is_what_a_dict_of_splits_says(
    train: list[str], heldout: list[str], further: list[tuple[int, int]]
) -> None:
    splits = {key: split for split, some in (("train", train), ("heldout", heldout)) for key in some}
    asked = Asked.of(train, heldout)
    assert list(asked.splits()) == list(splits.items())
    stored = [f"k{number}-{turn}" for number, turn in dict.fromkeys(further)] + list(splits)
    found = further_documents(stored)
    wanted = {document: split for key, split in splits.items() for document in (key, *found.get(key, ()))}
    whole = asked.with_further(Strings(stored))
    assert list(whole.splits()) == list(wanted.items())
    assert whole.digest == digest_strings(list(wanted.items()))


def test_keys_take_32_bytes_each_and_are_found_among_many() -> None:
    known = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(40_000)]
    strings = Strings(known[:30_000])
    assert len(pickle.dumps(strings)) < 33 * 30_000
    assert strings.places_of(Strings(known[::-1])).tolist() == [-1] * 10_000 + list(range(30_000))[::-1]
    assert strings.take(strings.order()) == sorted(known[:30_000])


def test_the_digest_of_many_is_that_of_their_list() -> None:
    many = [f"{number:05x}" for number in range(40_000)]
    assert Asked.of(many[9:], many[:9]).digest == digest_strings(
        [(key, "train") for key in many[9:]] + [(key, "heldout") for key in many[:9]]
    )
