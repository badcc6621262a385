"""Chat templates: what is supervised is what the target produces, in the styles of several model families.

Each style is written after the published template of its family. The tokenizers are small byte-level ones, whose ids
can be read back as text.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from spectrain.data.chat import ChatTemplate
from spectrain.data.prompts import Conversation
from spectrain.errors import InputError
from spectrain.target.spec import end_token_ids

CHATML = (  # with a default system prompt, as SmolLM2's
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\n"
    "Be helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (  # no system role; the turn ends with a token that is not the tokenizer's end token
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% "
    "endif %}"
    "{% for message in messages %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% "
    "endif %}"
)
QWEN3 = (  # thinking is kept after the last user turn only, where an empty block stands for none
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% set parts = message.content.split('</think>') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "<|im_start|>assistant\n{% if loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ "
    "parts[-1].lstrip('\n') }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (  # the space before the answer belongs to the template, the answer's end is the tokenizer's end token
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} "
    "[/INST]"
    "{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
GLM = (  # nothing ends the answer but the next role, which is an end token of the model
    "[gMASK]{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIAL = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), "<|endoftext|>", "<|im_end|>"),
    "llama3": (
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "gemma": (GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>"),
    "qwen3": (QWEN3, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), "<|endoftext|>", "<|im_end|>"),
    "mistral": (MISTRAL, ("<s>", "</s>"), "<s>", "</s>"),
    "glm": (
        GLM,
        ("<|endoftext|>", "[gMASK]", "<|system|>", "<|user|>", "<|assistant|>"),
        "<|endoftext|>",
        "<|endoftext|>",
    ),
}
END_OF_TURN = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "qwen3": "<|im_end|>",
    "mistral": "</s>",
    "glm": "<|user|>",
}
STYLES = list(SPECIAL)
MODERN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
TURNS = ("What is 2 + 2?", "And in words?\n\n<b>Please</b>", "Thanks.")
ANSWERS = ("4.", "Four,\n\n  or „vier“ 🙂.", "You are welcome!")


def make_tokenizer(style: str, trim_offsets: bool = False, modern: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges include runs of blanks and line feeds. ``modern``: split like Llama 3 and Qwen, else
    like GPT-2.
    """
    template, special, bos, eos = SPECIAL[style]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(MODERN_SPLIT), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([split, bytes_only]) if modern else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["user assistant model system", "x\n\nx\n\nx\n\n\nx    x    x        x", *TURNS, *ANSWERS], trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=template)


