"""Hidden states of whole documents from a target that vLLM runs.

A vLLM that captures has two options: speculation by ``extract_hidden_states``, which keeps the residual stream of
chosen layers in the cache, and a KV connector that takes it from there. Ours (``connector.py``) writes whole shards,
which are adopted while vLLM works on; vLLM's own (``engine.connector=stock``) writes a file per request, which is read
and deleted. A training that asks while it trains (``online_states.py``) gets a file per document of either.

A document is sent without its last token and asked for one token, because vLLM cannot prefill without generating. So
the last token's hidden states are never computed: its row is zeros, and no drafter reads it (see ``connector.py``).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.hidden_states import StoreMeta, TargetStates
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.responses import Response
from spectrain.engines.check_states import CheckDocument, SelfCheck, check_prefixes
from spectrain.engines.vllm.adopt_states import (
    Adopter,
    AdoptionThread,
    Session,
    has_leftovers,
    remove_leftovers,
)
from spectrain.engines.vllm.capture_plan import CapturePlan, Document
from spectrain.engines.vllm.document_files import read_document, with_normalizer
from spectrain.engines.vllm.requests import OpenVLLM, VLLMClient, completions, completions_in_order
from spectrain.errors import RunError
from spectrain.target.head import TargetHead
from spectrain.target.model import choose_device
from spectrain.target.resolve import ResolvedTarget
from spectrain.target.spec import TargetSpec

_FLUSH_S, _PATIENCE_S = 1.0, 60.0
_ATTEMPTS = 3  # to have a document's hidden states
_HEADROOM_BYTES = 1 << 30


class VLLMCapture:
    """Captures with vLLMs that ``open_vllm`` opens.

    Args:
        resolved, spec: the target, for the self-check and the log-normalizer.
    """

    def __init__(
        self,
        open_vllm: OpenVLLM,
        engine: EngineConfig,
        target: TargetConfig,
        resolved: ResolvedTarget,
        spec: TargetSpec,
    ) -> None:
        self._open_vllm = open_vllm
        self._engine = engine
        self._target = target
        self._resolved = resolved
        self._spec = spec
        self._stock = engine.connector == "stock"

    def adopt_leftovers(self, writer: HiddenStatesWriter, responses: Sequence[Response]) -> int:
        """Adopt shards left by an earlier vLLM, in one pass with generation or before a kill. Returns their tokens."""
        if not has_leftovers(writer.folder):
            remove_leftovers(writer.folder)
            return 0
        return Adopter(writer, self._head(), _by_key(responses)).adopt_leftovers()

    def shards(
        self,
        writer: HiddenStatesWriter,
        responses: Sequence[Response],
        shard_bytes: int,
        on_tokens: Callable[[int], None],
    ) -> None:
        """Capture the hidden states of ``responses`` into the store of ``writer``. ``on_tokens`` hears how many went
        through the target.

        After a kill what vLLM had not written yet is captured again; shards that it had written are leftovers for the
        next time. Raises ``RunError`` if the self-check fails, a hidden state is not finite, vLLM dies or hidden states
        do not arrive.
        """
        plan = self.plan(writer.meta, shard_bytes)
        ordered = sorted(responses, key=lambda response: (-len(response.input_ids), response.key))
        missing: set[str] = set()
        with self.running(plan, writer.folder, "capture", map(_name_and_ids, ordered)) as (client, session):
            if self._stock:
                for states in self._from_files(client, plan, self._head(), ordered):
                    writer.add(states)
                    on_tokens(len(states.input_ids))
            else:
                # Without room, shards are adopted when vLLM is gone.
                adopter = Adopter(writer, self._head(), _by_key(ordered)) if self._has_room() else None
                missing = _through_shards(client, session, adopter, ordered, on_tokens)
        self.adopt_leftovers(writer, ordered)
        session.remove()
        if missing:
            raise RunError(
                f"hidden states of {len(missing)} documents did not arrive from vLLM: run the same command again to "
                f"capture them"
            )

    def documents(
        self, tap_ids: tuple[int, ...], dtype: str, responses: Sequence[Response], folder: Path
    ) -> Iterator[TargetStates]:
        """The same without a store: one document at a time, with log-normalizer. ``folder``: where shards may lie
        meanwhile.
        """
        hidden, layers = self._spec.hidden_size, self._spec.num_layers
        meta = StoreMeta(self._resolved.id, self._resolved.revision, "", "", "", tap_ids, hidden, layers, dtype)
        plan = self.plan(meta, 1 << 28)
        with self.running(plan, folder, "capture", map(_name_and_ids, responses)) as (client, session):
            if self._stock:
                yield from self._from_files(client, plan, self._head(), responses)
                return
            for _ in completions(client, (Document.of(response).request() for response in responses)):
                session.check()
            if await_arrival(session, {response.key for response in responses}):
                raise RunError(f"not all hidden states arrived in {session.folder}")
        head = self._head()
        for path in session.shards():
            for states in session.take(path):
                yield with_normalizer(states, head, meta.dtype)
        session.remove()

    @contextmanager
    def asking(self, meta: StoreMeta, responses: Sequence[Response], folder: Path) -> Iterator[VLLMClient]:
        """A vLLM that writes a file for each document it is asked for, below ``folder`` unless it runs already; checked
        with the shortest of ``responses``, and closed at the end, with what nobody has read.
        """
        plan = self.plan(meta, 1 << 26, apart=True)
        remove_leftovers(folder)
        try:
            with self.running(plan, folder, "fit", map(_name_and_ids, responses)) as (client, _):
                yield client
        finally:
            remove_leftovers(folder)

    def plan(self, meta: StoreMeta, shard_bytes: int, apart: bool = False) -> CapturePlan:
        return CapturePlan(meta, self._spec.num_layers, shard_bytes, self._stock, apart)

    @contextmanager
    def running(
        self, plan: CapturePlan, folder: Path, purpose: str, documents: Iterable[tuple[str, list[int]]]
    ) -> Iterator[tuple[VLLMClient, Session]]:
        """A vLLM that captures into ``folder``, checked with the shortest of ``documents``; closed at the end."""
        check = SelfCheck(self._engine, self._target, self._resolved, plan.meta.tap_ids, plan.meta.dtype)
        check_with = [Document(name, "train", ids, []) for name, ids in check_prefixes(documents)]
        check.prepare([document.ids for document in check_with])
        session = Session(folder, plan.meta)
        runs_already = plan.apart and self._engine.name == "vllm_server" and self._engine.urls
        with self._open_vllm(purpose, {} if runs_already else plan.engine_args(session)) as client:
            _check_client(check, client, session, plan, check_with)
            yield client, session

    def head_beside(self) -> TargetHead:
        """The target's head in float32 while vLLM runs: on a GPU if there is room, else on the CPU."""
        device = self._roomiest() if self._has_room() else torch.device("cpu")
        return TargetHead.from_checkpoint(self._resolved.folder, torch.float32, device, self._target.trust_remote_code)

    def _head(self) -> TargetHead:
        """The target's head in float32, on the GPU with the most room if the target runs on one."""
        device = self._roomiest()
        return TargetHead.from_checkpoint(self._resolved.folder, torch.float32, device, self._target.trust_remote_code)

    def _has_room(self) -> bool:
        """Whether the head can lie beside vLLM, which may have taken the memory of all GPUs."""
        device = self._roomiest()
        needed = 2 * 4 * self._spec.vocab_size * self._spec.hidden_size  # embedding and head
        return device.type == "cpu" or torch.cuda.mem_get_info(device)[0] > needed + _HEADROOM_BYTES

    def _roomiest(self) -> torch.device:
        device = choose_device(self._target.device)
        if device.type != "cuda":
            return device
        return torch.device(
            "cuda", max(range(torch.cuda.device_count()), key=lambda number: torch.cuda.mem_get_info(number)[0])
        )

    def _from_files(
        self, client: VLLMClient, plan: CapturePlan, head: TargetHead, responses: Sequence[Response]
    ) -> Iterator[TargetStates]:
        documents = {response.key: Document.of(response) for response in responses}
        for completion in completions(client, (document.request() for document in documents.values())):
            states = read_document(completion, documents[completion.id], plan)
            yield with_normalizer(states, head, plan.meta.dtype)


