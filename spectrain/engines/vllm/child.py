"""vLLM in a process of its own: ``python -m spectrain.engines.vllm.child``, started by ``process.py``, which says why.

Orders come as JSON lines on standard input, reports go as JSON lines to the descriptor named on the command line;
standard output and error are the log. Token ids in, token ids out: no text is made, and no tokenizer is loaded.

Orders:   {"args": …, "record_rounds": …}  first;  {"request": {…}}  as in ``requests.Request``;  end of input: stop.
Reports:  {"max_num_seqs": …}  when vLLM is up;  {"completions": […]};  {"refused": id, "reason": …}.

When the parent dies, the pipe ends, and this process takes its whole group with it, vLLM's own workers included. (A
death signal from the kernel would kill this process before it could, and leave the workers.)
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any, TextIO

_POLL_S = 1.0
_GRACE_S = 10.0  # for vLLM to end by itself; it may be anywhere: loading, compiling, in a long step


class Channel:
    """Orders in, reports out. ``orders`` ends with None when the parent has closed its end, or is gone."""

    def __init__(self, orders: TextIO, reports: TextIO) -> None:
        self._orders = orders
        self._reports = reports
        self.orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._watch_parent, args=(os.getppid(),), daemon=True).start()

    def report(self, **content: Any) -> None:
        self._reports.write(json.dumps(content, separators=(",", ":")) + "\n")
        self._reports.flush()

    def fail(self, error: BaseException) -> None:
        """End this process; the log shows why."""
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)  # the parent ends the rest of the group

    def _read(self) -> None:
        with suppress(ValueError):  # half a line: the parent died while writing it
            for line in self._orders:
                self.orders.put(json.loads(line))
        self._end()

    def _watch_parent(self, parent: int) -> None:
        """The pipe alone does not tell: another child of the parent may have inherited its end."""
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        self._end()

    def _end(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        self.orders.put(None)
        time.sleep(_GRACE_S)
        os.killpg(os.getpgrp(), signal.SIGKILL)


class Speculation:
    """The drafts of each request's rounds, read from the scheduler around every step (in process, without asynchronous
    scheduling).
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._proposed: list[tuple[Any, int, list[int]]] = []  # (request, generated tokens before the step, drafts)
        self._rounds: dict[str, list[list[int]]] = {}

    def before_step(self) -> None:
        """Record what the step is going to verify."""
        self._proposed = [
            (request, request.num_output_tokens, self._drafts(request))
            for request in self._scheduler.running
            if request.spec_token_ids
        ]

    def _drafts(self, request: Any) -> list[int]:
        drafts = list(request.spec_token_ids)
        if -1 not in drafts:
            return drafts
        # vLLM's second model runner keeps the drafts on the device and tells the scheduler only how many they are.
        states = self._core.model_executor.driver_worker.worker.model_runner.req_states
        return states.draft_tokens[states.req_id_to_index[request.request_id], : len(drafts)].tolist()

    def after_step(self) -> None:
        """A request that has new tokens now had its drafts verified; another one was not in this step."""
        for request, before, drafts in self._proposed:
            if request.num_output_tokens > before:
                self._rounds.setdefault(request.request_id, []).append(drafts)

    def take(self, internal_id: str) -> list[list[int]]:
        """Drafts of all rounds of a finished request."""
        return self._rounds.pop(internal_id, [])


def main() -> None:
    """Runs until the parent wants no more, is gone, or vLLM fails; never returns to a half-ended vLLM."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm warns all processes of a step: the parent ends this one
    channel = Channel(sys.stdin, os.fdopen(int(sys.argv[1]), "w", encoding="utf-8"))
    first = channel.orders.get()
    try:
        if first is not None:
            serve(channel, first)
    except Exception as error:
        channel.fail(error)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # what vLLM leaves behind ends here, whatever state it is in


def serve(channel: Channel, first: dict[str, Any]) -> None:
    """Take requests, step, report; until the parent wants no more."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    # The context decides on the default batch sizes: those for throughput.
    engine = LLMEngine.from_engine_args(EngineArgs(**first["args"]), UsageContext.LLM_CLASS)
    inner: Any = getattr(engine.engine_core, "engine_core", None)  # None: in a process of its own
    speculation = Speculation(inner) if first["record_rounds"] else None
    channel.report(max_num_seqs=engine.vllm_config.scheduler_config.max_num_seqs)
    started: dict[str, tuple[str, float]] = {}  # id -> (vLLM's id, when)
    while True:
        unfinished = engine.has_unfinished_requests()
        # In process nobody else takes the last step, in which connectors hear that a request is finished.
        idle = not unfinished and not (inner is not None and inner.scheduler.has_requests())
        for order in take_orders(channel, wait=idle):
            if order is None:
                engine.engine_core.shutdown()
                return
            request = order["request"]
            try:
                prompt = {"prompt_token_ids": request["prompt_ids"]}
                started[request["id"]] = (
                    engine.add_request(request["id"], prompt, sampling_params(request)),
                    time.monotonic(),
                )
            except Exception as error:  # vLLM has many ways to say no
                channel.report(refused=request["id"], reason=str(error))
        if speculation is not None:
            speculation.before_step()
        outputs = engine.step()
        if speculation is not None:
            speculation.after_step()
        completions = []
        for output in outputs:
            internal, start_s = started.pop(output.request_id)
            drafts = None if speculation is None else speculation.take(internal)
            completions.append(completion(output, time.monotonic() - start_s, drafts))
        if completions:
            channel.report(completions=completions)


def take_orders(channel: Channel, wait: bool) -> list[dict[str, Any] | None]:
    """All orders that are there; if ``wait``, at least one."""
    orders = [channel.orders.get()] if wait else []
    with suppress(queue.Empty):
        while True:
            orders.append(channel.orders.get_nowait())
    return orders


def sampling_params(request: dict[str, Any]) -> Any:
    """vLLM's parameters of a request. The end tokens are ours alone, so that every engine stops alike; completions come
    back whole.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    states = request["states"]
    return SamplingParams(
        temperature=request["temperature"],
        top_p=request["top_p"],
        top_k=request["top_k"],
        seed=request["seed"],
        max_tokens=request["max_tokens"],
        stop_token_ids=request["stop_ids"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=None if states is None else {"kv_transfer_params": states},
    )


def completion(output: Any, seconds: float, drafts: list[list[int]] | None) -> dict[str, Any]:
    """A finished request in the form of ``requests.Completion``. ``drafts``: of every round, if they were recorded.

    Raises RuntimeError if the recorded rounds are not those that vLLM counted.
    """
    (only,) = output.outputs
    metrics = only.spec_decode_metrics
    drafted, accepted = ([], []) if metrics is None else (metrics.per_step_drafted, metrics.per_step_accepted)
    if drafts is None:
        drafts = [[] for _ in drafted]
    elif len(drafts) != len(drafted) or any(len(ids) < count for ids, count in zip(drafts, drafted, strict=True)):
        raise RuntimeError(
            f"rounds of request {output.request_id}: recorded {[len(ids) for ids in drafts]}, vLLM verified {drafted}"
        )
    return {
        "id": output.request_id,
        "ids": list(only.token_ids),
        "finish_reason": only.finish_reason,
        "seconds": seconds,
        # Near the end of a document vLLM may verify fewer than were proposed.
        "rounds": [[count, right, ids[:count]] for count, right, ids in zip(drafted, accepted, drafts, strict=True)],
        "states_path": (output.kv_transfer_params or {}).get("hidden_states_path"),
    }


if __name__ == "__main__":
    main()
