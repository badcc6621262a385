"""Stage ``eval``: the drafter in the speculative loop, beside no speculation and n-gram lookup. Writes ``eval/`` and
``report.html``.

With a vLLM engine, vLLM decodes instead (``evaluate_served.py``).

All methods answer the same prompts in the same process, one after the other, so that throughputs can be compared; the
baseline is measured again for every record. At temperature 0 the outputs must be the same, token for token, and the
record says whether they are.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch

from spectrain.config.schema import SpectrainConfig
from spectrain.console import say, stdout
from spectrain.data.hidden_states import INDEX_NAME
from spectrain.data.prompts import Conversation
from spectrain.data.responses import response_key
from spectrain.decoding.acceptance import AcceptanceStats
from spectrain.decoding.draft_policy import FIXED, SCHEDULER, THRESHOLD, DraftPolicy, build_policy
from spectrain.decoding.loop import GenerationResult, LoopTiming, speculative_generate
from spectrain.decoding.proposers import NGramProposer, Proposer
from spectrain.decoding.scheduler import CONTEXT_TOKENS, measure_step_cost
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.drafter_folder import load_drafter
from spectrain.drafters.serving_config import drafter_digest
from spectrain.errors import RunError
from spectrain.evaluation.records import Conditions, EvaluationRecord, PromptResult, build_record, read_records
from spectrain.evaluation.reliability import confidence_stats
from spectrain.evaluation.report.tables import evaluation_table
from spectrain.files import digest_strings, write_atomically
from spectrain.stages import capture
from spectrain.stages.answer_suite import answer_all, answer_limit, max_new_tokens, suite_prompts
from spectrain.stages.context import Context
from spectrain.stages.eval_vllm import engine_version, measure_with_vllm
from spectrain.stages.run_dir import Decision, Inputs
from spectrain.stages.run_report import Answer, write_run_report
from spectrain.target.cpu_kernels import speed_up
from spectrain.target.head import TargetHead
from spectrain.training.simulated_acceptance import serving_sampling, simulate_heldout


@dataclass(frozen=True)
class _Method:
    """Something to measure. ``proposer`` None: no speculation. ``policy``: the name of the rule for how many drafts are
    verified.
    """

    name: str
    proposer: Proposer | None
    drafter: str | None = None
    policy: str = FIXED
    rule: DraftPolicy | None = None


def decide(context: Context) -> Decision:
    """Whether this measurement has been made already."""
    config = context.config
    folder = context.measured_drafter
    fixed = {
        **context.target_inputs(),
        "drafter": drafter_digest(folder),
        "prompts of the suite": digest_strings(
            [conversation.prompt_digest() for conversation in suite_prompts(context)]
        ),
        "suite.max_new_tokens": max_new_tokens(context),
        "suite.concurrency": config.suite.concurrency,
        "suite.baselines": list(config.suite.baselines),
        **{
            f"decoding.{name}": value
            for name, value in vars(config.decoding).items()
            if name not in ("draft_policy", "threshold")
        },
        **_policy_inputs(config),
    }
    name = f"eval/{config.suite.name}-n{config.decoding.num_speculative_tokens}-t{config.decoding.temperature:g}"
    if config.engine.name != "hf":
        fixed |= {"engine": digest_strings(asdict(config.engine)), "engine version": engine_version(context)}
        name += f"-{config.engine.name}"
    name += "" if config.decoding.draft_policy == FIXED else f"-{config.decoding.draft_policy}"
    name += f"{config.decoding.threshold:g}" if config.decoding.draft_policy == THRESHOLD else ""
    record = context.run_dir.path / context.run_dir.outputs(name).get("record", "")
    return context.run_dir.decide(name, Inputs(fixed, {}), whole=record.is_file() and context.run_dir.report.is_file())


def _policy_inputs(config: SpectrainConfig) -> dict[str, Any]:
    """What differs from verifying all drafts: named only where it does, so that other measurements stand."""
    policies = config.draft_policies
    inputs: dict[str, Any] = {} if policies == (FIXED,) else {"draft policies": list(policies)}
    if THRESHOLD in policies:
        inputs["decoding.threshold"] = config.decoding.threshold
    if config.suite.batches:
        inputs["suite.batches"] = list(config.suite.batches)
    return inputs


def evaluate(context: Context) -> float | None:
    """Measure unless that has been done. Returns the drafter's acceptance length."""
    run_dir = context.run_dir
    decision = decide(context)
    if decision.skip:
        say(str(decision))
        stdout.print(evaluation_table(read_records(run_dir.eval)))
        return run_dir.outputs(decision.name).get("acceptance_length")
    for conversation in suite_prompts(context):  # raises for a prompt without room for an answer
        answer_limit(context, conversation, context.template.first_prompt_ids(conversation))
    with run_dir.running(decision) as outputs:
        record, answers = (
            _measure(context)
            if context.config.engine.name == "hf"
            else measure_with_vllm(context, simulate_same_prompts)
        )
        outputs |= {"acceptance_length": record.acceptance_length, "record": f"eval/{record.file_name()}"}
    records = read_records(run_dir.eval)
    write_run_report(context, records, answers)
    stdout.print(evaluation_table(records))
    if record.output_identical is False:
        say(
            "eval: the drafter's output differs from plain greedy decoding; in float32 only ties should do that, see "
            "examples in the report"
        )
    say(f"eval: {run_dir.report}")
    return record.acceptance_length


# --- measuring -----------------------------------------------------------------------------------------------------


