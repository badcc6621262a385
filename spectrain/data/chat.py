"""The target's chat template: from conversations to token ids, and which of those ids the target produced.

Three rules keep training on exactly what vLLM sees:

* A generated answer is never decoded and tokenised again: the next prompt is appended to the ids as they were
  generated.
* What follows an answer up to the next generation prompt is found by rendering a placeholder instead of the answer.
* In an imported conversation each answer must follow, unaltered, right where vLLM would have begun to generate it:
  the rendered prompt of every turn is a prefix of the rendered whole. Templates that rewrite earlier turns (by removing
  their thinking, say) break this for some conversations; then there is no single sequence to train on, and the error
  shows where.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import jinja2

from spectrain.data.prompts import Conversation
from spectrain.errors import InputError
from spectrain.target.spec import end_token_ids

_EXCERPT_CHARS = 40
_REJECTIONS = (jinja2.TemplateError, TypeError, ValueError)  # what a template raises, by its own word or by stumbling


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template. ``end_ids``: what ends an answer; None: the tokenizer's
    end token.

    Raises InputError if the tokenizer has no template.
    """

    def __init__(self, tokenizer: Any, end_ids: Iterable[int] | None = None, vocab_size: int | None = None) -> None:
        """``vocab_size``: rows of the target's embedding."""
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "the target's tokenizer has no chat template: use an instruction-tuned target, or add "
                "chat_template.jinja"
            )
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._given_end_ids = frozenset(end_token_ids(tokenizer, None) if end_ids is None else end_ids)

    @cached_property
    def digest(self) -> str:
        """Sha256, in hex, of the template and the special tokens it may refer to."""
        parts = [self.tokenizer.chat_template, self.tokenizer.special_tokens_map]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def first_prompt_ids(self, conversation: Conversation) -> list[int]:
        """Ids up to where the first answer starts. Raises InputError if the template rejects the conversation."""
        return self._encode(self._render(conversation, ()))

    def next_prompt_ids(self, conversation: Conversation, turn_index: int, ids_so_far: Sequence[int]) -> list[int]:
        """Ids to append to ``ids_so_far``, which end with the answer to turn ``turn_index - 1`` (turns count from 0),
        so that turn ``turn_index`` can be answered.

        The answer's own end token is in ``ids_so_far`` already and is not repeated: ChatML's "…4.<|im_end|>" is
        followed by "\\n<|im_start|>user\\n…<|im_end|>\\n<|im_start|>assistant\\n".

        Raises ValueError if the last answer has no end token: a truncated answer ends its conversation. Raises
        InputError if the template does not show earlier answers.
        """
        if not ids_so_far or not (ids_so_far[-1] in self._end_ids or self._is_special(ids_so_far[-1])):
            raise ValueError("the answer so far was truncated: nothing may follow it")
        mark = _unused_mark(conversation)
        rendered = self._render(conversation, ("…",) * (turn_index - 1) + (mark,))
        if rendered.count(mark) != 1:
            raise InputError(
                f"{conversation.where}: the target's chat template does not show the answer of turn {turn_index} once "
                f"in the prompt "
                f"of turn {turn_index + 1}: use single-turn prompts with this target"
            )
        ids = self._encode(rendered.split(mark)[1])
        end = self._end_position(ids)
        return ids if end is None else ids[end + 1 :]

    def render_answered(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """(input_ids, loss_mask) of a conversation that has answers: 1 on each answer and on its end-of-turn token, 0
        elsewhere.

        Raises InputError, saying where, if the prompt of a turn is not a prefix of the whole or an answer does not
        appear unaltered.
        """
        answers = conversation.answers
        if answers is None:
            raise ValueError(f"conversation {conversation.id} has no answers")
        full = self._render(conversation, answers)
        spans, prompt_lengths = [], []
        for turn in range(len(answers)):
            prompt = self._render(conversation, answers[:turn])
            if not full.startswith(prompt):
                raise InputError(
                    f"{conversation.where}: the target's chat template rewrites earlier text once turn {turn + 1} is "
                    f"answered, so the "
                    f"conversation cannot be imported whole: {_difference(prompt, full)}; split it into single turns"
                )
            prompt_lengths.append(len(prompt))
            spans.append(self._answer_span(conversation, turn, full, len(prompt)))
        ids, offsets = self._encode_with_offsets(full, prompt_lengths)
        mask = [0] * len(ids)
        for start, end in spans:
            self._supervise(mask, ids, offsets, start, end)
        return ids, mask

    def require_embedded(self, conversation: Conversation, ids: Sequence[int]) -> None:
        """InputError, naming prompt, token and size, if the target's embedding has no row for one of ``ids``."""
        size = self._vocab_size
        beyond = next((token for token in ids if token >= size), None) if size is not None else None
        if beyond is not None:
            text = self.tokenizer.convert_ids_to_tokens(beyond)
            raise InputError(
                f"{conversation.where}: prompt {conversation.id} has token {beyond} ({text!r}), the target embeds "
                f"{size} tokens, counted from 0: its tokenizer is not its own, or has tokens added that it never saw"
            )

    # Rendering

    def _render(self, conversation: Conversation, answers: Sequence[str]) -> str:
        """Text of the first ``len(answers)`` turns with these answers and, if there is one more turn, of that and the
        generation prompt.
        """
        try:
            return self._apply(conversation, answers, conversation.system)
        except _REJECTIONS as error:
            hint = "change the conversation, or the target's chat template"
            if conversation.system is not None and self._takes(conversation, answers):
                hint = (
                    "it takes no system prompt: remove 'system' (or data.system), or put its text into the first turn"
                )
            raise InputError(
                f"{conversation.where}: the target's chat template rejects this conversation ({error}); {hint}"
            ) from error

    def _takes(self, conversation: Conversation, answers: Sequence[str]) -> bool:
        """Whether the template takes the conversation without its system prompt."""
        try:
            self._apply(conversation, answers, None)
        except _REJECTIONS:
            return False
        return True

    def _apply(self, conversation: Conversation, answers: Sequence[str], system: str | None) -> str:
        messages = [] if system is None else [{"role": "system", "content": system}]
        turns = conversation.turns[: len(answers) + 1]
        for index, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            if index < len(answers):
                messages.append({"role": "assistant", "content": answers[index]})
        rendered = self.tokenizer.apply_chat_template(
            messages,
            tools=None if conversation.tools is None else list(conversation.tools),
            tokenize=False,
            add_generation_prompt=len(turns) > len(answers),
        )
        return str(rendered)

    def _answer_span(self, conversation: Conversation, turn: int, full: str, prompt_length: int) -> tuple[int, int]:
        """Character span of an answer in ``full``. Templates may trim its white space, but not change it otherwise."""
        answers = list(conversation.answers or ())
        answer, mark = answers[turn], _unused_mark(conversation)
        answers[turn] = mark
        before, _, after = self._render(conversation, answers).partition(mark)
        end = len(full) - len(after)
        # A template may put text of its own between prompt and answer, such as an empty thinking block, and leave it
        # out where the answer brings its own; hence two places to look at.
        for start in (len(before), prompt_length):
            fits = prompt_length <= start <= end and full[:start] == before[:start] and full[end:] == after
            if fits and full[start:end].strip() == answer.strip():
                return start, end
        raise InputError(
            f"{conversation.where}: the target's chat template alters the answer of turn {turn + 1}, so the "
            f"conversation cannot be "
            f"imported whole: {_difference(answer.strip(), full[prompt_length:].lstrip())}; split it into single turns"
        )

    # Tokens

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _encode_with_offsets(self, full: str, prompt_lengths: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of ``full`` with their character spans. A server tokenises a prompt alone, so where the tokenizer would
        merge the end of a prompt with the start of its answer (two newlines, say) the text is cut there first."""
        if not self.tokenizer.is_fast:
            raise InputError(
                "importing answers needs a tokenizer that reports character offsets: the target needs a tokenizer.json"
            )
        cuts = [0]
        for length in prompt_lengths:
            head = self._encode(full[cuts[-1] : length])
            if self._encode(full[cuts[-1] :])[: len(head)] != head:
                cuts.append(length)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, end in pairwise([*cuts, len(full)]):
            encoded = self.tokenizer(
                full[start:end], add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            ids += encoded["input_ids"]
            offsets += [(first + start, last + start) for first, last in encoded["offset_mapping"]]
        return ids, offsets

    def _supervise(self, mask: list[int], ids: list[int], offsets: list[tuple[int, int]], start: int, end: int) -> None:
        """Set ``mask`` on the tokens of the answer in characters [start, end) and on the end-of-turn token that closes
        it, if any.
        """
        # Some tokenizers trim white space from offsets, which leaves a token of blanks with an empty span at its end.
        inside = [i for i, (first, last) in enumerate(offsets) if last > start and min(first, last - 1) < end]
        if not inside:
            return
        mask[inside[0] : inside[-1] + 1] = [1] * (inside[-1] + 1 - inside[0])
        closing = self._end_position(ids[inside[-1] + 1 :])
        if closing is not None:
            mask[inside[-1] + 1 + closing] = 1

    def _end_position(self, ids_after_answer: Sequence[int]) -> int | None:
        """Where the end-of-turn token is among the ids that follow an answer: first, or after white space; None if
        it is not there.
        """
        for position, token in enumerate(ids_after_answer):
            if token in self._end_ids:
                return position
            if self.tokenizer.decode([token]).strip():
                return None
        return None

    def _is_special(self, token: int) -> bool:
        added = self.tokenizer.added_tokens_decoder.get(token)
        return added is not None and added.special

    @cached_property
    def _end_ids(self) -> frozenset[int]:
        """The given end ids, and the special token with which the template itself closes an answer (Gemma's
        <end_of_turn>, where the tokenizer's own end token is another)."""
        mark = "placeholder"
        try:
            rendered = self._apply(Conversation(id="", turns=("question",)), (mark,), None)
        except _REJECTIONS:
            return self._given_end_ids
        for token in self._encode(rendered.partition(mark)[2]):
            if self._is_special(token):
                return self._given_end_ids | {token}
            if self.tokenizer.decode([token]).strip():
                break
        return self._given_end_ids


def _unused_mark(conversation: Conversation) -> str:
    """A plain word that the conversation does not contain."""
    text = "\n".join(
        (conversation.system or "", json.dumps(conversation.tools), *conversation.turns, *(conversation.answers or ()))
    )
    mark = "placeholder"
    while mark in text:
        mark += "x"
    return mark


def _difference(expected: str, found: str) -> str:
    """Where two texts part, with a little of both."""
    place = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found))
    )
    context = f"after {expected[max(0, place - _EXCERPT_CHARS) : place]!r}" if place else "at the start"
    wanted, written = (
        repr(text[place : place + _EXCERPT_CHARS]) if place < len(text) else "the end" for text in (expected, found)
    )
    return f"{context} it writes {written} where {wanted} was expected"
