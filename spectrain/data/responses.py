"""Responses: what the target answered, as token ids with their loss mask, and the folder that keeps them.

A response is known by its key, a digest of what it depends on (prompt, sampling, target), with the number of its first
turn where that is not the conversation's first. The store holds a set of keys, so it does not matter in which order
responses are finished, how often a generation was killed, or whether one comes twice. A part file appears under its
name only when it is whole and on disk: a kill loses at most the responses that were not appended yet.

How parts are read, whole or in columns: ``response_parts.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from spectrain.config.data_schema import SamplingConfig
from spectrain.console import say
from spectrain.data.prompts import Conversation, digest_json
from spectrain.data.response_parts import PART_NAME, SCHEMA, DamagedPartError, count_responses, keys_of, read_part
from spectrain.data.string_column import Strings
from spectrain.errors import InputError
from spectrain.files import check_guarded, file_digest, remove_partials, replacing

FINISH_REASONS = ("stop", "length", "imported")
SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn, with nothing left open. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1
    are off.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int  # per turn
    seed: int


def resolve_sampling(config: SamplingConfig, generation_config: Any = None) -> Sampling:
    """Fill what ``config`` leaves open from the target's generation config (transformers' ``GenerationConfig`` or
    None).

    The target samples by default if its generation config says ``do_sample``, or gives a temperature and does not deny
    it; otherwise it is greedy. Fields that greedy decoding does not read are set to their neutral values, so that
    changing them changes no key. Penalties and other filters of the generation config are not applied (the output would
    no longer follow a distribution of the context alone that draft tokens can be verified against); the user is told.
    """

    def own(name: str, default: Any) -> Any:
        value = getattr(generation_config, name, None)
        return default if value is None else value

    samples = bool(own("do_sample", own("temperature", 0.0) > 0))
    temperature = (
        config.temperature if config.temperature is not None else (float(own("temperature", 1.0)) if samples else 0.0)
    )
    for name, neutral in (("repetition_penalty", 1.0), ("no_repeat_ngram_size", 0), ("min_p", 0.0), ("typical_p", 1.0)):
        if own(name, neutral) != neutral:
            say(f"note: the target's generation config has {name}={own(name, neutral)}, which is not applied")
    if temperature == 0:
        return Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=config.max_new_tokens, seed=0)
    top_p = config.top_p if config.top_p is not None else own("top_p", 1.0)
    top_k = config.top_k if config.top_k is not None else own("top_k", 0)
    return Sampling(
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=max(int(top_k), 0),  # some checkpoints write -1 for "off"
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
    )


@dataclass(frozen=True, eq=False)
class Response:
    """One document: the rendered conversation with the target's answers.

    ``loss_mask`` is 1 exactly on ids the target produced: the answers and their end-of-turn tokens. ``finish_reason``
    is that of the last answer: "stop" (its own end token, which is the last supervised id), "length" (cut; no end token
    was added) or "imported".
    """

    conversation: Conversation
    input_ids: npt.NDArray[np.int32]  # [S]
    loss_mask: npt.NDArray[np.uint8]  # [S]
    finish_reason: str
    sampling: Sampling
    domain: str | None
    split: str
    key: str

    def __post_init__(self) -> None:
        if self.input_ids.ndim != 1 or self.input_ids.shape != self.loss_mask.shape:
            raise ValueError(
                f"input_ids {self.input_ids.shape} and loss_mask {self.loss_mask.shape} must be vectors of one length"
            )
        if self.input_ids.dtype != np.int32 or self.loss_mask.dtype != np.uint8:
            raise ValueError(
                f"input_ids must be int32 and loss_mask uint8, not {self.input_ids.dtype} and {self.loss_mask.dtype}"
            )
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish_reason {self.finish_reason!r} is not one of {FINISH_REASONS}")
        if self.split not in SPLITS:
            raise ValueError(f"split {self.split!r} is not one of {SPLITS}")


def response_key(
    conversation: Conversation,
    sampling: Sampling,
    target_id: str,
    target_revision_digest: str,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Sha256 of all that decides a response. Imported answers count; sampling does not decide those. Variables of the
    chat template count where there are any, so that what was answered without them stays.
    """
    how = asdict(sampling) if conversation.answers is None else {"answers": conversation.answers}
    parts = [conversation.prompt_digest(), how, target_id, target_revision_digest]
    return digest_json([*parts, dict(sorted(template_kwargs.items()))] if template_kwargs else parts)