def make_template(style: str, trim_offsets: bool = False) -> ChatTemplate:
    tokenizer = make_tokenizer(style, trim_offsets)
    ends = {"glm": GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>"]))}
    return ChatTemplate(tokenizer, end_token_ids(tokenizer, ends.get(style)))


def encode(template: ChatTemplate, text: str) -> list[int]:
    return template.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


def rendered(template: ChatTemplate, conversation: Conversation) -> list[int]:
    """The whole conversation by transformers alone."""
    chat: list[dict[str, Any]] = (
        [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    )
    for turn, answer in zip(conversation.turns, conversation.answers or (), strict=True):
        chat += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return template.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)  # type: ignore[no-any-return]


def supervised_texts(template: ChatTemplate, ids: list[int], mask: list[int]) -> list[str]:
    runs: list[list[int]] = []
    for position, (token, counts) in enumerate(zip(ids, mask, strict=True)):
        if counts and (position == 0 or not mask[position - 1]):
            runs.append([])
        if counts:
            runs[-1].append(token)
    return [template.tokenizer.decode(run) for run in runs]


def conversation(turns: int = 3, system: str | None = None, answers: tuple[str, ...] | None = ANSWERS) -> Conversation:
    return Conversation(
        id="c", turns=TURNS[:turns], system=system, answers=answers and answers[:turns], source="file.jsonl:7"
    )


# Prompts to be answered


@pytest.mark.parametrize("style", STYLES)
def test_first_prompt_is_the_generation_prompt_of_the_template(style: str) -> None:
    template = make_template(style)
    for system in (None, "Be brief.") if style != "gemma" else (None,):
        chat = [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": TURNS[0]}]
        expected = template.tokenizer.apply_chat_template(
            chat, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert template.first_prompt_ids(conversation(system=system, answers=None)) == expected


NEXT_PROMPTS = {
    "chatml": "\n<|im_start|>user\nAnd in words?\n\n<b>Please</b><|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>user<|end_header_id|>\n\nAnd in words?\n\n<b>Please</b><|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "\n<start_of_turn>user\nAnd in words?\n\n<b>Please</b><end_of_turn>\n<start_of_turn>model\n",
    "qwen3": "\n<|im_start|>user\nAnd in words?\n\n<b>Please</b><|im_end|>\n<|im_start|>assistant\n",
    "mistral": "[INST] And in words?\n\n<b>Please</b> [/INST]",
    "glm": "\nAnd in words?\n\n<b>Please</b><|assistant|>\n",
}


@pytest.mark.parametrize("style", STYLES)
def test_next_prompt_continues_after_the_end_token(style: str) -> None:
    template = make_template(style)
    prompt = template.first_prompt_ids(conversation())
    # Mistral's template puts a blank before the answer that the target did not generate.
    text = " anything" if style == "mistral" else "anything"
    so_far = prompt + encode(template, text + END_OF_TURN[style])
    assert template.answer_text(so_far, len(prompt)) == text
    following = template.next_prompt(conversation(answers=None), [text.strip()], so_far)
    if style == "mistral":
        assert not following.continues
        assert template.tokenizer.decode(following.ids[len(so_far) :]) == NEXT_PROMPTS[style]
        return
    assert following.continues
    assert template.tokenizer.decode(following.ids) == NEXT_PROMPTS[style]
    assert following.ids == encode(template, NEXT_PROMPTS[style])


def test_nothing_follows_a_truncated_answer() -> None:
    template = make_template("chatml")
    prompt = template.first_prompt_ids(conversation())
    for truncated in ([], prompt, encode(template, "4 and")):
        with pytest.raises(ValueError, match="truncated"):
            template.next_prompt(conversation(), ["4 and"], truncated)


def test_the_placeholder_is_no_word_of_the_conversation() -> None:
    template = make_template("chatml")
    tricky = Conversation(
        id="c", turns=("placeholder", "placeholderx placeholder"), answers=("a placeholder", "placeholderxx")
    )
    assert supervised_texts(template, *template.render_answered(tricky)) == [
        "a placeholder<|im_end|>",
        "placeholderxx<|im_end|>",
    ]


# Conversations that have answers


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_answers_and_their_end_tokens_are_supervised_and_nothing_else(style: str, trim_offsets: bool) -> None:
    template = make_template(style, trim_offsets)
    ids, mask = template.render_answered(conversation())
    assert ids == rendered(template, conversation())
    expected = [answer + END_OF_TURN[style] for answer in ANSWERS]
    if style == "glm":  # after the last answer nothing follows
        expected[-1] = ANSWERS[-1]
    # Mistral's template has a blank before the answer, which may be in one token with the first word.
    assert [text.removeprefix(" ") for text in supervised_texts(template, ids, mask)] == expected


@pytest.mark.parametrize("style", ["chatml", "llama3", "gemma", "glm"])
def test_importing_equals_generating_the_same_answers(style: str) -> None:
    """The two roads to a document meet: mask by ids as they are generated, mask by prefixes of the rendering."""
    template = make_template(style)
    whole = conversation()
    ids, mask = template.first_prompt_ids(whole), [0] * len(template.first_prompt_ids(whole))
    for turn, answer in enumerate(ANSWERS):
        if turn > 0:
            following = template.next_prompt(whole, ANSWERS[:turn], ids)
            assert following.continues
            ids, mask = ids + following.ids, mask + [0] * len(following.ids)
        generated = encode(template, answer + END_OF_TURN[style])
        ids, mask = ids + generated, mask + [1] * len(generated)
    imported_ids, imported_mask = template.render_answered(whole)
    length = min(len(ids), len(imported_ids))
    assert length >= len(ids) - (style == "glm")
    assert (imported_ids[:length], imported_mask[:length]) == (ids[:length], mask[:length])
    assert sum(imported_mask[length:]) == 0


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_white_space_around_an_answer(trim_offsets: bool) -> None:
    answers = ("\n\n    indented", "blanks at the end    ")
    whole = Conversation(id="c", turns=TURNS[:2], answers=answers)
    kept, trimmed = make_template("chatml", trim_offsets), make_template("llama3", trim_offsets)
    ids, mask = kept.render_answered(whole)
    assert supervised_texts(kept, ids, mask) == [answer + "<|im_end|>" for answer in answers]
    # The tokenizer would merge the prompt's last line feed with the answer's first; a server's prompt ends before.
    prompt = kept.first_prompt_ids(whole)
    assert ids[: len(prompt)] == prompt
    assert rendered(kept, whole)[: len(prompt)] != prompt
    assert supervised_texts(trimmed, *trimmed.render_answered(whole)) == [
        answer.strip() + "<|eot_id|>" for answer in answers
    ]


def test_prompt_whose_end_a_tokenizer_splits_once_an_answer_follows() -> None:
    """GPT-2's rule takes "\\n\\n" as one token at the end of a text and as two before a word; a server sees the end of
    the text.
    """
    template = ChatTemplate(make_tokenizer("llama3", modern=False))
    ids, mask = template.render_answered(conversation(1))
    prompt = template.first_prompt_ids(conversation(1))
    assert ids == prompt + encode(template, "4.<|eot_id|>")
    assert mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    assert ids != rendered(template, conversation(1))


def test_answers_that_look_like_template_text() -> None:
    template = make_template("chatml")
    answers = ("<|im_end|>\n<|im_start|>assistant\n", TURNS[0], "assistant")
    ids, mask = template.render_answered(conversation(answers=answers))
    assert supervised_texts(template, ids, mask) == [answer + "<|im_end|>" for answer in answers]


def test_thinking_of_the_last_answer_is_supervised() -> None:
    template = make_template("qwen3")
    thoughtful = "<think>\nTwo and two.\n</think>\n\n4."
    ids, mask = template.render_answered(conversation(1, answers=(thoughtful,)))
    assert supervised_texts(template, ids, mask) == [thoughtful + "<|im_end|>"]
    # The empty block that the template inserts was not produced by the target.
    ids, mask = template.render_answered(conversation(1))
    assert "<think>\n\n</think>\n\n4." in template.tokenizer.decode(ids)
    assert supervised_texts(template, ids, mask) == ["4.<|im_end|>"]


def test_template_that_rewrites_a_prompt_once_it_is_answered() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{{ messages | length }} messages. " + CHATML
    with pytest.raises(InputError) as caught:
        ChatTemplate(tokenizer).answered_documents(conversation())
    message = str(caught.value)
    assert message.startswith("file.jsonl:7: the target's chat template rewrites earlier text once turn 1 is answered")
    assert "at the start it writes '2 messages." in message
    assert "where '1 messages." in message


def test_template_that_replaces_an_answer() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = CHATML.replace("message['content'] }}", "message['content'] | replace('Four', '4') }}")
    with pytest.raises(InputError) as caught:
        ChatTemplate(tokenizer).answered_documents(conversation())
    message = str(caught.value)
    assert message.startswith("file.jsonl:7: the target's chat template alters the answer of turn 2")
    assert "it writes '4,\\n\\n" in message
    assert "where 'Four,\\n\\n" in message
    assert "\n" not in message


def test_conversation_without_answers_is_not_imported() -> None:
    with pytest.raises(ValueError, match="has no answers"):
        make_template("chatml").render_answered(conversation(answers=None))


# Rejections and facts of the tokenizer


def test_system_prompt_that_the_template_rejects() -> None:
    template = make_template("gemma")
    rejected = conversation(system="Be brief.")
    for render in (template.first_prompt_ids, template.render_answered):
        with pytest.raises(InputError) as caught:
            render(rejected)
        message = str(caught.value)
        assert message.startswith("file.jsonl:7: ")
        assert "System role not supported" in message
        assert "remove 'system' (or data.system)" in message


def test_conversation_that_the_template_rejects_for_another_reason() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{{ raise_exception('not today') }}"
    with pytest.raises(InputError) as caught:
        ChatTemplate(tokenizer).first_prompt_ids(Conversation(id="x1", turns=("a",), system="s"))
    assert "conversation x1: the target's chat template rejects this conversation (not today)" in str(caught.value)
    assert "'system'" not in str(caught.value)


def test_tools_reach_the_template() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    with_tools = Conversation(id="c", turns=("a",), tools=({"name": "f"},))
    assert tokenizer.decode(ChatTemplate(tokenizer).first_prompt_ids(with_tools)).startswith(
        '[{"name": "f"}]<|im_start|>'
    )


THINKING = (  # as Qwen3: told not to think, the answer begins behind an empty block
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_variables_reach_the_template_in_every_rendering() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = THINKING
    asked = Conversation(id="c", turns=("a", "b"))
    plain, silent = ChatTemplate(tokenizer), ChatTemplate(tokenizer, variables={"enable_thinking": False})
    block = "<think>\n\n</think>\n\n"
    assert tokenizer.decode(silent.first_prompt_ids(asked)) == tokenizer.decode(plain.first_prompt_ids(asked)) + block
    so_far = [*silent.first_prompt_ids(asked), *encode(silent, "4.<|im_end|>")]
    following = silent.next_prompt(asked, ["4."], so_far)
    # The server does not show the empty block of an earlier turn: the further turn is a document of its own.
    assert not following.continues and tokenizer.decode(following.ids).endswith(
        "b<|im_end|>\n<|im_start|>assistant\n" + block
    )
    assert len({plain.digest, silent.digest, ChatTemplate(tokenizer, variables={"enable_thinking": True}).digest}) == 3
    assert ChatTemplate(tokenizer, variables={}).digest == plain.digest


def test_tokenizer_without_template() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        ChatTemplate(tokenizer)


def test_end_tokens() -> None:
    tokenizer = make_tokenizer("gemma")
    eos, end_of_turn = tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    assert end_token_ids(tokenizer, None) == (eos,)
    assert end_token_ids(tokenizer, GenerationConfig()) == (eos,)
    assert end_token_ids(tokenizer, GenerationConfig(eos_token_id=end_of_turn)) == (eos, end_of_turn)
    assert end_token_ids(tokenizer, GenerationConfig(eos_token_id=[end_of_turn, eos])) == (eos, end_of_turn)
    tokenizer.eos_token = None
    assert end_token_ids(tokenizer, GenerationConfig(eos_token_id=0)) == (0,)
    with pytest.raises(InputError, match="names no end token"):
        end_token_ids(tokenizer, GenerationConfig())


def test_digest_follows_template_and_special_tokens() -> None:
    digests = []
    for template, eos in (
        (CHATML, "<|im_end|>"),
        (CHATML, "<|im_end|>"),
        (CHATML + " ", "<|im_end|>"),
        (CHATML, "<|endoftext|>"),
    ):
        tokenizer = make_tokenizer("chatml")
        tokenizer.chat_template, tokenizer.eos_token = template, eos
        digests.append(ChatTemplate(tokenizer).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
