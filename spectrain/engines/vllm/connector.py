"""Inside vLLM: captured hidden states go straight into shards of the store, in memory and on disk.

vLLM's ``extract_hidden_states`` keeps the residual stream of chosen layers as one more group of its KV cache. This
class is a KV connector, vLLM's own extension point for what happens to such a cache (``kv_connector_module_path``).
When a request that carries a document's description has finished, the scheduler's half tells the worker's half which
blocks hold its hidden states; the worker copies them out, on a stream of their own where there is a GPU, and a thread
encodes them into the shard being gathered (``shard_thread.py``). The blocks are free again as soon as the copy is done.

A request describes its document in ``kv_transfer_params``; requests without a description are not stored:
``{"spectrain": {"key", "split", "generated": [[start, end), ...], "last_id": int or None}}``.
A document is the prompt and ``last_id``, or, where that is None, the prompt and the answer: so it is generated and
captured in one pass. ``generated`` are the ranges that the target generated, without that answer. With ``"file":
name`` the document gets a file of its own, ``name.safetensors`` in the folder of the shards, and the reply says where
(``kv_transfer_params.hidden_states_path``, as with vLLM's own connector).

The last token of a document never runs, so it has no hidden states: its row is stored as zeros. No drafter reads the
last row of a document, since what it would predict from there lies outside the document.

Every worker that holds the hidden states writes shards of its own: the first tensor-parallel rank of each replica, on
the last pipeline stage.

Legend: S tokens of a document, I captured layers (the taps in ascending order, then the last layer unless it is the
last tap), H hidden.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec
from vllm.v1.request import RequestStatus

from spectrain.data.hidden_states import StoreMeta
from spectrain.data.loss_mask import mask_of_ranges
from spectrain.engines.vllm.adopt_states import PARAMS
from spectrain.engines.vllm.shard_thread import CopiedDocument, ShardWriter

_FILE = re.compile(r"[A-Za-z0-9_-]{1,200}")  # a request must not choose another folder
_ANSWERED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass(frozen=True)
class FinishedDocument:
    """A document whose hidden states lie in the cache, but for those of the last token."""

    request_id: str
    key: str
    split: str
    ids: list[int]
    generated: list[tuple[int, int]]
    block_ids: list[int]
    file: str | None = None


@dataclass
class StatesMetadata(KVConnectorMetadata):
    """From the scheduler to the workers, once a step."""

    finished: list[FinishedDocument] = field(default_factory=list)


class StatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Options in ``kv_connector_extra_config``: ``incoming`` (folder for finished shards), ``meta`` (the store's
    ``StoreMeta`` as a dictionary) and ``shard_bytes``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._incoming = Path(options["incoming"])
        self._shard_bytes = int(options["shard_bytes"])
        self._meta = StoreMeta(**options["meta"])
        self._group = _states_group(kv_cache_config)
        self._block_tokens: int = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        self._finished: list[FinishedDocument] = []  # scheduler: not told to the workers yet
        self._cache: Tensor | None = None  # worker: [blocks, I, block tokens, H]; None where this worker holds none
        self._writer: ShardWriter | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copies: dict[str, torch.cuda.Event | None] = {}  # by request: when its copy is done; None: it is

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False  # nothing is ever loaded

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks must be kept until their hidden states are copied."""
        params = (request.kv_transfer_params or {}).get(PARAMS)
        if params is None or request.status not in _ANSWERED:
            return False, None
        generated = [(int(start), int(end)) for start, end in params["generated"]]
        if params["last_id"] is None:
            ids = list(request.all_token_ids)
            generated.append((request.num_prompt_tokens, len(ids)))
        else:
            ids = [*request.prompt_token_ids, int(params["last_id"])]
        blocks, file = list(block_ids[self._group]), params.get("file")
        if file is not None and not _FILE.fullmatch(file):
            return False, None
        document = (request.request_id, params["key"], params["split"], ids, generated, blocks, file)
        self._finished.append(FinishedDocument(*document))
        path = None if file is None else str(self._incoming / f"{file}.safetensors")
        return True, None if path is None else {"hidden_states_path": path}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        finished, self._finished = self._finished, []
        return StatesMetadata(finished)

    # The workers' half.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if not layers:
            return  # an earlier pipeline stage
        cache = kv_caches[next(iter(layers))]
        captured = len(set(self._meta.tap_ids)) + self._last_is_extra(cache)
        if (
            cache.shape[2] != self._block_tokens
            or cache.shape[1] != captured
            or cache.shape[3] != self._meta.hidden_size
        ):
            expected = ("blocks", captured, self._block_tokens, self._meta.hidden_size)
            raise ValueError(f"the cache of hidden states has shape {tuple(cache.shape)}, expected {expected}")
        if get_tensor_model_parallel_rank() == 0:  # the other ranks hold the same
            self._cache = cache
            self._writer = ShardWriter(self._incoming, self._meta, self._shard_bytes)
            self._stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return  # those of a document are copied together when it is finished

    def wait_for_save(self) -> None:
        return

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Begin the copies that the scheduler asked for; the requests whose copies are done."""
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            for document in metadata.finished if isinstance(metadata, StatesMetadata) else ():
                self._copy(document)
        done = {request for request, event in self._copies.items() if event is None or event.query()}
        for request in done:
            del self._copies[request]
        return done or None, None

    def shutdown(self) -> None:
        """At an orderly end what was gathered is written too."""
        if self._writer is not None:
            self._writer.close()

    def get_finished_count(self) -> int:
        return 1  # one worker of a replica reports a request, however many there are

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """GPU: all hidden states of a token together, whatever attention layers prefer. CPU: there is one layout."""
        return None if current_platform.is_cpu() else "LBNHC"

    def _last_is_extra(self, cache: Tensor) -> int:
        """1 if the last layer's output is captured beside the taps, 0 if it is one of them."""
        layers = self._vllm_config.model_config.get_total_num_hidden_layers()
        return int(layers not in self._meta.tap_ids)

    def _copy(self, document: FinishedDocument) -> None:
        """Copy a document's hidden states out of the cache, [S, I, H]; the row of a token that never ran is zero."""
        if self._cache is None or self._writer is None:
            return
        length, computed = len(document.ids), len(document.ids) - 1
        slots_S = _slots(document.block_ids, self._block_tokens, computed)
        if self._stream is None:
            states_SIH = self._cache.new_zeros(length, self._cache.shape[1], self._cache.shape[3])
            states_SIH[:computed] = self._cache[slots_S // self._block_tokens, :, slots_S % self._block_tokens]
            event = None
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))  # they are written there
            with torch.cuda.stream(self._stream):
                slots_S = slots_S.pin_memory().to(self._cache.device, non_blocking=True)
                gathered_SIH = self._cache[slots_S // self._block_tokens, :, slots_S % self._block_tokens]
                states_SIH = torch.zeros(length, *gathered_SIH.shape[1:], dtype=gathered_SIH.dtype, pin_memory=True)
                states_SIH[:computed].copy_(gathered_SIH, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
        self._copies[document.request_id] = event
        mask_S = mask_of_ranges(document.generated, length)
        ids_S = torch.tensor(document.ids, dtype=torch.int32)
        states = (ids_S, mask_S, states_SIH, event)
        self._writer.put(CopiedDocument(document.key, document.split, *states, document.file))


def _states_group(kv_cache_config: Any) -> int:
    """Which group of the KV cache holds the hidden states; where all layers have pages of one size, there is only one
    group.
    """
    all_groups = kv_cache_config.kv_cache_groups
    groups = [n for n, group in enumerate(all_groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if not groups and len(all_groups) == 1:
        return 0
    if len(groups) != 1:
        raise ValueError(f"{len(groups)} of {len(all_groups)} groups of the KV cache hold hidden states, expected one")
    return groups[0]


def _slots(block_ids: list[int], block_tokens: int, count: int) -> Tensor:
    """The first ``count`` token slots of a block table, [count]."""
    slots_BT = torch.tensor(block_ids)[:, None] * block_tokens + torch.arange(block_tokens)
    return slots_BT.flatten()[:count]
