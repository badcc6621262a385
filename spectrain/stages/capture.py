"""Stage ``capture``: the target runs once over every response, and its hidden states are stored. Writes
``hidden_states/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from spectrain import signals
from spectrain.console import ProgressBar, say
from spectrain.data.asked_documents import Asked
from spectrain.data.hidden_states import ShardFile, StoredHiddenStates, bytes_per_token
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.responses import ResponseStore, further_documents
from spectrain.data.shard_damage import damaged_shards, found_damaged, stored_key_column, take_out, unverified
from spectrain.data.stored_documents import as_sequence
from spectrain.data.stored_responses import StoredResponses
from spectrain.data.string_column import Strings
from spectrain.errors import InputError, RunError
from spectrain.files import bytes_text
from spectrain.stages import array_tasks
from spectrain.stages.context import Context
from spectrain.stages.generate import generate
from spectrain.stages.run_dir import Decision, Inputs


def decide(context: Context) -> Decision:
    """Whether there is anything to capture."""

    def lacking() -> str:
        stored = stored_key_column(context.data_dir.hidden_states)
        return "" if stored.hold(asked.keys) else "outputs are missing"

    asked = asked_columns(context)
    return context.data_dir.decide("capture", Inputs(fixed_inputs(context), _growing(asked)), lacking)


def asked_columns(context: Context) -> Asked:
    """Every document of the responses that this configuration asks for."""
    return context.asked.with_further(ResponseStore(context.data_dir.responses).key_column())


def fixed_inputs(context: Context) -> dict[str, object]:
    # Named only where there are some, so that everything else that was made remains valid.
    kv = {"layers of keys and values": list(context.kv_layers)} if context.kv_layers else {}
    taps = {"drafter.taps": list(context.taps), "hidden_states.dtype": context.states_dtype}
    return {**context.target_inputs(), **taps, **kv}


def growing_inputs(context: Context) -> dict[str, object]:
    return _growing(asked_columns(context))


def _growing(asked: Asked) -> dict[str, object]:
    return {"responses": f"{len(asked)} ({asked.digest[:8]})"}


def capture(context: Context) -> None:
    """Store the hidden states of every response that has none yet; brings the responses up to date first."""
    generate(context)
    decision = decide(context)
    if decision.skip:
        say(str(decision))
        return
    run_dir = context.data_dir
    with run_dir.running(decision) as outputs:
        responses = StoredResponses(ResponseStore(run_dir.responses), asked_columns(context))
        meta = context.store_meta()
        # Buffers need be no larger than all that there is.
        total_bytes = int(responses.lengths_D.sum()) * bytes_per_token(meta)
        shard_bytes = min(context.config.hidden_states.shard_bytes, total_bytes)
        with HiddenStatesWriter(run_dir.hidden_states, meta, shard_bytes) as writer:
            if array_tasks.has_work(context):
                array_tasks.merge_states(context, writer, fixed_inputs(context))
            context.capturing.adopt_leftovers(writer, responses)
            _capture(context, writer, responses, shard_bytes)
        store = StoredHiddenStates(run_dir.hidden_states)
        outputs |= {
            "documents": len(store),
            "tokens": int(store.lengths.sum()),
            "bytes": store.total_bytes,
            "taps": list(context.taps),
        }
    say(
        f"capture: hidden states of {outputs['documents']} documents, {outputs['tokens']:,} tokens, "
        f"{bytes_text(outputs['bytes'])}"
    )


def _capture(context: Context, writer: HiddenStatesWriter, responses: StoredResponses, shard_bytes: int) -> None:
    """What the writer's store lacks."""
    missing = writer.done_column().places_of(responses.asked.keys) < 0
    if not missing.any():
        return
    total, left = int(responses.lengths_D.sum()), int(responses.lengths_D[missing].sum())

    def keep() -> str:
        writer.flush()
        kept = int((writer.done_column().places_of(context.asked.keys) >= 0).sum())
        return f"hidden states of {kept} of {len(responses)} documents are stored; {signals.CONTINUES}"

    with signals.keeping(keep), ProgressBar("capture", total=total, unit="tokens", done=total - left) as bar:
        if context.config.engine.name != "hf":
            todo = [responses[number] for number in np.flatnonzero(missing).tolist()]
            context.capturing.shards(writer, todo, shard_bytes, bar.advance)
            return
        layers, stored = context.kv_layers, writer.done_keys()
        for states in context.engine.capture(responses, context.taps, context.states_dtype, stored, layers):
            with signals.held():
                writer.add(states)
            bar.advance(len(states.input_ids))
        with signals.held():
            keep()


