"""What a run's prompts amounted to when they were last read: how many there are and the keys of their responses.

To read a million prompts, to render each with the target's template and to count its tokens takes minutes and a
gigabyte. A command whose responses are all there needs none of that, so what it needs is remembered in the run
directory: keys and splits, the counts that the user is told, the held-out prompts (which evaluations ask), of training
prompts what tells whether a suite's are among them, and digests of what all that was made from. As long as the files
(by size and times), the settings and the target are the same, training prompts are read only when somebody asks for
one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa
from pyarrow import feather

from spectrain.config.folders import prompt_roots
from spectrain.config.schema import SpectrainConfig
from spectrain.data.asked_documents import Asked
from spectrain.data.prompt_files import find_prompt_files
from spectrain.data.prompt_screening import PromptScreen
from spectrain.data.prompts import Conversation, PromptSplit
from spectrain.data.string_column import Strings
from spectrain.errors import RunError
from spectrain.files import FileState, digest_strings, replacing, with_digest
from spectrain.stages.select_prompts import DrawnPrompts, run_prompts, stored_files, stored_selection

if TYPE_CHECKING:
    from spectrain.stages.context import Context

KNOWN_NAME = "known_prompts.arrow"
_VERSION = 2
_SEEN = ("prompt digest", "ids digest")  # of training prompts
_CHUNK = 1 << 14
_COUNTS = ("samples", "repeated", "too_long", "rejected", "alike")


class UnreadConversations(Sequence[Conversation]):
    """So many conversations, which ``read`` gives when one is asked for."""

    def __init__(self, count: int, read: Callable[[], Sequence[Conversation]]) -> None:
        self._count = count
        self._read = read

    @cached_property
    def _conversations(self) -> Sequence[Conversation]:
        found = self._read()
        if len(found) != self._count:
            raise RunError("the prompt files have changed since this command began: start it again")
        return found

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Conversation]: ...
    def __getitem__(self, index: int | slice) -> Conversation | Sequence[Conversation]:
        return self._conversations[index]

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._conversations)


@dataclass(frozen=True)
class KnownPrompts:
    """``facts``: ``target``, a digest of the target and the settings under which they were screened; ``named``,
    training and held-out prompts as the manifest names them; ``counts`` of ``PromptSplit``; digests of all columns.
    ``drawn``: how, from data sets.
    """

    path: Path
    facts: dict[str, Any]
    asked: Asked
    drawn: DrawnPrompts | None

    target = property(lambda self: self.facts["target"])
    named = property(lambda self: self.facts["named"])
    counts = property(lambda self: self.facts["counts"])

    def split(self, context: Context) -> PromptSplit:
        """The prompts, unread."""
        heldout = int(self.asked.heldout_D.sum())

        @cached
        def read() -> PromptSplit:
            return read_prompts(context)

        return PromptSplit(
            UnreadConversations(len(self.asked) - heldout, lambda: read().train),
            UnreadConversations(heldout, lambda: self._told() or read().heldout),
            **self.counts,
        )

    def may_train_on(self, asked: Sequence[Conversation], screen: PromptScreen) -> bool:
        """Whether some of these prompts may be training prompts, by their texts or by the ids that the target is shown.
        False is certain.
        """
        columns = self._columns(_SEEN)
        if columns is None:
            return True
        train_D = ~self.asked.heldout_D
        theirs = np.array([_short(conversation, screen) for conversation in asked], dtype=np.uint64).reshape(-1, 2).T
        own = [np.asarray(column)[train_D] for column in columns]
        return any(bool(np.isin(those, trained).any()) for those, trained in zip(theirs, own, strict=True))

    def _told(self) -> list[Conversation] | None:
        """The held-out prompts, as they were written down."""
        columns = self._columns(("heldout prompt",))
        return None if columns is None else [_conversation(text) for text in columns[0].drop_null().to_pylist()]

    def _columns(self, names: Sequence[str]) -> list[pa.ChunkedArray] | None:
        """Further columns; None where they were not written, or are no longer what was."""
        with suppress(pa.ArrowException, OSError, ValueError, KeyError):
            columns = feather.read_table(self.path, columns=list(names), memory_map=False)
            if all(_digest_of(columns[name]) == self.facts["columns"][name] for name in names):
                return [columns[name] for name in names]
        return None


def cached(read: Callable[[], PromptSplit]) -> Callable[[], PromptSplit]:
    """``read``, called once."""
    found: list[PromptSplit] = []
    return lambda: found[0] if found else found.append(read()) or found[0]  # type: ignore[func-returns-value]


def read_prompts(context: Context) -> PromptSplit:
    """The prompts, read and screened."""
    prompts, _ = run_prompts(context.config, context.data_dir.path, planning=False)
    if prompts is None:
        raise RunError("the prompts of this run are not here")
    return PromptScreen(context.template, context.config.target.max_length).screened(prompts, context.config.data)


def find_known(config: SpectrainConfig, run_dir: Path) -> KnownPrompts | None:
    """What is remembered of the prompts that the configuration names; None where that is nothing, or no longer true."""
    path = run_dir / KNOWN_NAME
    if not path.is_file():
        return None
    files = _files(config, run_dir)
    with suppress(pa.ArrowException, OSError, ValueError, KeyError, TypeError):  # damaged: made again
        table = feather.read_table(path, columns=["key", "heldout"], memory_map=False)
        facts = _facts(table)
        same = all(_digest_of(table[name]) == facts["columns"][name] for name in table.column_names)
        if files is not None and facts["files"] == files[0] and same:
            asked = Asked(Strings(table["key"]), np.asarray(table["heldout"]).astype(bool))
            return KnownPrompts(path, facts, asked, files[1])
    return None


def _facts(table: pa.Table) -> dict[str, Any]:
    """What is noted beside the keys. Raises ValueError where that is not what was written."""
    found: dict[str, Any] = json.loads(table.schema.metadata[b"spectrain"])
    if with_digest(found) != found:
        raise ValueError("its digest differs")
    return found


def remember(context: Context) -> None:
    """Write down what the prompts of a context amount to. Not where they are a part of the run's, or so new that
    another change of a file would not show.
    """
    config, asked, prompts = context.config, context.asked, context.prompts
    files = _files(config, context.data_dir.path, settled=True)
    if files is None or len(asked) != len(prompts.train) + len(prompts.heldout):
        return
    table = _table(context)
    facts = {
        "files": files[0],
        "target": target_digest(context),
        "named": context.named_prompts,
        "counts": {name: getattr(prompts, name) for name in _COUNTS},
        "columns": {name: _digest_of(table[name]) for name in table.column_names},
    }
    facts, path = with_digest(facts), context.data_dir.path / KNOWN_NAME
    with suppress(pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        if _facts(feather.read_table(path, columns=["heldout"], memory_map=False)) == facts:
            return
    table = table.replace_schema_metadata({"spectrain": json.dumps(facts)})
    with replacing(path, "what is known of the prompts") as partial:
        feather.write_feather(table, str(partial), compression="zstd")


def _table(context: Context) -> pa.Table:
    """A row a prompt, training prompts first. Without what only its screen knows, where it was not screened here."""
    asked, prompts, screen = context.asked, context.prompts, context.screen
    told = [*(None for _ in prompts.train), *map(_text, prompts.heldout)]
    columns = {"key": asked.keys.array, "heldout": pa.array(asked.heldout_D)}
    columns["heldout prompt"] = pa.array(told, pa.string())
    if screen is not None and all(map(screen.has_seen, prompts.train)):
        short = [_short(c, screen) for c in prompts.train] + [(0, 0)] * len(prompts.heldout)
        numbers = np.array(short, dtype=np.uint64).reshape(-1, 2)
        columns |= {name: pa.array(numbers[:, side]) for side, name in enumerate(_SEEN)}
    return pa.table(columns)


def _text(conversation: Conversation) -> str:
    return json.dumps(asdict(conversation), ensure_ascii=False)


def _conversation(text: str) -> Conversation:
    fields = json.loads(text)
    tuples = {name: None if fields[name] is None else tuple(fields[name]) for name in ("turns", "tools", "answers")}
    return Conversation(**(fields | tuples))


def _short(conversation: Conversation, screen: PromptScreen) -> tuple[int, int]:
    """The first 8 bytes of a prompt's digest and of that of its ids: enough to say that it is not among some."""
    return int(conversation.prompt_digest()[:16], 16), int.from_bytes(screen.digest(conversation)[:8], "big")


