"""``eval`` with vLLM: the drafter, n-gram lookup and no speculation, each by a vLLM of its own, one after the other in
one command.

The figures come from vLLM's own report of every round. Prompts, groups and records are those of our own loop, so both
can be compared, and what simulation predicted is recorded beside. Servers that run already (``engine.urls``) do what
they were started for: only that is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from spectrain.config.evaluation_schema import BASELINES
from spectrain.config.schema import EngineConfig
from spectrain.console import say
from spectrain.data.prompts import Conversation
from spectrain.decoding.acceptance import AcceptanceStats
from spectrain.decoding.loop import GenerationResult, LoopTiming, Prompt
from spectrain.drafters.drafter_folder import read_shape
from spectrain.drafters.registry import find_method
from spectrain.drafters.serving_config import read_serving_config
from spectrain.engines.vllm.args import vllm_version
from spectrain.engines.vllm.requests import Request, VLLMClient, completions_in_order, placed_rounds
from spectrain.errors import RunError
from spectrain.evaluation.lossless import OutputDifference
from spectrain.evaluation.records import UNTUNED, EvaluationRecord, build_record
from spectrain.stages.answer_suite import (
    Measurement,
    Method,
    answer_all,
    conditions,
    load_measured_drafter,
    output_differences,
    simulate_same_prompts,
    suite_prompts,
)
from spectrain.stages.baselines import baseline_speculation
from spectrain.stages.context import Context
from spectrain.stages.run_report import Answer
from spectrain.stages.sampled_outputs import SampledOutputs
from spectrain.target.model import choose_device
from spectrain.training.simulated_acceptance import decoding_sampling


@dataclass(frozen=True)
class VLLMMethod(Method):
    """``args``: engine arguments that vLLM is given for it."""

    args: Mapping[str, Any] = field(default_factory=dict)


def engine_version(context: Context) -> str:
    """Of the vLLM that measures."""
    urls = context.config.engine.urls if context.config.engine.name == "vllm_server" else ()
    return f"vllm {_running_version(urls[0]) if urls else vllm_version()}"


def measure_with_vllm(context: Context) -> Measurement:
    """Run every method, and write its records."""
    conversations = suite_prompts(context)
    predicted = _simulated(context, conversations)
    version = engine_version(context)
    records: list[EvaluationRecord] = []
    shown: tuple[EvaluationRecord, list[Answer]] | None = None
    baselines: dict[int, list[Answer]] = {}
    parted: list[tuple[str, list[Answer], list[Answer]]] = []
    sampled = SampledOutputs(context, conversations)
    for method in _methods(context):
        client = context.open_vllm(f"eval-{method.name}", method.args)
        try:
            for size in context.config.batch_sizes:
                decode = decoder_of(context, client)
                answers, _ = answer_all(
                    context, conversations, decode, size, f"{method.name} (vLLM)", _servers(context.config.engine)
                )
                if method.is_drafter and not decode.drafted:
                    raise RunError(
                        f"eval: {context.config.engine.name} reports no rounds of speculation: its servers have no "
                        "drafter, or run without --per-request-spec-decode-metrics detailed"
                    )
                results = [answer.result for answer in answers]
                simulated = predicted if method.is_drafter else None
                record = build_record(
                    conditions(context, method, size, version),
                    results,
                    [answer.result for answer in baselines[size]] if size in baselines else None,
                    simulated,
                    output_distribution_p=sampled.add(method.name, decode)
                    if size == context.config.batch_sizes[0]
                    else None,
                )
                record.write(context.run_dir.eval)
                records.append(record)
                if record.output_identical is False:
                    parted.append((f"{method.name} (vLLM)", baselines[size], answers))
                if method.name == "none":
                    baselines[size] = answers
                elif method.is_drafter and shown is None:
                    shown = record, answers
        finally:
            client.close()
    if shown is None:
        raise RunError("nothing was measured")
    return Measurement(records, *shown, _explained(context, parted), tuple(sampled.tests))


def _explained(
    context: Context, parted: Sequence[tuple[str, list[Answer], list[Answer]]]
) -> tuple[tuple[str, OutputDifference], ...]:
    """Why answers differ from those without speculation, by the target's logits here, now that no vLLM holds the
    device. A target that vLLM quantises as it loads it is another one than ours, and says nothing of its answers.
    """
    if context.config.engine.quantization is not None:
        return ()
    return tuple(
        (name, found) for name, plain, answers in parted for found in output_differences(context, plain, answers)
    )


def _servers(engine: EngineConfig) -> int:
    return (len(engine.urls) or engine.replicas) if engine.name == "vllm_server" else 1


def _simulated(context: Context, conversations: Sequence[Conversation]) -> AcceptanceStats | None:
    """What simulation predicts, computed before vLLM wants the device for itself."""
    device = choose_device(context.config.target.device)
    drafter = load_measured_drafter(context, device)
    simulated = simulate_same_prompts(context, conversations, drafter)
    del drafter
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return simulated


def _methods(context: Context) -> list[VLLMMethod]:
    """The baselines and the drafter; of servers that run already, what they do."""
    config = context.config
    drafter = read_serving_config(str(context.measured_drafter))
    if config.engine.name == "vllm_server" and config.engine.urls:
        say(
            "note: servers that run already do what they were started for: the drafter is measured, without baselines "
            "and speed-up"
        )
        return [VLLMMethod(drafter.method, is_drafter=True)]
    asked = [vllm_method(context, name) for name in BASELINES if name in config.suite.baselines]
    tuned = vllm_method(context, drafter.method, is_drafter=True)
    kind = find_method(drafter.method)
    if kind.comes_with(read_shape(context.measured_drafter, context.spec.default_taps()), context.target.folder):
        speculation = tuned.args["speculative_config"]
        asked.append(VLLMMethod(drafter.method + UNTUNED, args={"speculative_config": speculation}))
    return [*asked, tuned]


def vllm_method(context: Context, name: str, is_drafter: bool = False) -> VLLMMethod:
    """What vLLM is told for a method, with the number of drafts that is configured."""
    config = context.config
    if not is_drafter:
        told = baseline_speculation(config, name)
        return VLLMMethod(name, args={"speculative_config": told} if told else {})
    args = read_serving_config(str(context.measured_drafter)).engine_args(config.decoding.num_speculative_tokens)
    if not decoding_sampling(config.decoding)[1].greedy:
        args["speculative_config"] |= {"draft_sample_method": "probabilistic"}
    return VLLMMethod(name, is_drafter=True, args=args)


def decoder_of(context: Context, client: VLLMClient) -> VLLMDecoder:
    """Decodes by the vLLM that is open, under the context's settings."""
    return VLLMDecoder(context, client)