def document_key(key: str, first_turn: int) -> str:
    """Key of the document that begins with turn ``first_turn`` (counted from 0) of the conversation whose first
    document has ``key``.
    """
    return f"{key}-{first_turn + 1}" if first_turn else key


def further_documents(keys: Iterable[str]) -> dict[str, list[str]]:
    """Key of a conversation -> keys of its further documents among ``keys``, in the order of their turns."""
    found: dict[str, list[str]] = {}
    for key in keys:
        if "-" in key:
            found.setdefault(key.partition("-")[0], []).append(key)
    return {key: sorted(documents, key=_turn_number) for key, documents in found.items()}


def _turn_number(key: str) -> int:
    return int(key.partition("-")[2])


class ResponseStore:
    """A folder of Parquet parts ``part-00000-DIGEST.parquet`` …, one for each ``append``. One writer at a time; any
    number of readers.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._part_of_key: dict[str, Path] = {}
        self._parts_read: set[Path] = set()

    def append(self, responses: Sequence[Response]) -> Path | None:
        """Write the responses whose keys are not stored yet as one part, whole or not at all; None if there
        are none. Raises RunError if it cannot be written.
        """
        known = self.keys()
        fresh = {response.key: response for response in reversed(responses) if response.key not in known}
        if not fresh:
            return None
        check_guarded(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_partials(self.folder)
        # The first of several responses with one key is kept, and the given order is too.
        rows = [_to_row(response) for response in responses if fresh.get(response.key) is response]
        buffer = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), buffer, compression="zstd")
        content = buffer.getvalue()
        digest = hashlib.sha256(content).hexdigest()[:16]
        path = self.folder / f"part-{self._next_number():05d}-{digest}.parquet"
        with replacing(path, f"{len(rows)} responses", content.size) as partial:
            partial.write_bytes(content)
        return path

    def set_aside_damaged(self) -> list[Path]:
        """Rename the parts that are damaged, so that their responses count as missing. Returns their new names."""
        renamed = []
        for path in self.parts():
            try:
                keys_of(path)
            except DamagedPartError:
                renamed.append(path.rename(path.with_name(f"{path.name}.damaged")))
        return renamed

    def whole_keys(self) -> Strings:
        """As ``key_column``, of the parts that are not damaged."""
        found = []
        for path in self.parts():
            with suppress(DamagedPartError):
                found.append(keys_of(path))
        return Strings.joined(found)

    def take_over(self, other: ResponseStore) -> None:
        """Move what another store holds into this one, a part at a time, but for responses that are here. After a kill
        each is in one of the two, or in both.
        """
        for path in other.parts():
            keys, known = list(keys_of(path)), self.keys()
            fresh = [key for key in keys if key not in known]
            if len(fresh) == len(keys):
                check_guarded(self.folder)
                self.folder.mkdir(parents=True, exist_ok=True)
                path.replace(self.folder / f"part-{self._next_number():05d}-{file_digest(path)[:16]}.parquet")
            else:
                self.append(other.load(fresh))
                path.unlink()

    def keys(self) -> set[str]:
        """Keys of all stored responses. Raises InputError for a part that is damaged."""
        for path in self.parts():
            if path not in self._parts_read:
                for key in keys_of(path):
                    self._part_of_key.setdefault(key, path)
                self._parts_read.add(path)
        return set(self._part_of_key)

    def key_column(self) -> Strings:
        """As ``keys``, in one block of memory; a key that is stored twice comes twice."""
        return Strings.joined(keys_of(path) for path in self.parts())

    def counts(self, keys: Strings) -> dict[str, int]:
        """``generated_tokens``, ``tokens`` and ``cut_off`` answers of these responses."""
        return count_responses(self.parts(), keys)

    def documents(self, splits: Mapping[str, str]) -> dict[str, str]:
        """``splits`` (key of a conversation -> split) with the further documents of each conversation after it."""
        further = further_documents(self.keys())
        return {document: split for key, split in splits.items() for document in (key, *further.get(key, ()))}

    def load(self, keys: Sequence[str] | None = None, splits: Mapping[str, str] | None = None) -> list[Response]:
        """The responses of ``keys``, in that order (None: all, in the order of their keys, which no order of completion
        changes).

        ``splits`` (key -> split) overrides the stored split: which prompts are held out is a choice of the run, not of
        the response.

        Raises InputError if a key is not stored, or a part cannot be read or is damaged.
        """
        known = self.keys()
        wanted = sorted(known) if keys is None else list(keys)
        missing = [key for key in wanted if key not in known]
        if missing:
            raise InputError(
                f"{self.folder} lacks {len(missing)} of {len(wanted)} responses (the first: {missing[0][:16]}…): run "
                f"generate again"
            )
        rows: dict[str, dict[str, Any]] = {}
        asked = set(wanted)
        for path in sorted({self._part_of_key[key] for key in wanted}):
            for row in _rows(read_part(path)):
                if row["key"] in asked and self._part_of_key[row["key"]] == path:
                    rows.setdefault(row["key"], row)
        return [_from_row(rows[key], (splits or {}).get(key)) for key in wanted]

    def parts(self) -> list[Path]:
        """The files, in the order in which they were written."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if PART_NAME.fullmatch(path.name))

    def _next_number(self) -> int:
        numbers = [int(match[1]) for path in self.parts() if (match := PART_NAME.fullmatch(path.name))]
        return max(numbers, default=-1) + 1


