"""What a document shows before an answer is, id for id, what a chat server would show: the template's rendering of the
conversation so far, with earlier answers as the text that a server returns.

The reference is ``apply_chat_template`` of transformers, which vLLM's chat endpoint calls, too (tests/vllm asks it).
"""

from __future__ import annotations

from typing import Any

import pytest
from test_chat import END_OF_TURN, STYLES, TURNS, encode, make_template, make_tokenizer, supervised_texts
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from spectrain.data.chat import ChatTemplate
from spectrain.data.prompts import Conversation
from spectrain.errors import InputError

CHAT = Conversation(id="c", turns=TURNS[:2], source="file.jsonl:7")
THINKING = "<think>\nTwo and two.\n</think>\n\n4."


def served(tokenizer: Any, turns: tuple[str, ...], answers: tuple[str, ...], **more: Any) -> list[int]:
    """The ids that a server makes of these turns and answers, up to the next answer or to the end."""
    messages = []
    for number, turn in enumerate(turns[: len(answers) + 1]):
        messages.append({"role": "user", "content": turn})
        if number < len(answers):
            messages.append({"role": "assistant", "content": answers[number]})
    asks = len(turns) > len(answers)
    return tokenizer.apply_chat_template(  # type: ignore[no-any-return]
        messages, tokenize=True, add_generation_prompt=asks, return_dict=False, **more
    )


def second_prompt(template: ChatTemplate, generated: str) -> tuple[list[int], bool]:
    """All ids before the second answer, after the first was ``generated`` (its end token included); whether the
    document goes on.
    """
    prompt = template.first_prompt_ids(CHAT)
    ids = prompt + encode(template, generated)
    text = template.answer_text(ids, len(prompt))
    following = template.next_prompt(CHAT, [text], ids)
    return ids * following.continues + following.ids, following.continues


def plain(template: ChatTemplate, generated: str) -> str:
    """The text that a server returns: no special tokens."""
    return str(template.tokenizer.decode(encode(template, generated), skip_special_tokens=True))