class VLLMDecoder:
    """``Decode`` by vLLM. ``drafted``: whether any round of speculation was reported so far."""

    def __init__(self, context: Context, client: VLLMClient) -> None:
        self._context = context
        self._client = client
        self._asked = 0
        self.drafted = False

    def __call__(
        self, prompts: list[Prompt], on_tokens: Callable[[int], None], /
    ) -> tuple[list[GenerationResult], LoopTiming]:
        decoding = self._context.config.decoding
        requests = [
            Request(
                id=str(self._asked + number),
                prompt_ids=list(prompt.ids),
                max_tokens=prompt.max_new_tokens,
                temperature=decoding.temperature,
                top_p=decoding.top_p,
                top_k=decoding.top_k,
                # Turns of a conversation share its stream, so the prompt's length tells them apart.
                seed=None if decoding.temperature == 0 else _seed(decoding.seed, prompt.stream or 0, len(prompt.ids)),
                stop_ids=self._context.eos_ids,
            )
            for number, prompt in enumerate(prompts)
        ]
        self._asked += len(requests)
        answers = completions_in_order(self._client, requests, lambda answer: on_tokens(len(answer.ids)))
        self.drafted |= any(answer.rounds for answer in answers)
        results = [
            GenerationResult(answer.ids, placed_rounds(len(prompt.ids), answer), answer.finish_reason)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return results, LoopTiming()


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0])


def _running_version(url: str) -> str:
    """What the server at ``url`` says it is; "of unknown version" if it does not."""
    import httpx2

    from spectrain.engines.vllm.openai_api import base_url

    try:
        return str(httpx2.get(base_url(url) + "/version", timeout=10.0).json()["version"])
    except (httpx2.HTTPError, ValueError, KeyError, TypeError):
        return "of unknown version"
