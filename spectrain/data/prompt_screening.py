"""What only the target's chat template tells of a run's prompts: which leave no room for an answer, and which held-out
prompts the target could not tell from training prompts, because their ids are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spectrain.config.data_schema import DataConfig
from spectrain.data.chat import ChatTemplate
from spectrain.data.prompts import Conversation, PromptSplit, digest_json
from spectrain.errors import ConfigError, InputError


class PromptScreen:
    """``template``: the target's; ``max_length``: of a document, in tokens."""

    def __init__(self, template: ChatTemplate, max_length: int) -> None:
        self._template = template
        self._max_length = max_length
        self._shown: dict[str, bytes] = {}  # by prompt digest: a digest of all ids

    def screened(self, split: PromptSplit, data: DataConfig) -> PromptSplit:
        """The split without prompts that are too long (``data.skip_too_long``), and without training prompts that the
        template makes equal to held-out ones.

        Raises InputError for a prompt that the template rejects, that is too long or that has a token which the target
        does not embed, ConfigError where ``data.heldout`` names a prompt that is a training prompt after the template.
        """
        asked = len(split.train) + len(split.heldout)
        if data.selects:  # rows of a data set are left out and counted; prompts of a file are the user's own
            split = replace(split, train=self._taken(split.train), heldout=self._taken(split.heldout))
        rejected = asked - len(split.train) - len(split.heldout)
        train, heldout = self._with_room(split.train, data), self._with_room(split.heldout, data)
        skipped = asked - rejected - len(train) - len(heldout)
        for name, before, left in (("training", split.train, train), ("held-out", split.heldout, heldout)):
            if before and not left:
                raise InputError(
                    f"all {name} prompts take more than target.max_length={self._max_length} tokens: raise it"
                )
        same = {self.digest(conversation): conversation for conversation in heldout}
        seen = [conversation for conversation in train if self.digest(conversation) in same]
        if seen and data.heldout:
            where = same[self.digest(seen[0])].where
            raise ConfigError(
                f"data.heldout: {len({same[self.digest(c)].where for c in seen})} of its {len(heldout)} prompts are "
                f"training prompts too after the chat template, the first at {where} (as {seen[0].where}): remove "
                f"them from one side"
            )
        kept = [conversation for conversation in train if self.digest(conversation) not in same]
        if not kept:
            raise ConfigError("data.train: the chat template makes all prompts the same: add prompts that differ")
        return replace(
            split, train=kept, heldout=heldout, too_long=skipped, rejected=rejected, alike=len(train) - len(kept)
        )

    def seen_in_training(
        self, asked: Sequence[Conversation], train: Sequence[Conversation]
    ) -> list[tuple[Conversation, Conversation]]:
        """Those of ``asked`` whose ids are those of a training prompt, each with that prompt."""
        trained = {self.digest(conversation): conversation for conversation in train}
        return [(c, trained[self.digest(c)]) for c in asked if self.digest(c) in trained]

    def _taken(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        """Those that the template takes. Raises InputError where it takes none."""
        taken: list[Conversation] = []
        error: InputError | None = None
        for conversation in conversations:
            try:
                self.digest(conversation)
                taken.append(conversation)
            except InputError as rejected:
                error = error or rejected
        if error is not None and not taken:
            raise error
        return taken

    def _with_room(self, conversations: Sequence[Conversation], data: DataConfig) -> list[Conversation]:
        for conversation in conversations:
            self.digest(conversation)  # which renders all turns, and with them the first prompt
            self._template.require_embedded(conversation, [self._template.first_prompt_size(conversation)[1]])
        fitting = [c for c in conversations if self._length(c) < self._max_length]
        if len(fitting) < len(conversations) and not (data.skip_too_long or data.selects):
            first = next(c for c in conversations if self._length(c) >= self._max_length)
            raise InputError(
                f"{first.where}: prompt {first.id} is too long, with its answer it takes more than "
                f"target.max_length={self._max_length} tokens ({self._length(first)} without); "
                f"{len(conversations) - len(fitting)} such prompts: raise target.max_length, remove them, or leave "
                f"them out with data.skip_too_long=true"
            )
        return fitting

    def has_seen(self, conversation: Conversation) -> bool:
        """Whether ``digest`` costs nothing."""
        return conversation.prompt_digest() in self._shown

    def digest(self, conversation: Conversation) -> bytes:
        """Of the ids that the target is shown of its turns: equal ones it cannot tell apart."""
        key = conversation.prompt_digest()
        if key not in self._shown:
            first = self._template.first_prompt_ids(conversation)
            further = [
                # Each as a first turn, because what is before it is not known yet.
                self._template.first_prompt_ids(replace(conversation, turns=(turn,), answers=None))
                for turn in conversation.turns[1:]
            ]
            self._shown[key] = bytes.fromhex(digest_json([first, *further]))
        return self._shown[key]

    def _length(self, conversation: Conversation) -> int:
        """Of the first prompt, in tokens."""
        return self._template.first_prompt_size(conversation)[0]
