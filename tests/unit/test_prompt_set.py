"""The varied prompts (`data=varied`): enough, balanced, and none of them held out and trained on at once."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from spectrain.config.data_schema import DataConfig
from spectrain.data.prompts import Conversation, load_prompts, split_prompts

PROMPTS = Path(__file__).resolve().parents[2] / "data_gen" / "prompts"
CATEGORIES = {"math", "code", "chat", "extraction", "rewriting"}
# Frequent words of each language, none of which is frequent in another.
MARKERS = {
    "en": "the of is are to and what how why this these it with that who which or as each write turn label solve "
    "convert give",
    "de": "der die das den und ein eine einem einen ist wie für ich wir warum dieser macht mit um zu ins wann welche "
    "alle kann von "
    "nach nenne setze schreibe mache korrigiere formuliere",
    "fr": "le la les une est et des de cette ce combien pour quelle quels que vous donne écris comment corrige pas à "
    "en",
}


@pytest.fixture(scope="module")
def train() -> list[Conversation]:
    return load_prompts(PROMPTS / "varied.jsonl")


@pytest.fixture(scope="module")
def heldout() -> list[Conversation]:
    return load_prompts(PROMPTS / "varied_heldout.jsonl")


def words(conversation: Conversation) -> list[str]:
    """Lower-case words without accents, digits or punctuation: what stays equal when only the numbers of a template are
    swapped.
    """
    text = unicodedata.normalize("NFKD", " ".join(conversation.turns)).casefold()
    return re.findall(r"[a-z]+", "".join(c for c in text if not unicodedata.combining(c)))


def shingles(conversation: Conversation) -> set[tuple[str, ...]]:
    found = words(conversation)
    return set(zip(found, found[1:], found[2:], strict=False)) or {tuple(found)}


def similarity(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    return len(one & other) / len(one | other)


def language(conversation: Conversation) -> str:
    return conversation.id.removeprefix("heldout-").split("-")[1]


def test_enough_prompts_in_even_categories_and_three_languages(train, heldout):
    assert len(train) >= 300
    assert len(heldout) == 40
    for conversations in (train, heldout):
        categories = Counter(c.domain for c in conversations)
        assert set(categories) == CATEGORIES
        assert max(categories.values()) - min(categories.values()) <= len(conversations) // 20
        shares = {name: count / len(conversations) for name, count in Counter(map(language, conversations)).items()}
        assert set(shares) == {"en", "de", "fr"}
        assert 0.6 <= shares["en"] <= 0.7
        assert min(shares["de"], shares["fr"]) >= 0.15


def test_ids_say_category_and_language(train, heldout):
    for conversation in train + heldout:
        assert re.fullmatch(rf"(heldout-)?{conversation.domain}-(en|de|fr)-\d{{3}}", conversation.id)
        assert conversation.language == language(conversation)
    assert len({c.id for c in train + heldout}) == len(train) + len(heldout)


def test_prompts_are_in_the_language_of_their_id(train, heldout):
    for conversation in train + heldout:
        found = re.findall(r"[^\W\d_]+", " ".join(conversation.turns).casefold())
        hits = {name: sum(word in markers.split() for word in found) for name, markers in MARKERS.items()}
        own = hits.pop(language(conversation))
        assert own > max(hits.values()), conversation


def test_prompts_are_short_and_some_have_two_turns_or_a_system_prompt(train, heldout):
    for conversations in (train, heldout):
        lengths = [sum(len(turn.split()) for turn in c.turns) for c in conversations]
        assert max(lengths) < 80
        assert sum(length < 60 for length in lengths) > 0.9 * len(lengths)
        assert 0.02 < sum(len(c.turns) == 2 for c in conversations) / len(conversations) < 0.2
        assert 0.02 < sum(c.system is not None for c in conversations) / len(conversations) < 0.2


def test_no_prompt_resembles_another(train, heldout):
    """Not even with its numbers swapped; and training prompts resemble held-out ones still less."""
    trained, held = [shingles(c) for c in train], [shingles(c) for c in heldout]
    for group, conversations in ((trained, train), (held, heldout)):
        for i, j in combinations(range(len(group)), 2):
            assert similarity(group[i], group[j]) < 0.5, (conversations[i].id, conversations[j].id)
    for i, one in enumerate(trained):
        for j, other in enumerate(held):
            assert similarity(one, other) < 0.3, (train[i].id, heldout[j].id)


def test_the_split_keeps_them_all(train, heldout):
    split = split_prompts(DataConfig(train=("varied",), heldout=("varied_heldout",)), [PROMPTS])
    assert (len(split.train), len(split.heldout)) == (len(train), len(heldout))
