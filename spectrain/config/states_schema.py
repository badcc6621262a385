"""Configuration of where training gets the target's hidden states from (group ``states``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spectrain.config.keys import Section, key

_MOST_BYTES = 1 << 50


@dataclass(frozen=True)
class StatesConfig(Section, name="states"):
    """Where training gets hidden states from (group ``states``). What they are stored as, whoever stores them, is
    ``hidden_states``."""

    source: Literal["stored", "online", "inprocess", "cached"] = key(
        "stored",
        "stored: captured first, read from disk; online: asked of vLLM while training, nothing stays; inprocess: "
        "computed by transformers beside the drafter, nothing is written; cached: online (engine=hf: inprocess) where "
        "states.cache_bytes of disk do not hold them",
    )
    cache_bytes: int = key(
        1 << 36, "cached: bytes on disk for hidden states; the oldest make room", at_least=1, at_most=_MOST_BYTES
    )
    memory_bytes: int = key(
        1 << 30,
        "inprocess: bytes of memory, a rank, for documents that were computed together with one that was asked for",
        at_least=0,
        at_most=_MOST_BYTES,
    )
    requests_ahead: int = key(
        32,
        "online: documents, a rank, that are asked for or wait to be read at a time",
        at_least=1,
        at_most=1 << 16,
    )
    retries: int = key(
        2,
        "online, inprocess, cached: times that a document is asked for again before training ends with its id",
        at_least=0,
        at_most=1000,
    )
