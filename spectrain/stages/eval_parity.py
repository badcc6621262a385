"""``spectrain eval parity``: does vLLM, given the drafter's folder, draft and accept exactly what our own loop does?

The suite's prompts (their first turns) are decoded greedily by vLLM, which is then stopped, and by our loop;
``evaluation/parity.py`` compares every round. What it found goes into the manifest, bound to the digest of the
drafter's files, so that a drafter that was changed afterwards counts as unchecked. vLLM runs on this machine, whatever
engine is configured: vLLM's servers do not report which ids they drafted.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectrain.config.schema import SpectrainConfig
from spectrain.console import ProgressBar, say, stdout
from spectrain.decoding.acceptance import AcceptanceStats
from spectrain.decoding.loop import DecodingSettings, Prompt, speculative_generate
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.serving_config import drafter_digest, read_serving_config
from spectrain.engines.vllm.args import check_own_args, vllm_version
from spectrain.engines.vllm.requests import Request, completions_in_order, placed_rounds
from spectrain.errors import RunError
from spectrain.evaluation.diagnosis import diagnose
from spectrain.evaluation.parity import DecodedPrompt, ParityReport, compare
from spectrain.evaluation.records import STAGE_PREFIX
from spectrain.evaluation.report.tables import share_text
from spectrain.files import comparable, digest_strings, plain
from spectrain.stages.answer_suite import answer_limit, load_measured_drafter, measured_inputs, suite_prompts
from spectrain.stages.context import Context
from spectrain.stages.run_dir import Decision, Inputs, RunDir
from spectrain.target.cpu_kernels import speed_up

# Where vLLM 0.32 prefills a prompt in parts, it shows a drafter that reads shifted tokens the prompt's last token
# behind each part, not the next one (`prepare_next_token_ids_padded`). One key and value of the drafter are wrong then,
# which changes few drafts and no answer. So here each prompt is taken whole.
WHOLE_PROMPTS = {"enable_chunked_prefill": False}
_SPLIT_HINT = (
    "engine.args let vLLM split prompts, and where it does, its drafter reads a wrong token (docs/vllm.md): leave out "
    "enable_chunked_prefill and max_num_batched_tokens"
)
_LISTED = 20  # near-ties that are recorded
_RECORD = "parity"


def parity_record(run_dir: RunDir, folder: Path) -> dict[str, Any] | None:
    """What the gate found for exactly the drafter in ``folder``, the latest passed check first; None if it was never
    checked.
    """
    digest = drafter_digest(folder)
    entries = [name for name in run_dir.manifest()["stages"] if name.startswith(STAGE_PREFIX)]
    records = [
        record for name in entries if (record := run_dir.outputs(name).get(_RECORD)) and record["drafter"] == digest
    ]
    return max(records, key=lambda record: record["passed"], default=None)


def parity(context: Context) -> None:
    """Check unless that was done with the same drafter and passed. Raises RunError, with the first difference and
    hints, if it fails.
    """
    check_own_args(context.config.engine.args, measures=True)
    decision = _decide(context)
    if decision.skip:
        say(str(decision))
        return
    with context.run_dir.running(decision) as outputs:
        theirs = _theirs(context)
        drafter = _drafter(context)
        num_drafts = context.config.decoding.num_speculative_tokens
        report = compare(context.model, drafter, _ours(context, drafter, theirs), theirs, num_drafts)
        hints = diagnose(context.model, drafter, report, theirs, num_drafts)
        if not report.passed and _may_split_prompts(context.config):
            hints = (*hints, _SPLIT_HINT)
        report = replace(report, hints=hints)
        outputs[_RECORD] = _record(context, report)
    stdout.print(parity_table(report))
    if not report.passed:
        raise RunError(
            "parity: "
            + " ".join([report.reason() + ";", *(f"likely cause: {hint};" for hint in report.hints)]).rstrip(";")
        )


def _may_split_prompts(config: SpectrainConfig) -> bool:
    """Whether ``engine.args`` have vLLM take prompts in parts."""
    args = config.engine.args
    return "enable_chunked_prefill" in args or args.get("max_num_batched_tokens", math.inf) < config.target.max_length


def _decide(context: Context) -> Decision:
    config = context.config
    fixed = {
        **measured_inputs(context),
        "decoding.num_speculative_tokens": config.decoding.num_speculative_tokens,
        "vllm": vllm_version(),
        "engine": digest_strings(comparable(asdict(config.engine))),
    }
    name = f"{STAGE_PREFIX}{_RECORD}-n{config.decoding.num_speculative_tokens}"
    decision = context.run_dir.decide(name, Inputs(fixed, {}), lambda: "")
    if decision.skip and not (context.run_dir.outputs(name).get(_RECORD) or {}).get("passed"):
        return replace(decision, action="start", reason="")  # it failed: whoever asks again has changed something
    return decision


# --- both sides ----------------------------------------------------------------------------------------------------


def _theirs(context: Context) -> list[DecodedPrompt]:
    """What vLLM decodes. It is stopped before the target is loaded here: a device may not have room for both."""
    config = context.config
    prompts = [
        (conversation, context.template.first_prompt_ids(conversation)) for conversation in suite_prompts(context)
    ]
    requests = [
        Request(str(number), ids, answer_limit(context, conversation, ids), stop_ids=context.eos_ids)
        for number, (conversation, ids) in enumerate(prompts)
    ]
    args = read_serving_config(str(context.measured_drafter)).engine_args(config.decoding.num_speculative_tokens)
    args |= {} if _may_split_prompts(config) else WHOLE_PROMPTS
    total = sum(request.max_tokens for request in requests)
    with (
        context.open_vllm(_RECORD, args, record_rounds=True) as client,
        ProgressBar("parity vLLM", total=total, unit="tokens") as bar,
    ):
        answers = completions_in_order(client, requests, lambda completion: bar.advance(len(completion.ids)))
    return [
        DecodedPrompt(request.prompt_ids, answer.ids, placed_rounds(len(request.prompt_ids), answer))
        for request, answer in zip(requests, answers, strict=True)
    ]


def _drafter(context: Context) -> Drafter:
    """The drafter as vLLM computes it: in 16 bits, where the target is."""
    drafter = load_measured_drafter(context, context.model.device)
    if context.model.dtype in (torch.bfloat16, torch.float16):
        drafter.to(context.model.dtype)
    speed_up(drafter)
    return drafter


def _ours(context: Context, drafter: Drafter, theirs: list[DecodedPrompt]) -> list[DecodedPrompt]:
    """What our loop decodes from the same prompts."""
    prompts = [
        Prompt(decoded.prompt, answer_limit(context, conversation, decoded.prompt))
        for conversation, decoded in zip(suite_prompts(context), theirs, strict=True)
    ]
    settings = DecodingSettings(
        num_speculative_tokens=context.config.decoding.num_speculative_tokens,
        eos_ids=context.eos_ids,
        batch_size=max(context.config.suite.concurrency, context.config.engine.batch_size),
    )
    with ProgressBar("parity loop", total=sum(prompt.max_new_tokens for prompt in prompts), unit="tokens") as bar:
        results = speculative_generate(context.model, drafter, prompts, settings, bar.advance).results
    return [
        DecodedPrompt(decoded.prompt, result.ids, result.rounds)
        for decoded, result in zip(theirs, results, strict=True)
    ]


# --- what is said of it --------------------------------------------------------------------------------------------


def _record(context: Context, report: ParityReport) -> dict[str, Any]:
    record = {
        "drafter": drafter_digest(context.measured_drafter),
        "passed": report.passed,
        "vllm": vllm_version(),
        "num_speculative_tokens": context.config.decoding.num_speculative_tokens,
        "rounds": report.rounds,
        "equal": report.equal,
        "near_ties": len(report.ties),
        "different": len(report.different),
        "acceptance_per_position": {
            "loop": report.ours.acceptance_per_position,
            "vllm": report.theirs.acceptance_per_position,
        },
        "listed_near_ties": [asdict(tie) for tie in report.ties[:_LISTED]],
        "first_difference": asdict(report.different[0]) if report.different else None,
        "hints": report.hints,
    }
    return plain(record)


def parity_table(report: ParityReport) -> RenderableType:
    """Counts of rounds, then the acceptance of both sides, then near-ties."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "rounds", "acceptance length", "by position"):
        table.add_column(column, justify="left" if not column else "right")
    for name, stats in (("our loop", report.ours), ("vLLM", report.theirs)):
        table.add_row(name, *_figures(stats))
    verdict = Text("parity: ", style="bold")
    verdict.append("equal" if report.passed else "NOT equal", style="bold green" if report.passed else "bold red")
    verdict.append(
        f"; of {report.rounds} rounds {report.equal} are equal, {len(report.ties)} near-ties, {len(report.different)} "
        f"different"
    )
    lines = [Text(f"near-tie at {tie}", style="dim") for tie in report.ties[:_LISTED]]
    return Group(table, verdict, *lines)


def _figures(stats: AcceptanceStats) -> tuple[str, ...]:
    return (
        f"{stats.rounds:,}",
        f"{stats.acceptance_length:.3f}",
        " ".join(share_text(share) for share in stats.acceptance_per_position),
    )
