"""The quickstart's workload (`data=support`): one kind of prompt, each written by itself.

Were they made from templates, a drafter would be measured on sentences it was trained on with other words filled in. So
beyond the one instruction that is the workload no two messages share a run of words, an opening, a number or a name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import pytest

from spectrain.config.loading import compose
from spectrain.data.prompts import Conversation, load_prompts, split_prompts

PROMPTS = Path(__file__).resolve().parents[2] / "data_gen" / "prompts"
INSTRUCTION = "Write a polite email that answers this message from a customer: "
# Capitalised inside a sentence without being somebody's or some place's name.
NO_NAMES = {"I", "I'm", "I've", "I'd", "Mr", "English", "VAT"}
DATES = {"Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "January"}


@pytest.fixture(scope="module")
def train() -> list[Conversation]:
    return load_prompts(PROMPTS / "support.jsonl")


@pytest.fixture(scope="module")
def heldout() -> list[Conversation]:
    return load_prompts(PROMPTS / "support_heldout.jsonl")


@pytest.fixture(scope="module")
def messages(train: list[Conversation], heldout: list[Conversation]) -> list[str]:
    return [conversation.turns[0].removeprefix(INSTRUCTION) for conversation in train + heldout]


def words(message: str) -> list[str]:
    return re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)?", message.casefold())


def runs(message: str, length: int) -> set[tuple[str, ...]]:
    found = words(message)
    return set(zip(*(found[start:] for start in range(length)), strict=False))


def repeated(features: Iterable[Iterable[object]]) -> dict[object, int]:
    """What more than one message has, and how many do."""
    counts = Counter(feature for of_one in features for feature in set(of_one))
    return {feature: count for feature, count in counts.items() if count > 1}


def test_sizes(train: list[Conversation], heldout: list[Conversation]) -> None:
    assert len(train) >= 320 and len(heldout) >= 40
    assert len({c.id for c in train + heldout}) == len(train) + len(heldout)
    data = compose(["recipe=quickstart"]).data
    split = split_prompts(data, [PROMPTS])
    assert (len(split.train), len(split.heldout)) == (len(train), len(heldout))  # none is in both, none is left out


def test_every_prompt_is_the_instruction_and_one_message(
    train: list[Conversation], heldout: list[Conversation]
) -> None:
    for conversation in train + heldout:
        assert len(conversation.turns) == 1 and conversation.system is None
        assert conversation.turns[0].startswith(INSTRUCTION)
        assert 3 < len(words(conversation.turns[0].removeprefix(INSTRUCTION))) < 50


def test_no_two_messages_share_a_template(messages: list[str]) -> None:
    """Words without digits, so that a template with its numbers swapped would be found, too."""
    assert repeated(runs(message, 4) for message in messages) == {}
    assert max(repeated(runs(message, 3) for message in messages).values()) <= 7
    bags = [set(words(message)) for message in messages]
    for i, j in combinations(range(len(bags)), 2):
        assert len(bags[i] & bags[j]) < 0.5 * len(bags[i] | bags[j]), (messages[i], messages[j])


def test_openings_differ(messages: list[str]) -> None:
    assert max(repeated([tuple(words(message)[:3])] for message in messages).values()) <= 4
    assert max(repeated([tuple(words(message)[:2])] for message in messages).values()) <= 12


def test_numbers_and_names_occur_once(messages: list[str]) -> None:
    assert repeated(re.findall(r"\d+", message) for message in messages) == {}
    names = [re.findall(r"(?<=[\w,] )[A-Z][\w']*", message) for message in messages]
    assert set(repeated(names)) <= NO_NAMES | DATES


def test_a_template_would_be_found() -> None:
    """The checks see what they are for."""
    one, other = "My kettle arrived with 2 cracks, Anna", "My toaster arrived with 3 dents, Anna"
    assert repeated(runs(message, 4) for message in (one, other)) == {}  # a short one slips through this check ...
    assert len(set(words(one)) & set(words(other))) >= 0.5 * len(
        set(words(one)) | set(words(other))
    )  # ... not this one
    assert repeated(runs(message, 4) for message in (one, "So my kettle arrived with a dent")) != {}
