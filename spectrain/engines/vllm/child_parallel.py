"""The host's loop where vLLM runs several replicas (``data_parallel_size`` > 1), which its own asynchronous engine
keeps supplied.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from spectrain.engines.vllm.child import Channel, answer, ready, sampling_params


def serve_ranks(channel: Channel, first: dict[str, Any]) -> None:
    """Take requests and report answers until the parent wants no more."""
    asyncio.run(_serve(channel, first))


async def _serve(channel: Channel, first: dict[str, Any]) -> None:
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**first["args"]), usage_context=UsageContext.LLM_CLASS)
    channel.report(**ready(vllm.__version__, engine.vllm_config))
    loop, tasks = asyncio.get_running_loop(), set()
    while True:
        order = await loop.run_in_executor(None, channel.orders.get)
        if order is None:
            break
        task = asyncio.create_task(_answer(engine, channel, order["request"]))
        tasks.add(task)
        task.add_done_callback(lambda done: _finish(done, tasks, channel))
    for task in tasks:
        task.cancel()
    engine.shutdown()


async def _answer(engine: Any, channel: Channel, request: dict[str, Any]) -> None:
    from vllm.exceptions import VLLMValidationError

    start_s = time.monotonic()
    try:
        final = None
        async for output in engine.generate(
            {"prompt_token_ids": request["prompt_ids"]}, sampling_params(request), request["id"]
        ):
            final = output
    except (ValueError, TypeError, VLLMValidationError) as error:
        channel.report(refused=request["id"], reason=str(error))
        return
    channel.report(answers=[answer(final, time.monotonic() - start_s, None)])


def _finish(done: asyncio.Task[None], tasks: set[asyncio.Task[None]], channel: Channel) -> None:
    """An engine that fails fails every request: the first one ends this process, whose log then says why."""
    tasks.discard(done)
    if not done.cancelled() and (error := done.exception()) is not None:
        channel.fail(error)
