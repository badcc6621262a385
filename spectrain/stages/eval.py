"""Stage ``eval``: the drafter in the speculative loop, beside no speculation and n-gram lookup. Writes ``eval/`` and
``report.html``.

With a vLLM engine, vLLM decodes instead (``eval_vllm.py``).

All methods answer the same prompts in the same process, one after the other, so that throughputs can be compared; the
baseline is measured again for every record. At temperature 0 the outputs must be the same, token for token, and the
record says whether they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from spectrain.config.evaluation_schema import BASELINES
from spectrain.config.schema import SpectrainConfig
from spectrain.console import say, stdout
from spectrain.decoding.loop import DecodingSettings, GenerationResult, LoopTiming, Prompt, speculative_generate
from spectrain.decoding.proposers import Proposer
from spectrain.decoding.scheduler import (
    CONTEXT_TOKENS,
    FIXED,
    SCHEDULER,
    THRESHOLD,
    DraftPolicy,
    build_policy,
    measure_step_cost,
)
from spectrain.drafters.drafter import Drafter
from spectrain.errors import InputError, RunError
from spectrain.evaluation.lossless import OutputDifference
from spectrain.evaluation.records import (
    STAGE_PREFIX,
    UNTUNED,
    EvaluationRecord,
    PromptResult,
    build_record,
    measurement_name,
    read_record,
    read_records,
    record_figures,
)
from spectrain.evaluation.reliability import confidence_stats
from spectrain.evaluation.report.tables import evaluation_table
from spectrain.files import comparable, digest_strings, with_digest, write_atomically
from spectrain.stages.answer_suite import (
    Measurement,
    Method,
    answer_all,
    answer_limit,
    conditions,
    load_measured_drafter,
    load_untuned,
    measured_inputs,
    note_fewer_prompts,
    note_substitute_tests,
    output_differences,
    refuse_wrong_output,
    simulate_same_prompts,
    suite_prompts,
)
from spectrain.stages.baselines import baseline_proposer
from spectrain.stages.context import Context
from spectrain.stages.eval_vllm import engine_version, measure_with_vllm
from spectrain.stages.peak_memory import forget_peak, peak_memory_bytes
from spectrain.stages.run_dir import Decision, Inputs
from spectrain.stages.run_report import Answer, write_run_report
from spectrain.stages.sampled_outputs import SampledOutputs, refuse_wrong_distribution
from spectrain.target.cpu_kernels import speed_up
from spectrain.training.simulated_acceptance import decoding_sampling
from spectrain.training.trackers import TRACKERS_FILE, open_trackers


@dataclass(frozen=True)
class LoopMethod(Method):
    """A method of our own loop. ``proposer`` None: no speculation. ``rule``: of ``policy``; None verifies all."""

    proposer: Proposer | None = None
    rule: DraftPolicy | None = None


def decide(context: Context) -> Decision:
    """Whether this measurement has been made already."""
    config = context.config
    decoding = config.decoding
    fixed = {
        **measured_inputs(context),
        "suite.concurrency": config.suite.concurrency,
        "suite.baselines": list(config.suite.baselines),
        **{
            f"decoding.{name}": value
            for name, value in vars(decoding).items()
            if name not in ("draft_policy", "threshold")
        },
        **_policy_inputs(config),
    }
    if config.engine.name != "hf":
        fixed |= {
            "engine": digest_strings(comparable(asdict(config.engine))),
            "engine version": engine_version(context),
        }
    name = STAGE_PREFIX + measurement_name(
        config.suite.name,
        config.engine.name,
        decoding.num_speculative_tokens,
        decoding.temperature,
        decoding.draft_policy,
        decoding.threshold if decoding.draft_policy == THRESHOLD else None,
    )
    return context.run_dir.decide(name, Inputs(fixed, {}), partial(_lacking, context, name))


def _lacking(context: Context, name: str) -> str:
    """What is missing or damaged of a measurement that was made."""
    files = [context.run_dir.report, *_written(context, name)]
    if not all(file.is_file() for file in files):
        return "outputs are missing"
    try:
        for file in files[1:]:
            read_record(file)
    except InputError as error:
        return f"its records are damaged ({error})"
    return ""


def _written(context: Context, name: str) -> list[Path]:
    """The records of a measurement that was made."""
    outputs = context.run_dir.outputs(name)
    return [context.run_dir.path / file for file in outputs.get("records") or [outputs.get("record", "")]]


def _check_records(context: Context, name: str) -> None:
    """Records that cannot be read would spoil the report when all work is done: this measurement's are removed, as they
    are made anew; one of another is an error.
    """
    for path in sorted(context.run_dir.eval.glob("*.json")):
        try:
            read_record(path)
        except InputError:
            if path not in _written(context, name):
                raise
            path.unlink()


def _policy_inputs(config: SpectrainConfig) -> dict[str, Any]:
    """What differs from verifying all drafts: named only where it does, so that other measurements remain valid."""
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
    note_fewer_prompts(context)
    note_substitute_tests(context)
    for conversation in suite_prompts(context):  # raises for a prompt without room for an answer
        answer_limit(context, conversation, context.template.first_prompt_ids(conversation))
    _check_records(context, decision.name)
    with run_dir.running(decision) as outputs:
        measured = _measure(context) if context.config.engine.name == "hf" else measure_with_vllm(context)
        record = measured.record
        outputs |= {
            "acceptance_length": record.acceptance_length,
            "record": f"{run_dir.eval.name}/{record.file_name()}",
            "records": [f"{run_dir.eval.name}/{made.file_name()}" for made in measured.records],
        }
    records = read_records(run_dir.eval)
    write_run_report(context, records, measured.answers)
    _track(context, measured.records)
    stdout.print(evaluation_table(records))
    if context.config.engine.name != "hf" and record.output_identical is False and not measured.differences:
        say("eval: the drafter's output differs from plain greedy decoding in vLLM: see examples in the report")
    for name, difference in measured.differences:
        say(f"eval: {name}: {difference}")
    say(f"eval: {run_dir.report}")
    refuse_wrong_output(measured.differences)
    refuse_wrong_distribution(measured.sampled)
    return record.acceptance_length


def _track(context: Context, records: Sequence[EvaluationRecord]) -> None:
    """The records join the figures of the training that made the drafter, where trackers have that."""
    run_dir = context.run_dir
    if context.config.logger.trackers and (run_dir.path / TRACKERS_FILE).is_file():
        step = int(run_dir.outputs("fit").get("steps", 0))
        trackers = open_trackers(context.config, run_dir.path, step)
        trackers.summarise(record_figures(records), step)
        trackers.finish()


# --- measuring -----------------------------------------------------------------------------------------------------


def _measure(context: Context) -> Measurement:
    """Run every method, and write its record."""
    config = context.config
    conversations = suite_prompts(context)
    drafter = load_measured_drafter(context, context.model.device)
    speed_up(drafter)
    version = f"transformers {metadata.version('transformers')}"
    simulated = simulate_same_prompts(context, conversations, drafter)
    records: list[EvaluationRecord] = []
    differences: list[tuple[str, OutputDifference]] = []
    sampled = SampledOutputs(context, conversations)
    shown: tuple[EvaluationRecord, list[Answer]] | None = None
    for size in config.batch_sizes:
        baseline: list[PromptResult] | None = None
        plain: list[Answer] = []
        for method in _methods(context, drafter, size):
            name = method.name if method.policy == FIXED else f"{method.name} {method.policy}"
            decode = partial(decode_in_loop, context, method)
            forget_peak(context.model.device)
            answers, timing = answer_all(context, conversations, decode, size, name)
            results = [answer.result for answer in answers]
            all_drafts = method.is_drafter and method.policy == FIXED
            rounds = [round_ for result in results for round_ in result.rounds] if all_drafts else []
            record = build_record(
                conditions(context, method, size, version),
                results,
                baseline,
                simulated if all_drafts else None,
                draft_s_per_round=timing.draft_s / timing.rounds
                if method.proposer is not None and timing.rounds
                else None,
                verify_s_per_round=timing.verify_s / timing.rounds if timing.rounds else None,
                peak_memory_bytes=peak_memory_bytes(context.model.device),
                confidence=confidence_stats(
                    rounds, config.decoding.num_speculative_tokens, drafter.temperatures, context.eos_ids
                ),
                output_distribution_p=sampled.add(name, decode) if size == config.batch_sizes[0] else None,
            )
            record.write(context.run_dir.eval)
            records.append(record)
            if method.name == "none":
                baseline, plain = results, answers
            elif record.output_identical is False:
                differences += [(name, difference) for difference in output_differences(context, plain, answers)]
            if method.is_drafter:
                shown = shown or (record, answers)
    if shown is None:
        raise RunError("nothing was measured")
    return Measurement(records, *shown, tuple(differences), tuple(sampled.tests))


def _methods(context: Context, drafter: Drafter, size: int) -> list[LoopMethod]:
    """What is measured with ``size`` conversations at a time: the baselines, then the drafter under each policy."""
    config = context.config
    methods = [
        LoopMethod(name, proposer=baseline_proposer(context, name))
        for name in BASELINES
        if name in config.suite.baselines
    ]
    untuned = load_untuned(context, drafter)
    if untuned is not None:
        speed_up(untuned)
        methods.append(LoopMethod(drafter.method + UNTUNED, proposer=untuned))
    policies, cost = config.draft_policies, None
    if SCHEDULER in policies:
        cost = measure_step_cost(
            context.model, drafter, size, config.decoding.num_speculative_tokens, config.decoding.seed
        )
        steps = {"concurrency": size, "context_tokens": CONTEXT_TOKENS, **asdict(cost)}
        text = json.dumps(with_digest(steps), indent=2) + "\n"
        write_atomically(context.run_dir.step_costs / f"{config.suite.name}-c{size}.json", text)
    return methods + [
        LoopMethod(drafter.method, True, name, drafter, build_policy(name, config.decoding, cost)) for name in policies
    ]


def decode_in_loop(
    context: Context, method: LoopMethod, prompts: list[Prompt], on_tokens: Callable[[int], None]
) -> tuple[list[GenerationResult], LoopTiming]:
    """Answer prompts by a method, under the context's decoding settings."""
    decoding = context.config.decoding
    sampling, draft_sampling = decoding_sampling(decoding)
    settings = DecodingSettings(
        num_speculative_tokens=decoding.num_speculative_tokens,
        sampling=sampling,
        draft_sampling=draft_sampling,
        policy=method.rule,
        eos_ids=context.eos_ids,
        seed=decoding.seed,
    )
    generation = speculative_generate(context.model, method.proposer, prompts, settings, on_tokens)
    return generation.results, generation.timing