def _to_row(response: Response) -> dict[str, Any]:
    conversation = response.conversation
    return {
        "key": response.key,
        "split": response.split,
        "finish_reason": response.finish_reason,
        "domain": response.domain,
        "input_ids": response.input_ids,
        "loss_mask": response.loss_mask,
        "id": conversation.id,
        "turns": conversation.turns,
        "system": conversation.system,
        "tools": None if conversation.tools is None else json.dumps(conversation.tools),
        "conversation_domain": conversation.domain,
        "conversation_language": conversation.language,
        "answers": conversation.answers,
        **asdict(response.sampling),
    }


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as dictionaries, token columns as numpy vectors (never as Python lists of integers)."""
    rows = table.drop_columns(["input_ids", "loss_mask"]).to_pylist()
    for name in ("input_ids", "loss_mask"):
        for row, tokens in zip(rows, table[name], strict=True):
            row[name] = np.array(tokens.values)
    return rows


def response_of_row(table: pa.Table, split: str | None = None) -> Response:
    """The response of a table of one row; ``split``: other than that it was stored with."""
    (row,) = _rows(table)
    return _from_row(row, split)


def _from_row(row: dict[str, Any], split: str | None) -> Response:
    conversation = Conversation(
        id=row["id"],
        turns=tuple(row["turns"]),
        system=row["system"],
        tools=None if row["tools"] is None else tuple(json.loads(row["tools"])),
        domain=row["conversation_domain"],
        language=row.get("conversation_language"),
        answers=None if row["answers"] is None else tuple(row["answers"]),
    )
    return Response(
        conversation=conversation,
        input_ids=row["input_ids"],
        loss_mask=row["loss_mask"],
        finish_reason=row["finish_reason"],
        sampling=Sampling(**{field.name: row[field.name] for field in fields(Sampling)}),
        domain=row["domain"],
        split=split or row["split"],
        key=row["key"],
    )