def _measure(context: Context) -> tuple[EvaluationRecord, list[Answer]]:
    """Run every method, write its record; returns the drafter's record and its answers."""
    config = context.config
    conversations = suite_prompts(context)
    folder = context.measured_drafter
    drafter = load_drafter(folder, context.spec.default_taps())
    drafter.attach(TargetHead.from_checkpoint(context.target.folder, device=context.model.device)).to(
        context.model.device
    )
    speed_up(drafter)
    simulated = simulate_same_prompts(context, conversations, drafter)
    shown: tuple[EvaluationRecord, list[Answer]] | None = None
    for size in config.batch_sizes:
        baseline: list[PromptResult] | None = None
        for method in _methods(context, drafter, size):
            name = method.name if method.policy == FIXED else f"{method.name} {method.policy}"
            answers, timing = answer_all(context, conversations, partial(_decode, context, method), size, name)
            results = [answer.result for answer in answers]
            all_drafts = method.drafter is not None and method.policy == FIXED
            rounds = [round_ for result in results for round_ in result.rounds] if all_drafts else []
            record = build_record(
                _conditions(context, method, size),
                results,
                baseline,
                simulated if all_drafts else None,
                draft_s_per_round=timing.draft_s / timing.rounds
                if method.proposer is not None and timing.rounds
                else None,
                verify_s_per_round=timing.verify_s / timing.rounds if timing.rounds else None,
                peak_memory_bytes=_peak_memory_bytes(context),
                confidence=confidence_stats(
                    rounds, config.decoding.num_speculative_tokens, drafter.temperatures, context.eos_ids
                ),
            )
            record.write(context.run_dir.eval)
            if method.name == "none":
                baseline = results
            if method.drafter is not None:
                shown = shown or (record, answers)
    if shown is None:
        raise RunError("nothing was measured")
    return shown


def _methods(context: Context, drafter: Drafter, size: int) -> list[_Method]:
    """What is measured with ``size`` conversations at a time: the baselines, then the drafter under each policy."""
    config = context.config
    methods = [_Method("none", None)] if "none" in config.suite.baselines else []
    if "ngram" in config.suite.baselines:
        methods.append(_Method("ngram", NGramProposer(config.decoding.ngram_max, config.decoding.ngram_min)))
    policies, cost = config.draft_policies, None
    if SCHEDULER in policies:
        cost = measure_step_cost(
            context.model, drafter, size, config.decoding.num_speculative_tokens, config.decoding.seed
        )
        steps = {"concurrency": size, "context_tokens": CONTEXT_TOKENS, **asdict(cost)}
        write_atomically(
            context.run_dir.step_costs / f"{config.suite.name}-c{size}.json", json.dumps(steps, indent=2) + "\n"
        )
    folder = str(context.measured_drafter)
    return methods + [
        _Method(drafter.method, drafter, folder, name, build_policy(name, config.decoding, cost)) for name in policies
    ]


def _conditions(context: Context, method: _Method, size: int) -> Conditions:
    config = context.config
    return Conditions(
        target=context.target.id,
        target_revision=context.target.revision,
        drafter=method.drafter,
        method=method.name,
        engine="hf",
        engine_version=f"transformers {metadata.version('transformers')}",
        suite=config.suite.name,
        num_speculative_tokens=config.decoding.num_speculative_tokens if method.proposer is not None else 0,
        temperature=config.decoding.temperature,
        top_p=config.decoding.top_p,
        top_k=config.decoding.top_k,
        proposal_policy=config.decoding.proposal_policy,
        concurrency=size,
        max_new_tokens=max_new_tokens(context),
        draft_policy=method.policy,
        draft_threshold=config.decoding.threshold if method.policy == THRESHOLD else None,
    )


def _decode(
    context: Context,
    method: _Method,
    prompts: list[list[int]],
    limits: list[int],
    streams: list[int],
    on_tokens: Callable[[int], None],
) -> tuple[list[GenerationResult], LoopTiming]:
    decoding = context.config.decoding
    sampling, draft_sampling = serving_sampling(decoding)
    generation = speculative_generate(
        context.model,
        method.proposer,
        prompts,
        limits,
        decoding.num_speculative_tokens,
        sampling,
        context.eos_ids,
        decoding.seed,
        draft_sampling=draft_sampling,
        policy=method.rule,
        streams=streams,
        on_tokens=on_tokens,
    )
    return generation.results, generation.timing


def simulate_same_prompts(
    context: Context, conversations: Sequence[Conversation], drafter: Drafter
) -> AcceptanceStats | None:
    """What simulation predicts for the suite's prompts, on their stored texts; None unless those were sampled as the
    loop samples.
    """
    config = context.config
    sampling = (config.decoding.temperature, config.decoding.top_p, config.decoding.top_k)
    if context.prompts_or_none is None or not (context.data_dir.hidden_states / INDEX_NAME).is_file():
        return None
    sampled = (context.sampling.temperature, context.sampling.top_p, context.sampling.top_k)
    if (sampling != sampled and (sampling[0] or sampled[0])) or max_new_tokens(
        context
    ) != config.sampling.max_new_tokens:
        return None
    store = capture.open_store(context, drafter.taps)
    if store is None:
        return None
    number = {key: index for index, key in enumerate(store.keys)}
    keys = [
        response_key(conversation, context.sampling, context.target.id, context.target.revision)
        for conversation in conversations
    ]
    if any(key not in number for key in keys):
        return None
    documents = [number[key] for key in keys]
    return simulate_heldout(
        drafter, store, documents, config.decoding, context.eos_ids, config.trainer.packed_length
    ).stats


def _peak_memory_bytes(context: Context) -> int:
    """Of this process so far, on the device that holds the target."""
    if context.model.device.type == "cuda":
        return torch.cuda.max_memory_allocated(context.model.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
