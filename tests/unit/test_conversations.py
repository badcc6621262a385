"""Conversations under way, without a model: ids, masks, limits, seeds."""

from __future__ import annotations

import copy

import pytest
from tiny import tiny_tokenizer

from spectrain.data.chat import ChatTemplate
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Sampling
from spectrain.engines.conversations import Dialogue, Turns
from spectrain.errors import InputError

END = tiny_tokenizer().convert_tokens_to_ids("<|im_end|>")
OTHER_END = 300


def sampling(limit: int = 5, seed: int = 7) -> Sampling:
    return Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=limit, seed=seed)


def turns(max_length: int = 200, limit: int = 5) -> Turns[Dialogue]:
    return Turns(
        Dialogue, ChatTemplate(tiny_tokenizer(), [END, OTHER_END]), [END, OTHER_END], sampling(limit), max_length
    )


def conversation(*texts: str, **fields: object) -> Conversation:
    return Conversation(id="c", turns=texts, **fields)  # type: ignore[arg-type]


def answer(course: Turns[Dialogue], dialogue: Dialogue, *tokens: int) -> None:
    course.begin(dialogue)
    for token in tokens:
        assert not dialogue.finish_reason
        dialogue.commit(token, course.end_ids)


def test_two_turns_are_the_rendered_prompts_around_the_generated_ids() -> None:
    course = turns()
    (dialogue,) = course.prepare([(conversation("one", "two"), "train")], ["k"])
    first_prompt = list(dialogue.ids)
    answer(course, dialogue, 10, 11, END)
    assert not course.is_last(dialogue)
    assert course.advance(dialogue)
    assert course.is_last(dialogue)
    answer(course, dialogue, 12, 13, 14, 15, 16)
    assert not course.advance(dialogue)
    assert dialogue.ids[: len(first_prompt) + 3] == [*first_prompt, 10, 11, END]
    text = tiny_tokenizer().decode(dialogue.ids[len(first_prompt) + 3 : -5])
    assert text == "\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    response = dialogue.response(sampling())
    assert response.finish_reason == "length"
    assert response.input_ids[response.loss_mask == 1].tolist() == [10, 11, END, 12, 13, 14, 15, 16]
    assert (response.split, response.key) == ("train", "k")


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_an_end_token_stops_even_as_the_last_token_of_the_limit(end: int) -> None:
    course = turns(limit=2)
    (dialogue,) = course.prepare([(conversation("one"), "train")], ["k"])
    answer(course, dialogue, 10, end)
    assert dialogue.finish_reason == "stop"


def test_a_cut_answer_ends_its_conversation() -> None:
    course = turns(limit=2)
    (dialogue,) = course.prepare([(conversation("one", "two"), "train")], ["k"])
    answer(course, dialogue, 10, 11)
    length = len(dialogue.ids)
    assert dialogue.finish_reason == "length"
    assert not course.advance(dialogue)
    assert len(dialogue.ids) == length


def test_a_turn_may_use_what_the_document_has_left_and_no_more() -> None:
    first = len(turns().prepare([(conversation("one", "two"), "train")], ["k"])[0].ids)
    (dialogue,) = (course := turns(max_length=first + 3)).prepare([(conversation("one", "two"), "train")], ["k"])
    course.begin(dialogue)
    assert dialogue.room == 3
    answer(course, dialogue, 10, END)
    assert not course.advance(dialogue)  # no room for the second prompt
    assert len(dialogue.ids) == first + 2


@pytest.mark.parametrize(("spare", "fits"), [(0, False), (1, True)])
def test_a_next_prompt_that_leaves_no_room_for_an_answer_is_not_appended(spare: int, fits: bool) -> None:
    (whole,) = (course := turns()).prepare([(conversation("one", "two"), "train")], ["k"])
    answer(course, whole, 10, END)
    assert course.advance(whole)
    (dialogue,) = (course := turns(max_length=len(whole.ids) + spare)).prepare(
        [(conversation("one", "two"), "train")], ["k"]
    )
    answer(course, dialogue, 10, END)
    assert course.advance(dialogue) is fits


def test_a_prompt_without_room_is_named() -> None:
    first = len(turns().prepare([(conversation("one"), "train")], ["k"])[0].ids)
    turns(max_length=first + 1).prepare([(conversation("one"), "train")], ["k"])
    with pytest.raises(InputError, match="prompt c is too long"):
        turns(max_length=first).prepare([(conversation("one"), "train")], ["k"])