def _files(config: SpectrainConfig, run_dir: Path, settled: bool = False) -> tuple[str, DrawnPrompts | None] | None:
    """Digest of the settings and files that prompts are read from, and how they were drawn; None where they would have
    to be drawn, or with ``settled`` where a file is too new.
    """
    data, drawn = config.data, None
    if data.selects:
        selection = stored_selection(config, run_dir)
        if selection is None:
            return None
        paths = stored_files(run_dir)
        drawn = DrawnPrompts(PromptSplit([], []), selection.get("sources", []), selection["asked"], stored=True)
    else:
        named = [("data.train", name) for name in data.train] + [("data.heldout", name) for name in data.heldout]
        paths = [path for key, name in named for path in find_prompt_files(name, prompt_roots(), key)]
    states = [FileState.of(path) for path in paths]
    if settled and not all(state.settled for state in states):
        return None
    where = [[str(path.absolute()), *state] for path, state in zip(paths, states, strict=True)]
    return digest_strings([_VERSION, asdict(data), where]), drawn


def target_digest(context: Context) -> str:
    """Of all that decides which prompts a target is asked, and the keys of its responses, beside the prompts."""
    target, config = context.target, context.config
    screening = [context.template.digest, target.tokenizer_digest, config.target.max_length]
    keys = [target.id, target.revision, config.target.template_kwargs, asdict(context.sampling)]
    return digest_strings([screening, keys])


def _digest_of(column: pa.ChunkedArray) -> str:
    """Of its values, however they lie in memory."""
    digest = hashlib.sha256()
    for first in range(0, len(column), _CHUNK):
        digest.update(json.dumps(column.slice(first, _CHUNK).to_pylist()).encode())
    return digest.hexdigest()
