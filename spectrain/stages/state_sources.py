"""Where training gets hidden states from (``states.source``): the store, the target beside the drafter, or vLLM.

All of them are a ``HiddenStateSource`` over the same documents in the same order, so whoever reads them does not know.
What is computed while training asks for it, is computed for each rank by itself: in process every rank has its target;
vLLM's servers are started by the first rank, and all ask them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spectrain.config.schema import SpectrainConfig
from spectrain.data.computed_states import Asker, ComputedHiddenStates, Keep, KeptInMemory
from spectrain.data.hidden_states import HiddenStateSource
from spectrain.data.responses import Response, ResponseStore, further_documents
from spectrain.data.states_cache import KeptOnDisk
from spectrain.errors import RunError
from spectrain.stages import capture
from spectrain.stages.context import Context
from spectrain.stages.generate import generate

if TYPE_CHECKING:
    from spectrain.drafters.drafter import Drafter
    from spectrain.engines.vllm.requests import VLLMClient

CACHE = "states_cache"  # folder of a run


def bring_up_to_date(context: Context) -> None:
    """All that has to be there before training asks for hidden states."""
    if context.config.states_computed:
        generate(context)
    else:
        capture.capture(context)


@contextmanager
def opened(context: Context) -> Iterator[tuple[HiddenStateSource, Sequence[int], Sequence[int]]]:
    """The source and the numbers of its training and held-out documents, in the order of the prompt files. Every rank
    opens it, at the same time.
    """
    if not context.config.states_computed:
        yield capture.documents(context)
        return
    splits = dict(capture.asked_columns(context).splits())
    responses = _responses(context)
    with _asker(context, responses) as asker:
        states = context.config.states
        source = ComputedHiddenStates(responses, asker, _keep(context), context.store_meta(), states.retries)
        number = {key: index for index, key in enumerate(source.keys)}
        train, heldout = ([number[key] for key, side in splits.items() if side == s] for s in ("train", "heldout"))
        yield source, train, heldout


def computed_for(context: Context, drafter: Drafter, keys: Sequence[str]) -> tuple[HiddenStateSource, list[int]] | None:
    """What ``capture.open_store`` gives, where training computed hidden states in this process and nothing is stored:
    computed again. None if that is not how they were had, or if not all of the responses ``keys`` are there.
    """
    if context.config.states_computed != "inprocess" or context.config.engine.name != "hf":
        return None
    splits = dict(capture.asked_columns(context).splits())
    stored = ResponseStore(context.data_dir.responses).keys()
    if any(key not in splits for key in keys) or not splits.keys() <= stored:
        return None
    responses = _responses(context)
    meta = replace(context.store_meta(), tap_ids=drafter.taps)
    asker = _in_process(context, responses, drafter.taps, drafter.kv_layers)
    keep = KeptInMemory(meta, context.config.states.memory_bytes)
    source = ComputedHiddenStates(responses, asker, keep, meta, context.config.states.retries)
    number = {key: index for index, key in enumerate(source.keys)}
    further = further_documents(source.keys)
    return source, [number[document] for key in keys for document in (key, *further.get(key, ()))]


def _responses(context: Context) -> list[Response]:
    splits = dict(capture.asked_columns(context).splits())
    return ResponseStore(context.data_dir.responses).load(list(splits), splits)


def _keep(context: Context) -> Keep:
    states, ranks = context.config.states, context.ranks
    if states.source != "cached":
        # What vLLM tells comes one document at a time: nothing that was not asked for comes along.
        budget = states.memory_bytes if context.config.states_computed == "inprocess" else 0
        return KeptInMemory(context.store_meta(), budget)
    folder, place = context.run_dir.path / CACHE, (ranks.index, ranks.count)
    return ranks.first_then_all(lambda: KeptOnDisk(folder, context.store_meta(), states.cache_bytes, place))


@contextmanager
def _asker(context: Context, responses: Sequence[Response]) -> Iterator[Asker]:
    if context.config.states_computed == "inprocess":
        yield _in_process(context, responses, context.taps, context.kv_layers)
        return
    with _online(context, responses) as asker:
        yield asker


def _in_process(
    context: Context, responses: Sequence[Response], taps: tuple[int, ...], kv_layers: tuple[int, ...]
) -> Asker:
    from spectrain.engines.inprocess_states import InProcessStates

    what = (taps, kv_layers, context.config.engine.capture_tokens, context.states_dtype)
    return InProcessStates(context.model, context.target, responses, *what)


@contextmanager
def _online(context: Context, responses: Sequence[Response]) -> Iterator[Asker]:
    from spectrain.engines.vllm.capture_states import VLLMCapture
    from spectrain.engines.vllm.online_states import OnlineStates
    from spectrain.engines.vllm.open_vllm import as_server, open_vllm

    config, ranks = context.config, context.ranks
    engine = config.engine if ranks.count == 1 else as_server(config.engine)
    opener = partial(open_vllm, engine, config.target, context.target.folder, context.logs)
    capturing = VLLMCapture(opener, engine, config.target, context.target, context.spec)
    meta = context.store_meta()
    with ExitStack() as stack:
        started: list[VLLMClient] = []

        def start() -> list[tuple[str, str, int, str | None]]:
            client = stack.enter_context(capturing.asking(meta, responses, context.run_dir.path))
            started.append(client)
            return [] if ranks.count == 1 else _addresses(client)

        addresses = ranks.from_first(start)
        client = started[0] if started else stack.enter_context(_pool(context, addresses))
        ahead, timeout_s = config.states.requests_ahead, engine.request_timeout_s
        plan = capturing.plan(meta, 0, apart=True)
        with closing(OnlineStates(client, plan, capturing.head_beside(), ahead, timeout_s)) as asker:
            yield asker
        ranks.wait()  # for all who still ask


def _addresses(client: VLLMClient) -> list[tuple[str, str, int, str | None]]:
    """Of a pool: name, model, concurrency and socket of each server, for other ranks."""
    from spectrain.engines.vllm.servers import ServerPool

    assert isinstance(client, ServerPool)
    others = [endpoint.elsewhere() for endpoint in client.endpoints]
    return [(other.name, other.model, other.concurrency, other.socket) for other in others]


def _pool(context: Context, addresses: Sequence[tuple[str, str, int, str | None]]) -> VLLMClient:
    """Of a rank that has started none of the servers. Raises RunError where it cannot reach them."""
    from spectrain.engines.vllm.servers import Endpoint, ServerPool

    engine = context.config.engine
    for name, _, _, socket in addresses:
        if socket is not None and not Path(socket).exists():
            raise RunError(
                f"states.source={context.config.states.source}: {name}, which the first rank has started, cannot be "
                f"reached from this machine: start servers on ports and name them in engine.urls"
            )
    endpoints = [Endpoint(name, model, places, socket=socket) for name, model, places, socket in addresses]
    return ServerPool(endpoints, engine.retries, engine.request_timeout_s, engine.startup_timeout_s)


def without_workers(config: SpectrainConfig) -> SpectrainConfig:
    """Batches are made in this process, where whoever runs the target is, unless they come from a store."""
    return config if not config.states_computed else replace(config, trainer=replace(config.trainer, loader_workers=0))
