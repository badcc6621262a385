"""The target's chat template: from conversations to token ids, and which of those ids the target produced.

A chat server renders a conversation anew for every turn, with its earlier answers as text. Three rules keep training on
exactly what it sees:

* A document goes on over a further turn only where the server would show its text unaltered: the answer as it was
  generated, then the very end token that was generated, then the user's turn. There the ids stay as they were
  generated; nothing is decoded and tokenised again.
* Everywhere else the further turn begins a document of its own, whose prompt is what the server renders: after a
  template that removes the thinking of earlier answers or trims them, after an answer that ended with another end token
  than the template writes, or that has special tokens inside, which a server does not return.
* An imported conversation is cut into documents in the same way. Within each, every answer follows, unaltered, right
  where vLLM would have begun to generate it: the rendered prompt of a turn is a prefix of the rendered document.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from spectrain.data.bounded import RENDER_S, OutOfTimeError, RejectedError, render_template
from spectrain.data.prompts import Conversation
from spectrain.errors import EXCERPT_CHARS, InputError, text_difference
from spectrain.target.spec import end_token_ids

_MARK = "placeholder"
_ANCHORS = ("\n", ".", "a")  # texts after which a tokenizer that puts a blank before every text is asked for more


@dataclass(frozen=True)
class NextPrompt:
    """The ids of a further turn's prompt. ``continues``: they go on the document so far; otherwise they are the prompt
    of a document of its own.
    """

    ids: list[int]
    continues: bool


@dataclass(frozen=True)
class AnsweredDocument:
    """Turns ``first_turn`` (counted from 0) to ``first_turn + n`` of a conversation that has answers. ``mask`` is 1 on
    their answers and end tokens; earlier turns are context.
    """

    first_turn: int
    ids: list[int]
    mask: list[int]


class _AlteredError(InputError):
    """The template shows an answer or what is before it otherwise once there is more of the conversation."""


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template. ``end_ids``: what ends an answer; None: the tokenizer's
    end token. ``vocab_size``: rows of the target's embedding. ``variables``: what the template reads beside the
    conversation, such as ``enable_thinking``. Raises InputError if the tokenizer has no template.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_ids: Iterable[int] | None = None,
        vocab_size: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "the target's tokenizer has no chat template: use an instruction-tuned target, or add "
                "chat_template.jinja"
            )
        self.tokenizer = tokenizer
        self.variables = dict(variables or {})
        self._vocab_size = vocab_size
        self._given_end_ids = frozenset(end_token_ids(tokenizer, None) if end_ids is None else end_ids)
        self._sizes: dict[str, tuple[int, int]] = {}  # of first prompts, by their digests

    @cached_property
    def digest(self) -> str:
        """Sha256, in hex, of the template, the special tokens it may refer to, and its variables if there are any."""
        parts = [self.tokenizer.chat_template, self.tokenizer.special_tokens_map]
        parts += [self.variables] if self.variables else []
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def first_prompt_ids(self, conversation: Conversation) -> list[int]:
        """Ids up to where the first answer starts. Raises InputError if the template rejects the conversation."""
        if len(conversation.turns) > 1 and self._is_harmony:
            raise InputError(
                f"{conversation.where}: servers render this target's conversations in the Harmony format, which its "
                f"chat template does not follow from the second turn on: use single-turn prompts with this target"
            )
        ids = self._encode(self._render(conversation, ()))
        self._sizes[conversation.prompt_digest()] = len(ids), max(ids, default=0)
        return ids

    def first_prompt_size(self, conversation: Conversation) -> tuple[int, int]:
        """(tokens, the greatest id) of ``first_prompt_ids``, which is asked once for each prompt. Errors as there."""
        if conversation.prompt_digest() not in self._sizes:
            self.first_prompt_ids(conversation)
        return self._sizes[conversation.prompt_digest()]

    def answer_text(self, ids: Sequence[int], start: int) -> str:
        """What a chat server returns for the answer that begins at ``ids[start]`` and ends with its end token."""
        prompt, whole = self._returned(ids[:start]), self._returned(ids[:-1])
        # After its prompt, because some tokenizers drop the blank before a word that they decode alone.
        text = whole[len(prompt) :] if whole.startswith(prompt) else self._returned(ids[start:-1])
        return text.rstrip("\ufffd")  # bytes of a character that never became whole: vLLM waits for the rest

    def next_prompt(self, conversation: Conversation, answers: Sequence[str], ids: Sequence[int]) -> NextPrompt:
        """The prompt of the turn after ``answers``, which are those so far, as text.

        ids: the document so far, which ends with the last answer; the prompt goes on it or not, see above.
        ChatML's "…4.<|im_end|>" is followed by "\\n<|im_start|>user\\n…<|im_end|>\\n<|im_start|>assistant\\n": the end
        token is there already and is not repeated.

        Raises ValueError if the last answer has no end token: a truncated answer ends its conversation. Raises
        InputError if the template rejects the answers.
        """
        if not ids or not (ids[-1] in self._end_ids or ids[-1] in self._special):
            raise ValueError("the answer so far was truncated: nothing may follow it")
        rendered = self._render(conversation, answers)
        served = self._encode(rendered)
        before = self._render(conversation, answers[:-1]) + answers[-1]
        after = self._encode(rendered[len(before) :]) if rendered.startswith(before) else []
        continues = (
            after[:1] == [ids[-1]]
            and served[-len(after) :] == after
            and self._whole_text(served[: -len(after)]) == self._whole_text(ids[:-1])
        )
        return NextPrompt(after[1:], True) if continues else NextPrompt(served, False)

    def answered_documents(self, conversation: Conversation) -> list[AnsweredDocument]:
        """The documents of a conversation that has answers, in order: one, or as few as the template allows.

        Raises InputError, saying where, if an answer does not appear unaltered even as the last one.
        """
        documents: list[AnsweredDocument] = []
        first = 0
        while first < len(conversation.turns):
            document, first = self._longest_document(conversation, first)
            documents.append(document)
        return documents

    def _longest_document(self, conversation: Conversation, first: int) -> tuple[AnsweredDocument, int]:
        """The document of turn ``first`` and as many after it as the template leaves alone, and the turn after them."""
        count = len(conversation.turns)
        try:
            return self._document(conversation, first, count), count  # nearly always
        except _AlteredError:
            if first + 1 == count:
                raise
        document, end = self._document(conversation, first, first + 1), first + 1
        while end + 1 < count:
            try:
                document, end = self._document(conversation, first, end + 1), end + 1
            except _AlteredError:
                break
        return document, end

    def _document(self, conversation: Conversation, first: int, end: int) -> AnsweredDocument:
        answers = None if conversation.answers is None else conversation.answers[:end]
        part = replace(conversation, turns=conversation.turns[:end], answers=answers)
        return AnsweredDocument(first, *self.render_answered(part, first))

    def render_answered(self, conversation: Conversation, first_turn: int = 0) -> tuple[list[int], list[int]]:
        """(input_ids, loss_mask) of a conversation that has answers, as one document: 1 on each answer from
        ``first_turn`` on and on its end-of-turn token, 0 elsewhere.

        Raises InputError, saying where, if the prompt of a turn is not a prefix of the whole or an answer does not
        appear unaltered.
        """
        answers = conversation.answers
        if answers is None:
            raise ValueError(f"conversation {conversation.id} has no answers")
        full = self._render(conversation, answers)
        spans, prompt_lengths = [], []
        for turn in range(first_turn, len(answers)):
            prompt = self._render(conversation, answers[:turn])
            if not full.startswith(prompt):
                raise _AlteredError(
                    f"{conversation.where}: the target's chat template rewrites earlier text once turn {turn + 1} is "
                    f"answered, so the answer cannot be imported: {text_difference(prompt, full)}"
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
        except RejectedError as error:
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
        except RejectedError:
            return False
        return True

    def _apply(self, conversation: Conversation, answers: Sequence[str], system: str | None) -> str:
        messages = [] if system is None else [("system", system)]
        turns = conversation.turns[: len(answers) + 1]
        for index, turn in enumerate(turns):
            messages.append(("user", turn))
            if index < len(answers):
                messages.append(("assistant", answers[index]))
        tools = None if conversation.tools is None else list(conversation.tools)
        try:
            to_answer = len(turns) > len(answers)
            return render_template(self.tokenizer, messages, tools, to_answer, self._takes_parts, self.variables)
        except OutOfTimeError as error:
            raise InputError(
                f"{conversation.where}: the target's chat template did not end within {RENDER_S:g} s: correct the "
                f"template"
            ) from error

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template wants a message's content as a list of parts, as vLLM then gives it: templates of
        targets that see images walk over the parts, and some show nothing of a plain text.
        """
        try:
            rendered = render_template(self.tokenizer, [("user", _MARK)], None, True, True, self.variables)
        except (RejectedError, OutOfTimeError):
            return False
        return _MARK in rendered and "'text'" not in rendered  # the list itself would be written with its names

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
        raise _AlteredError(
            f"{conversation.where}: the target's chat template alters the answer of turn {turn + 1}, so it cannot be "
            f"imported: {text_difference(answer.strip(), full[prompt_length:].lstrip())}"
        )

    # Tokens

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _returned(self, ids: Sequence[int]) -> str:
        """Ids as the text that a server returns."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _whole_text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _encode_with_offsets(self, full: str, prompt_lengths: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of ``full`` with their character spans. A server tokenises a prompt alone, so where the tokenizer would
        merge the end of a prompt with the start of its answer (two newlines, say) the text is cut there first."""
        if not self.tokenizer.is_fast:
            raise InputError(
                "importing answers needs a tokenizer that reports character offsets: the target needs a tokenizer.json"
            )
        cuts = [0]
        for length in prompt_lengths:
            head = self._encode_from(full, cuts[-1], length)[0]
            if self._encode_from(full, cuts[-1], len(full))[0][: len(head)] != head:
                cuts.append(length)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, end in pairwise([*cuts, len(full)]):
            more, spans = self._encode_from(full, start, end)
            ids += more
            offsets += spans
        return ids, offsets

    def _encode_from(self, full: str, start: int, end: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of ``full[start:end]`` as they are after other text, and their character spans in ``full``."""
        for anchor in _ANCHORS if start and self._puts_blank_before else ("",):
            encoded = self.tokenizer(
                anchor + full[start:end], add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            ids, before = encoded["input_ids"], self._encode(anchor)
            if ids[: len(before)] == before:
                shift = start - len(anchor)
                return ids[len(before) :], [(a + shift, b + shift) for a, b in encoded["offset_mapping"][len(before) :]]
        raise InputError(
            f"the target's tokenizer cannot continue a text with {full[start : start + EXCERPT_CHARS]!r} as an "
            f"answer: leave out the conversation's answers, or use a target with a byte-level tokenizer"
        )

    @cached_property
    def _puts_blank_before(self) -> bool:
        """Whether the tokenizer puts a blank before every text, so that a part encoded alone has a token too many."""
        before, together = self._encode("\n"), self._encode("\na")
        return together[: len(before)] == before and together[len(before) :] != self._encode("a")

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

    @cached_property
    def _special(self) -> frozenset[int]:
        """Ids that a server leaves out of what it returns."""
        return frozenset(self.tokenizer.all_special_ids) | {
            token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special
        }

    @cached_property
    def _end_ids(self) -> frozenset[int]:
        """The given end ids, and the special token with which the template itself closes an answer (Gemma's
        <end_of_turn>, where the tokenizer's own end token is another)."""
        try:
            rendered = self._apply(Conversation(id="", turns=("question",)), (_MARK,), None)
        except RejectedError:
            return self._given_end_ids
        for token in self._encode(rendered.partition(_MARK)[2]):
            if token in self._special:
                return self._given_end_ids | {token}
            if self.tokenizer.decode([token]).strip():
                break
        return self._given_end_ids

    @cached_property
    def _is_harmony(self) -> bool:
        """Whether it is a target of the gpt-oss kind, whose answers are several messages on channels."""
        return {"<|start|>", "<|channel|>"} <= {str(token) for token in self.tokenizer.added_tokens_decoder.values()}


def _unused_mark(conversation: Conversation) -> str:
    """A plain word that the conversation does not contain."""
    text = "\n".join(
        (conversation.system or "", json.dumps(conversation.tools), *conversation.turns, *(conversation.answers or ()))
    )
    mark = _MARK
    while mark in text:
        mark += "x"
    return mark