def test_the_seed_of_a_turn_depends_on_seed_prompt_and_turn_alone() -> None:
    def seed(text: str = "a", turn: int = 0, seed: int = 0, identity: str = "c") -> int:
        return Dialogue(Conversation(id=identity, turns=(text, "b")), "train", "k", [1], [0], turn=turn).turn_seed(seed)

    assert seed() == seed(identity="another name")
    assert len({seed(), seed("b"), seed(turn=1), seed(seed=1)}) == 4
    assert all(0 <= seed(str(number)) < 1 << 63 for number in range(50))


# Documents of a conversation


def test_a_turn_after_another_end_token_is_a_document_of_its_own() -> None:
    course = turns()
    (dialogue,) = course.prepare([(conversation("one", "two", "three"), "heldout")], ["k"])
    first_prompt = list(dialogue.ids)
    answer(course, dialogue, 10, 11, OTHER_END)
    assert course.advance(dialogue)
    second_prompt = list(dialogue.ids)
    answer(course, dialogue, 12, END)
    assert course.advance(dialogue)
    answer(course, dialogue, 13, END)
    further, first = dialogue.responses(sampling())  # the conversation's own key comes last
    assert (first.key, further.key) == ("k", "k-2")
    assert (first.finish_reason, further.finish_reason, further.split) == ("stop", "stop", "heldout")
    assert first.input_ids.tolist() == [*first_prompt, 10, 11, OTHER_END]
    tokenizer = tiny_tokenizer()
    shown = [("user", "one"), ("assistant", tokenizer.decode([10, 11])), ("user", "two")]
    expected = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in shown], add_generation_prompt=True, return_dict=False
    )
    assert second_prompt == expected
    assert further.input_ids[: len(expected)].tolist() == expected
    assert further.input_ids[further.loss_mask == 1].tolist() == [12, END, 13, END]


@pytest.mark.parametrize(("spare", "fits"), [(0, False), (1, True)])
def test_a_document_of_its_own_needs_room_for_itself_alone(spare: int, fits: bool) -> None:
    (whole,) = (course := turns()).prepare([(conversation("one", "two"), "train")], ["k"])
    answer(course, whole, 10, OTHER_END)
    assert course.advance(whole)
    course = turns(max_length=len(whole.ids) + spare)
    (dialogue,) = course.prepare([(conversation("one", "two"), "train")], ["k"])
    answer(course, dialogue, 10, OTHER_END)
    assert course.advance(dialogue) is fits
    assert len(dialogue.responses(sampling())) == 1 + fits


def test_an_answer_that_the_template_rejects_ends_its_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    said = tokenizer.decode([10, 11])
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if message['content'] == '"
        + said
        + "' %}{{ raise_exception('no') }}{% endif %}",
    )
    course = Turns(Dialogue, ChatTemplate(tokenizer, [END]), [END], sampling(), 200)
    for _ in range(2):
        (dialogue,) = course.prepare([(conversation("one", "two"), "train")], ["k"])
        answer(course, dialogue, 10, 11, END)
        assert not course.advance(dialogue)
        assert [response.finish_reason for response in dialogue.responses(sampling())] == ["stop"]
    assert capsys.readouterr().err.count("rejects this conversation (no)") == 1


def test_imported_conversations_are_cut_where_the_template_rewrites_them() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message['content'] }}", "{{ message['content'] if loop.last else message['content'].split('=')[-1] }}"
    )
    template = ChatTemplate(tokenizer, [END])
    thinking = conversation("one", "two", answers=("because=1", "because=2"))
    course = Turns(Dialogue, template, [END], sampling(), 200)
    (dialogue,) = course.prepare([(thinking, "train")], ["k"])
    found = {response.key: response for response in dialogue.responses(sampling())}
    assert list(found) == ["k-2", "k"]
    for key, turn in (("k", 0), ("k-2", 1)):
        response = found[key]
        assert response.finish_reason == "imported"
        assert tokenizer.decode(response.input_ids[response.loss_mask == 1]) == f"because={turn + 1}<|im_end|>"
        assert ("because=1" in tokenizer.decode(response.input_ids)) == (turn == 0)
    # The second document needs more room than the first one, which alone is kept where there is none.
    short = Turns(Dialogue, template, [END], sampling(), len(found["k"].input_ids))
    (dialogue,) = short.prepare([(thinking, "train")], ["k"])
    assert [response.key for response in dialogue.responses(sampling())] == ["k"]
