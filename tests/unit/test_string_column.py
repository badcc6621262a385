"""Many strings in one block of memory, and the documents that are asked for: as lists and dicts have them."""

from __future__ import annotations

import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.data.asked_documents import Asked
from spectrain.data.responses import further_documents
from spectrain.data.string_column import Strings
from spectrain.files import digest_strings

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=30)


@settings(max_examples=60, deadline=None)
@given(texts, texts)
def test_strings_are_a_list(some: list[str], wanted: list[str]) -> None:
    strings = Strings(some)
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


def test_the_digest_of_many_is_that_of_their_list() -> None:
    many = [f"{number:05x}" for number in range(40_000)]
    assert Asked.of(many[9:], many[:9]).digest == digest_strings(
        [(key, "train") for key in many[9:]] + [(key, "heldout") for key in many[:9]]
    )