def verify(context: Context) -> bool:
    """Compare the shards of this run's documents with their checksums, those that have changed since it was last done.
    What is damaged is taken out of the store, and its documents, no others, are captured again. Returns whether there
    is too much to be compared now (``hidden_states.verify_at_start_bytes``), so that it is left to those who read.

    Raises InputError where that is for another process to do, as the store is that of a sweep.
    """
    damaged, later = _take_out_damaged(context)
    if not damaged:
        return later
    if not context.data_dir.writable:
        raise InputError(
            f"damaged hidden states were taken out of {context.data_dir.hidden_states}: the same command captures them "
            f"again"
        )
    capture(context)
    damaged, later = _take_out_damaged(context)
    if damaged:
        raise RunError(f"{context.data_dir.hidden_states} does not keep what is written to it: use another disk")
    return later


def _take_out_damaged(context: Context) -> tuple[bool, bool]:
    """(whether some were damaged, whether some were left to be compared later)."""
    run_dir, folder = context.data_dir, context.data_dir.hidden_states
    store, train, heldout = documents(context)
    unknown = unverified(folder, store.shards_of(np.concatenate([train, heldout])))
    later = sum(shard.record.bytes for shard in unknown) > context.config.hidden_states.verify_at_start_bytes
    damaged = _damaged(folder, found_damaged(folder, unknown) if later else unknown)
    if not damaged:
        return False, later
    for name in damaged:
        say(f"capture: {folder / name} does not have the checksum of the index: its documents are captured again")
    with nullcontext() if run_dir.writable else run_dir.locked():
        take_out(folder, damaged)
    return True, later


def _damaged(folder: Path, unknown: Sequence[ShardFile]) -> dict[str, str]:
    """The damaged ones of these shards: name -> what is wrong."""
    if not unknown:
        return {}
    with ProgressBar("verify", total=sum(shard.record.bytes for shard in unknown), unit="bytes") as bar:
        return damaged_shards(folder, unknown, bar.advance)


def documents(context: Context) -> tuple[StoredHiddenStates, Sequence[int], Sequence[int]]:
    """The store and the numbers of its training and held-out documents that this run asks for, in the order of the
    prompt files.

    The order does not depend on when a document was captured, nor the choice on what else the store holds.
    """
    store = StoredHiddenStates(context.data_dir.hidden_states)
    store.check(_identity(context, context.taps, context.kv_layers))
    asked = asked_columns(context)
    numbers_D = store.keys.places_of(asked.keys)
    if (numbers_D < 0).any():
        raise InputError(
            f"{store.folder} lacks {int((numbers_D < 0).sum())} of {len(asked)} documents: run spectrain capture first"
        )
    train, heldout = (as_sequence(numbers_D[own_D]) for own_D in (~asked.heldout_D, asked.heldout_D))
    return store, train, heldout


def open_store(
    context: Context, taps: tuple[int, ...], kv_layers: tuple[int, ...], keys: Sequence[str]
) -> tuple[StoredHiddenStates, list[int]] | None:
    """The stored hidden states and the numbers of the documents of responses ``keys``, if they are this target's, hold
    these taps, keys and values of these layers, and all these documents, and are not damaged.
    """
    folder = context.data_dir.hidden_states
    try:
        store = StoredHiddenStates(folder)
    except InputError as error:
        say(str(error))
        return None
    try:
        store.check(_identity(context, taps, kv_layers))
    except InputError:
        return None
    if not store.keys.hold(Strings(keys)):
        return None
    further = further_documents(store.keys.containing("-"))
    every = Strings(document for key in keys for document in (key, *further.get(key, ())))
    found = store.keys.places_of(every).tolist()
    verifies = context.config.hidden_states.verify_checksums
    damaged = _damaged(folder, unverified(folder, store.shards_of(found))) if verifies else {}
    for problem in damaged.values():
        say(problem)
    return None if damaged else (store, found)


def _identity(context: Context, taps: tuple[int, ...], kv_layers: tuple[int, ...]) -> dict[str, object]:
    shapes = tuple((layer, *context.spec.kv_shape(layer)) for layer in kv_layers)
    target = {"target": context.target.id, "target_revision": context.target.revision}
    return {**target, "tap_ids": taps, "kv_layers": shapes}
