"""What a run's prompts amounted to when they were last read: how many there are and the keys of their responses.

To read a million prompts, to render each with the target's template and to count its tokens takes minutes and a
gigabyte. A command whose responses are all there needs none of that, so what it needs is remembered in the run
directory: keys and splits, the counts that the user is told, and digests of what they were made from. As long as the
files (by size and times), the settings and the target are the same, prompts are read only when somebody asks for one.
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
_VERSION = 1
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
    """``target``: digest of the target and the settings under which they were screened; ``named``: training and
    held-out prompts as the manifest names them; ``counts``: of ``PromptSplit``; ``drawn``: how, from data sets.
    """

    asked: Asked
    target: str
    named: dict[str, str]
    counts: dict[str, int]
    drawn: DrawnPrompts | None

    def split(self, context: Context) -> PromptSplit:
        """The prompts, unread."""
        heldout = int(self.asked.heldout_D.sum())

        @cached
        def read() -> PromptSplit:
            return read_prompts(context)

        return PromptSplit(
            UnreadConversations(len(self.asked) - heldout, lambda: read().train),
            UnreadConversations(heldout, lambda: read().heldout),
            **self.counts,
        )


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
        table = feather.read_table(path, memory_map=False)
        facts = _facts(table)
        keys, heldout_D = Strings(table["key"]), np.asarray(table["heldout"]).astype(bool)
        if files is not None and facts["files"] == files[0] and facts["keys"] == _digest(keys, heldout_D):
            return KnownPrompts(Asked(keys, heldout_D), facts["target"], facts["named"], facts["counts"], files[1])
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
    facts = {
        "files": files[0],
        "target": target_digest(context),
        "named": context.named_prompts,
        "counts": {name: getattr(prompts, name) for name in _COUNTS},
        "keys": _digest(asked.keys, asked.heldout_D),
    }
    facts, path = with_digest(facts), context.data_dir.path / KNOWN_NAME
    with suppress(pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        if _facts(feather.read_table(path, memory_map=False)) == facts:
            return
    table = pa.table({"key": asked.keys.array, "heldout": asked.heldout_D})
    table = table.replace_schema_metadata({"spectrain": json.dumps(facts)})
    with replacing(path, "what is known of the prompts") as partial:
        feather.write_feather(table, str(partial), compression="zstd")


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


def _digest(keys: Strings, heldout_D: np.ndarray) -> str:
    digest = hashlib.sha256(heldout_D.tobytes())
    for key in keys:
        digest.update(f"{key}\n".encode())
    return digest.hexdigest()