def await_arrival(session: Session, keys: set[str]) -> set[str]:
    """Have everything written and wait for these documents. Returns those that did not come although nothing else did
    for a minute.
    """
    missing, last_s, flushed_s = keys - session.arrived(), time.monotonic(), -_FLUSH_S
    while missing and time.monotonic() - last_s < _PATIENCE_S:
        session.check()
        # Asked for again and again: vLLM hands a document over a step after it has reported the completion.
        if time.monotonic() - flushed_s >= _FLUSH_S:
            session.flush()
            flushed_s = time.monotonic()
        time.sleep(0.02)
        still = keys - session.arrived()
        if len(still) < len(missing):
            missing, last_s = still, time.monotonic()
    return missing


def _through_shards(
    client: VLLMClient,
    session: Session,
    adopter: Adopter | None,
    responses: Sequence[Response],
    on_tokens: Callable[[int], None],
) -> set[str]:
    """Send the documents, and adopt shards beside if there is an adopter. Returns the keys of documents that did not
    arrive.

    A server that dies takes with it what it had computed and not written yet: what does not arrive is sent again.
    """
    lengths = {response.key: len(response.input_ids) for response in responses}
    missing, counted = set(lengths), set[str]()
    with AdoptionThread(session, adopter) as adoption:
        for _ in range(_ATTEMPTS):
            again = (Document.of(response).request() for response in responses if response.key in missing)
            for completion in completions(client, again):
                if completion.id not in counted:
                    counted.add(completion.id)
                    on_tokens(lengths[completion.id])
                adoption.look()
            missing = await_arrival(session, missing)
            if not missing:
                break
    return missing


def _check_client(
    check: SelfCheck, client: VLLMClient, session: Session, plan: CapturePlan, documents: Sequence[Document]
) -> None:
    """Send the documents that ``check`` was prepared with, and compare what comes back. Nothing of it stays."""
    if check.method == "off":
        return
    names = [f"check-{uuid.uuid4().hex[:12]}" if plan.apart else None for _ in documents]
    found = completions_in_order(client, [d.request(name) for d, name in zip(documents, names, strict=True)])
    if plan.stock or plan.apart:
        states = [read_document(*pair, plan) for pair in zip(found, documents, strict=True)]
    else:
        if await_arrival(session, {document.key for document in documents}):
            raise RunError(
                f"hidden states of the self-check did not arrive in {session.folder} within {_PATIENCE_S:.0f} s"
            )
        by_key = {document.key: document for path in session.shards() for document in session.take(path)}
        states = [by_key[document.key] for document in documents]
    check.compare([CheckDocument(*pair) for pair in zip(states, (one.ids[0] for one in found), strict=True)])


def _by_key(responses: Iterable[Response]) -> dict[str, Response]:
    return {response.key: response for response in responses}


def _name_and_ids(response: Response) -> tuple[str, list[int]]:
    return response.key, response.input_ids.tolist()