ALWAYS = {"chatml", "llama3", "gemma", "qwen3", "glm"}  # templates that close an answer with the token that ends it
GENERATED = {  # what the target generates before its end token -> the templates that show it just so
    "4.": ALWAYS,
    "": ALWAYS,
    "Four,\n\n  or „vier“ 🙂.": ALWAYS,
    " 4.": {"chatml", "qwen3", "glm"},  # the others trim
    "4.\n\n": {"chatml", "qwen3", "glm"},
    THINKING: ALWAYS - {"qwen3"},
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("text", GENERATED)
def test_a_further_turn_is_as_served(style: str, text: str) -> None:
    template = make_template(style)
    ids, continues = second_prompt(template, text + END_OF_TURN[style])
    assert ids == served(template.tokenizer, CHAT.turns, (text,))
    assert continues == (style in GENERATED[text])


OTHER_ENDS = {
    "chatml": "<|endoftext|>",
    "llama3": "<|begin_of_text|>",
    "gemma": "<eos>",
    "qwen3": "<|endoftext|>",
    "mistral": "<s>",
    "glm": "<|endoftext|>",
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("inside", [False, True])
def test_another_end_token_and_special_tokens_inside_are_not_shown(style: str, inside: bool) -> None:
    template = make_template(style)
    other = OTHER_ENDS[style]
    generated = f"4{other}.{END_OF_TURN[style]}" if inside else f"4.{other}"
    ids, continues = second_prompt(template, generated)
    assert not continues
    assert ids == served(template.tokenizer, CHAT.turns, ("4.",))
    role = {"gemma": "<start_of_turn>user", "mistral": "[INST]", "glm": "<|user|>", "llama3": "<|eot_id|>"}
    assert template.tokenizer.decode(ids).count(role.get(style, "<|im_end|>\n<|im_start|>user")) >= 1


def test_a_character_that_is_cut_at_the_end_is_not_returned() -> None:
    template = make_template("chatml")
    prompt = template.first_prompt_ids(CHAT)
    smile = [*encode(template, "4 "), *encode(template, "🙂")[:-1]]
    end = template.tokenizer.eos_token_id
    text = template.answer_text([*prompt, *smile, end], len(prompt))
    assert text == "4 "
    following = template.next_prompt(CHAT, [text], [*prompt, *smile, end])
    assert (following.ids, following.continues) == (served(template.tokenizer, CHAT.turns, ("4 ",)), False)


def test_a_template_that_hides_or_moves_earlier_answers() -> None:
    tokenizer = make_tokenizer("chatml")
    for text in ("{{ messages[-1]['content'] }}<|im_end|>", "{{ messages | length }}{{ messages[-1]['content'] }}"):
        tokenizer.chat_template = text
        ids, continues = second_prompt(ChatTemplate(tokenizer), "4.<|im_end|>")
        assert not continues
        assert ids == served(tokenizer, CHAT.turns, ("4.",))


# Tokenizers that put something before a text


def prefixing_tokenizer(kind: str, end: str = "</s>") -> PreTrainedTokenizerFast:
    """BPE that writes a blank before every text, or BOS unless it is told not to add special tokens."""
    special = ["<s>", "</s>", "<unk>", "[INST]", "[/INST]"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    if kind == "byte level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=kind)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "byte level" else list("▁\n<>|:.,?!=+")
    corpus = [*TURNS, "User Assistant 4. Four, or vier.", "\n\n", "▁a b c"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=end, unk_token="<unk>")


# Answers between text, between special tokens, and closed by nothing: what is encoded alone would get a blank.
PREFIX_TEMPLATES = {
    "text": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% else %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "special": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "no end": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}
KINDS = ["always", "first", "byte level", "normalizer"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", PREFIX_TEMPLATES)
def test_neither_blank_nor_bos_is_doubled(kind: str, shape: str) -> None:
    tokenizer = prefixing_tokenizer(kind)
    tokenizer.chat_template = PREFIX_TEMPLATES[shape]
    template = ChatTemplate(tokenizer)
    prompt = template.first_prompt_ids(CHAT)
    assert prompt == served(tokenizer, CHAT.turns, ())
    assert prompt.count(tokenizer.bos_token_id) == ("bos_token" in PREFIX_TEMPLATES[shape])
    # The target goes on where its prompt ends: the tokens are those of the whole text, not of the answer alone.
    whole = encode(template, tokenizer.decode(prompt) + "4. Four,")
    generated = [*whole[len(prompt) :], tokenizer.eos_token_id]
    if whole[: len(prompt)] != prompt:
        generated = [*encode(template, "4. Four,"), tokenizer.eos_token_id]
    text = template.answer_text(prompt + generated, len(prompt))
    following = template.next_prompt(CHAT, [text], prompt + generated)
    expected = served(tokenizer, CHAT.turns, (text,))
    if following.continues:
        assert expected[-len(following.ids) - 1 :] == [tokenizer.eos_token_id, *following.ids]
        assert tokenizer.decode(prompt + generated + following.ids) == tokenizer.decode(expected)
    else:
        assert following.ids == expected
    # After a special token this normalizer's blank is one of the text, which comes twice once it is encoded anew.
    assert following.continues == (shape != "no end" and (shape, kind) != ("special", "normalizer"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", PREFIX_TEMPLATES)
def test_imported_answers_follow_their_prompts_without_a_blank(kind: str, shape: str) -> None:
    tokenizer = prefixing_tokenizer(kind)
    tokenizer.chat_template = PREFIX_TEMPLATES[shape]
    template = ChatTemplate(tokenizer)
    answers = ("4. Four,", "\n\nvier.")
    whole = Conversation(id="c", turns=CHAT.turns, answers=answers)
    ids, mask = template.render_answered(whole)
    assert tokenizer.decode(ids) == tokenizer.decode(served(tokenizer, whole.turns, answers))
    first = served(tokenizer, whole.turns, ())
    assert ids[: len(first)] == first
    assert mask[: len(first)] == [0] * len(first) and mask[len(first)] == 1
    texts = [text.removesuffix("</s>").strip() for text in supervised_texts(template, ids, mask)]
    assert texts == [answer.strip() for answer in answers]


# Contents in parts, and what no template shows


PARTS = "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"


def test_templates_that_walk_over_parts_are_given_parts() -> None:
    """As vLLM does; a plain text would vanish."""
    tokenizer = make_tokenizer("chatml")
    frame = "{{% for message in messages %}}<|im_start|>{{{{ message['role'] }}}}\n{}<|im_end|>\n{{% endfor %}}"
    both = "{% if message['content'] is string %}{{ message['content'] }}{% else %}" + PARTS + "{% endif %}"
    expected = None
    for content in ("{{ message['content'] }}", both, PARTS):
        tokenizer.chat_template = frame.format(content)
        ids = ChatTemplate(tokenizer).first_prompt_ids(CHAT)
        assert tokenizer.decode(ids) == f"<|im_start|>user\n{TURNS[0]}<|im_end|>\n"
        assert expected in (None, ids)
        expected = ids


def test_targets_whose_turns_the_template_does_not_show_as_served_are_refused() -> None:
    """vLLM renders gpt-oss by the Harmony format."""
    tokenizer = make_tokenizer("chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|channel|>"]})
    template = ChatTemplate(tokenizer)
    template.first_prompt_ids(Conversation(id="c", turns=("one",)))
    with pytest.raises(InputError, match=r"file\.jsonl:7: .*Harmony.* single-turn"):
        template.first_prompt_ids(CHAT)


# Imported conversations


def documents(template: ChatTemplate, answers: tuple[str, ...]) -> list[tuple[int, list[int], list[str]]]:
    whole = Conversation(id="c", turns=TURNS[: len(answers)], answers=answers)
    found = template.answered_documents(whole)
    return [(d.first_turn, d.ids, supervised_texts(template, d.ids, d.mask)) for d in found]


def test_thinking_of_earlier_turns_cuts_a_conversation_into_documents() -> None:
    template = make_template("qwen3")
    answers = (THINKING, "Four.", "<think>\nPolite.\n</think>\n\nWelcome!")
    found = documents(template, answers)
    assert [first for first, _, _ in found] == [0, 1]
    assert [texts for _, _, texts in found] == [
        [THINKING + "<|im_end|>"],
        ["Four.<|im_end|>", answers[2] + "<|im_end|>"],
    ]
    for (_, ids, _), count in zip(found, (1, 3), strict=True):
        assert ids == served(template.tokenizer, TURNS[:count], answers[:count])
    second = served(template.tokenizer, TURNS[:2], answers[:1])
    assert found[1][1][: len(second)] == second
    assert "Two and two" not in template.tokenizer.decode(second)


def test_every_turn_thinks() -> None:
    template = make_template("qwen3")
    answers = tuple(f"<think>\n{number}\n</think>\n\nAnswer {number}." for number in range(3))
    found = documents(template, answers)
    assert [(first, texts) for first, _, texts in found] == [
        (turn, [answer + "<|im_end|>"]) for turn, answer in enumerate(answers)
    ]
    for turn, (_, ids, _) in enumerate(found):
        assert ids == served(template.tokenizer, TURNS[: turn + 1], answers[: turn + 1])


@pytest.mark.parametrize("style", STYLES)
def test_conversations_that_no_template_rewrites_stay_whole(style: str) -> None:
    assert [first for first, _, _ in documents(make_template(style), ("4.", "Four.", "Welcome!"))] == [0]
