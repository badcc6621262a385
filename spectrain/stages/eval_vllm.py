"""``eval`` with vLLM: the drafter, n-gram lookup and no speculation, each by a vLLM of its own, one after the other in
one command.

The figures come from vLLM's own account of every round. Prompts, groups and records are those of our own loop, so both
can be compared, and the simulation's promise stands beside. Servers that run already (``engine.urls``) do what they
were started for: only that is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spectrain.config.schema import EngineConfig
from spectrain.console import say
from spectrain.data.prompts import Conversation
from spectrain.decoding.acceptance import AcceptanceStats
from spectrain.decoding.loop import GenerationResult, LoopTiming
from spectrain.drafters.drafter_folder import load_drafter
from spectrain.drafters.serving_config import read_serving_config
from spectrain.engines.vllm.args import vllm_version
from spectrain.engines.vllm.requests import Request, VLLMClient, completions_in_order, placed_rounds
from spectrain.errors import RunError
from spectrain.evaluation.records import Conditions, EvaluationRecord, PromptResult, build_record
from spectrain.stages.answer_suite import answer_all, max_new_tokens, suite_prompts
from spectrain.stages.context import Context
from spectrain.stages.run_report import Answer
from spectrain.target.head import TargetHead
from spectrain.target.model import choose_device
from spectrain.training.simulated_acceptance import serving_sampling

Simulate = Callable[[Context, Sequence[Conversation], Any], AcceptanceStats | None]


@dataclass(frozen=True)
class _Method:
    """Something to measure, and what vLLM is told for it."""

    name: str
    args: Mapping[str, Any]
    drafter: str | None = None


def engine_version(context: Context) -> str:
    """Of the vLLM that measures."""
    urls = context.config.engine.urls if context.config.engine.name == "vllm_server" else ()
    return f"vllm {_running_version(urls[0]) if urls else vllm_version()}"


def measure_with_vllm(context: Context, simulate: Simulate) -> tuple[EvaluationRecord, list[Answer]]:
    """Run every method, write its records; returns the drafter's first record and its answers."""
    conversations = suite_prompts(context)
    predicted = _simulated(context, conversations, simulate)
    version = engine_version(context)
    shown: tuple[EvaluationRecord, list[Answer]] | None = None
    baselines: dict[int, list[PromptResult]] = {}
    for method in _methods(context):
        client = context.open_vllm(f"eval-{method.name}", method.args)
        try:
            for size in context.config.batch_sizes:
                decode = _Decoder(context, client)
                answers, _ = answer_all(
                    context, conversations, decode, size, f"{method.name} (vLLM)", _servers(context.config.engine)
                )
                if method.drafter is not None and not decode.drafted:
                    raise RunError(
                        f"eval: {context.config.engine.name} reports no rounds of speculation: its servers have no "
                        f"drafter, or run "
                        "without --per-request-spec-decode-metrics detailed"
                    )
                results = [answer.result for answer in answers]
                simulated = predicted if method.drafter is not None else None
                record = build_record(
                    _conditions(context, method, size, version), results, baselines.get(size), simulated
                )
                record.write(context.run_dir.eval)
                if method.name == "none":
                    baselines[size] = results
                elif method.drafter is not None and shown is None:
                    shown = record, answers
        finally:
            client.close()
    if shown is None:
        raise RunError("nothing was measured")
    return shown


def _servers(engine: EngineConfig) -> int:
    return (len(engine.urls) or engine.replicas) if engine.name == "vllm_server" else 1


def _simulated(context: Context, conversations: Sequence[Conversation], simulate: Simulate) -> AcceptanceStats | None:
    """The simulation's promise, made before vLLM wants the device for itself."""
    device = choose_device(context.config.target.device)
    drafter = load_drafter(context.measured_drafter, context.spec.default_taps())
    drafter.attach(TargetHead.from_checkpoint(context.target.folder, device=device)).to(device)
    simulated = simulate(context, conversations, drafter)
    del drafter
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return simulated


def _methods(context: Context) -> list[_Method]:
    """The baselines and the drafter; of servers that run already, what they do."""
    config = context.config
    n = config.decoding.num_speculative_tokens
    served = read_serving_config(str(context.measured_drafter))
    if config.engine.name == "vllm_server" and config.engine.urls:
        say(
            "note: servers that run already do what they were started for: the drafter is measured, without baselines "
            "and speed-up"
        )
        return [_Method(served.method, {}, served.path)]
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": n,
        "prompt_lookup_max": config.decoding.ngram_max,
        "prompt_lookup_min": config.decoding.ngram_min,
    }
    drafted = served.speculative_config(n)
    if not serving_sampling(config.decoding)[1].greedy:
        drafted |= {"draft_sample_method": "probabilistic"}
    methods = [_Method("none", {}), _Method("ngram", {"speculative_config": ngram})]
    asked = [method for method in methods if method.name in config.suite.baselines]
    return [*asked, _Method(served.method, {"speculative_config": drafted}, served.path)]


class _Decoder:
    """``Decode`` by a service. ``drafted``: whether any round of speculation was reported so far."""

    def __init__(self, context: Context, client: VLLMClient) -> None:
        self._context = context
        self._client = client
        self._asked = 0
        self.drafted = False

    def __call__(
        self, prompts: list[list[int]], limits: list[int], streams: list[int], on_tokens: Callable[[int], None], /
    ) -> tuple[list[GenerationResult], LoopTiming]:
        decoding = self._context.config.decoding
        requests = [
            Request(
                id=str(self._asked + number),
                prompt_ids=prompt,
                max_tokens=limit,
                temperature=decoding.temperature,
                top_p=decoding.top_p,
                top_k=decoding.top_k,
                # Turns of a conversation share its stream, so the prompt's length tells them apart.
                seed=None if decoding.temperature == 0 else _seed(decoding.seed, stream, len(prompt)),
                stop_ids=self._context.eos_ids,
            )
            for number, (prompt, limit, stream) in enumerate(zip(prompts, limits, streams, strict=True))
        ]
        self._asked += len(requests)
        answers = completions_in_order(self._client, requests, lambda answer: on_tokens(len(answer.ids)))
        self.drafted |= any(answer.rounds for answer in answers)
        results = [
            GenerationResult(answer.ids, placed_rounds(len(prompt), answer), answer.finish_reason)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return results, LoopTiming()


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0])


def _conditions(context: Context, method: _Method, size: int, version: str) -> Conditions:
    config = context.config
    return Conditions(
        target=context.target.id,
        target_revision=context.target.revision,
        drafter=None if method.drafter is None else str(context.measured_drafter),
        method=method.name,
        engine=config.engine.name,
        engine_version=version,
        suite=config.suite.name,
        num_speculative_tokens=config.decoding.num_speculative_tokens if method.args or method.drafter else 0,
        temperature=config.decoding.temperature,
        top_p=config.decoding.top_p,
        top_k=config.decoding.top_k,
        proposal_policy=config.decoding.proposal_policy,
        concurrency=size,
        max_new_tokens=max_new_tokens(context),
    )


def _running_version(url: str) -> str:
    """What the server at ``url`` says it is; "of unknown version" if it does not."""
    import httpx2

    from spectrain.engines.vllm.openai_api import base_url

    try:
        return str(httpx2.get(base_url(url) + "/version", timeout=10.0).json()["version"])
    except (httpx2.HTTPError, ValueError, KeyError, TypeError):
        return "of unknown version"
