"""The hidden states of one document in a file of its own, which vLLM's completion names: of our connector, for a
request that asked for it, or of vLLM's own (``engine.connector=stock``). The file is removed when it has been read.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

from spectrain.data.hidden_states import ShardFile, StoreMeta, TargetStates
from spectrain.data.loss_mask import mask_of_ranges, predicts_generated
from spectrain.engines.hf import stored_log_normalizer
from spectrain.engines.vllm.adopt_states import META, raise_if_given_up
from spectrain.engines.vllm.capture_plan import CapturePlan, Document
from spectrain.engines.vllm.requests import Completion
from spectrain.errors import InputError, RunError
from spectrain.target.head import TargetHead

_PATIENCE_S = 60.0  # from a completion to its file, which a thread of vLLM's writes
_POLL_S = 0.005
_LOCK = ".lock"  # of vLLM's own connector, beside each file


def read_document(completion: Completion, document: Document, plan: CapturePlan) -> TargetStates:
    """The hidden states that a completion names, without log-normalizer. Raises ``RunError`` if they do not come, or
    are of something else.
    """
    if completion.states_path is None:
        raise RunError(
            f"vLLM names no file with the hidden states of {document.key}: its hidden-states connector is not at work"
        )
    path = Path(completion.states_path)
    return _read_stock(path, document, plan) if plan.stock else _read_own(path, document, plan)


def discard_document(completion: Completion) -> None:
    """Remove the file of a completion that nobody waits for any more, if it is there."""
    if completion.states_path is not None:
        path = Path(completion.states_path)
        for file in (path, path.with_name(path.name + _LOCK)):
            with suppress(OSError):
                file.unlink(missing_ok=True)


def with_normalizer(states: TargetStates, head: TargetHead, dtype: str) -> TargetStates:
    normalizer_S = stored_log_normalizer(head, states.last_hidden, predicts_generated(states.loss_mask), dtype)
    return dataclasses.replace(states, log_normalizer=normalizer_S)


def _read_own(path: Path, document: Document, plan: CapturePlan) -> TargetStates:
    """A shard of one document, which appears when it is whole."""
    end_s = time.monotonic() + _PATIENCE_S
    while not path.is_file():
        raise_if_given_up(path.parent)
        if time.monotonic() > end_s:
            raise RunError(f"the hidden states of {document.key} did not arrive in {path} within {_PATIENCE_S:.0f} s")
        time.sleep(_POLL_S)
    try:
        shard = ShardFile.unlisted(path, plan.meta)
        _check_layout(shard, plan.meta)
        (found,) = shard.documents(0)
        states = shard.states(found)
    except (InputError, ValueError, KeyError) as error:
        raise RunError(f"{path} does not hold the hidden states of {document.key}: {error}") from error
    path.unlink()  # the map stays
    if found.key != document.key or states.input_ids.tolist() != document.ids:
        raise RunError(f"{path} holds the hidden states of other tokens than those of {document.key}")
    return dataclasses.replace(states, log_normalizer=None)


def _check_layout(shard: ShardFile, meta: StoreMeta) -> None:
    """A server that somebody else started captures what this run asks for: its layers, in its type."""
    theirs = json.loads(shard.metadata()[META])
    for name in ("tap_ids", "hidden_size", "num_layers", "dtype"):
        wanted = getattr(meta, name)
        found = tuple(theirs[name]) if isinstance(wanted, tuple) else theirs[name]
        if found != wanted:
            raise InputError(f"the server captures {name}={found}, this run needs {wanted}")


def _read_stock(path: Path, document: Document, plan: CapturePlan) -> TargetStates:
    """The file of vLLM's own connector, whose lock its writer holds."""
    lock = path.with_name(path.name + _LOCK)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # sleeps until the writer is done
        found = load_file(path)
    path.unlink()
    lock.unlink()
    if found["token_ids"].tolist() != document.ids[:-1]:
        raise RunError(f"{path} holds the hidden states of other tokens than those of {document.key}")
    states_SIH = found["hidden_states"]
    states_SIH = torch.cat([states_SIH, torch.zeros_like(states_SIH[:1])])  # the last token never ran
    mask_S = mask_of_ranges(document.generated, len(document.ids))
    ids_S = torch.tensor(document.ids, dtype=torch.int32)
    taps, last = states_SIH[:, : len(plan.meta.tap_ids)], states_SIH[:, -1]
    return TargetStates(ids_S, mask_S, taps, last, None, document.key, document.split)
