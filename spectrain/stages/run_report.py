"""What ``report.html`` says about a run: gathers figures, curves, examples and metadata for ``evaluation/report/``."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import yaml

from spectrain.config.folders import group_options, prompt_roots, shipped_folder
from spectrain.config.target_schema import TargetConfig
from spectrain.console import say
from spectrain.data.prompt_files import find_prompt_files
from spectrain.data.prompts import Conversation
from spectrain.decoding.loop import GenerationResult
from spectrain.decoding.scheduler import StepCost
from spectrain.drafters.drafter_digests import weight_files
from spectrain.drafters.drafter_folder import weights_digest
from spectrain.drafters.foreign_checkpoints import standard_config
from spectrain.drafters.registry import find_method
from spectrain.drafters.serving_config import read_serving_config
from spectrain.errors import InputError
from spectrain.evaluation.records import EvaluationRecord, PromptResult, read_records
from spectrain.evaluation.report.html import ExampleText, Fact, ReportInputs, ServeCommand, write_report
from spectrain.evaluation.report.next_step import TrainedOn
from spectrain.files import bytes_text, check_digest, read_json_lines, with_digest, write_atomically
from spectrain.stages.context import Context, config_yaml
from spectrain.stages.hardware import cpu_name
from spectrain.stages.run_dir import versions
from spectrain.target.model import choose_device

_EXAMPLES = 4


@dataclass(frozen=True)
class Answer:
    """One conversation as a method answered it: (prompt ids, result) of each turn, and the figures of all turns
    together.
    """

    conversation: Conversation
    turns: list[tuple[list[int], GenerationResult]]
    result: PromptResult


def write_run_report(context: Context, records: Sequence[EvaluationRecord], answers: Sequence[Answer]) -> None:
    """Write the page of the run directory. ``answers``: of the drafter measured last, for examples."""
    config = context.config
    drafted = context.has_drafter
    own = drafted and context.measured_drafter == context.run_dir.drafter
    # The headline is the drafter measured last.
    newest = [
        record
        for record in records
        if record.num_speculative_tokens == config.decoding.num_speculative_tokens and record.is_drafter
    ]
    # Of several policies and batches the first one that this evaluation measured.
    first = config.draft_policies[0], config.batch_sizes[0]
    newest.sort(
        key=lambda record: (record.suite != config.suite.name, (record.draft_policy, record.concurrency) != first)
    )
    ordered = (
        [record for record in records if not record.is_drafter]
        + newest
        + [r for r in records if r.is_drafter and r not in newest]
    )
    write_report(
        context.run_dir.report,
        ReportInputs(
            title=config.run.name if config.run.name != "default" else context.run_dir.path.name,
            target=config.target.name,
            created=datetime.now().astimezone().isoformat(sep=" ", timespec="minutes"),
            records=ordered,
            sweep=read_records(context.run_dir.eval / "sweep"),
            serving=read_records(context.run_dir.eval / "serving"),
            step_costs=_step_costs(context),
            training=read_json_lines(context.run_dir.metrics) if own else (),
            examples=_examples(context, answers),
            drafter_facts=_drafter_facts(context) if drafted else (),
            data_facts=_data_facts(context),
            trained_on=_trained_on(context) if own else None,
            serve_commands=_serve_commands(context) if drafted else (),
            config_yaml=config_yaml(config),
            versions=versions(),
            hardware=_hardware(context),
        ),
    )


def _examples(context: Context, answers: Sequence[Answer]) -> list[ExampleText]:
    """Those of ``answers``; where a command has none to show, those that another has shown last."""
    file = context.run_dir.eval / "examples" / "shown.json"
    if answers:
        found = [_example(context, answer) for answer in answers[:_EXAMPLES]]
        content = with_digest({"examples": json.loads(json.dumps([asdict(example) for example in found]))})
        write_atomically(file, json.dumps(content, ensure_ascii=False) + "\n")
        return found
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        check_digest(stored, file, "measure again")
        return [ExampleText(**example) for example in stored["examples"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, InputError):
        say(f"note: {file} is damaged, and the report has no examples")
        return []


def _example(context: Context, answer: Answer) -> ExampleText:
    """The first turn, cut into what was drafted and what the target wrote itself."""
    prompt_ids, result = answer.turns[0]
    pieces = answer_pieces(context.tokenizer, len(prompt_ids), result)
    rounds = [round_ for round_ in result.rounds if not round_.cut]
    length = 1 + sum(round_.accepted for round_ in rounds) / len(rounds) if rounds else None
    return ExampleText(answer.conversation.turns[0], pieces, title=answer.conversation.id, acceptance_length=length)


def answer_pieces(tokenizer: Any, prompt_length: int, result: GenerationResult) -> list[tuple[str, bool]]:
    """(text, accepted draft?) of each token, in order. Tokens that together make a character appear as one piece with
    the last of them.
    """
    drafted = set[int]()
    for round_ in result.rounds:
        drafted |= set(range(round_.anchor + 1, round_.anchor + 1 + round_.accepted))
    pieces: list[tuple[str, bool]] = []
    shown = ""
    for index in range(len(result.ids)):
        whole = tokenizer.decode(result.ids[: index + 1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if whole.endswith("\ufffd") and index + 1 < len(result.ids):
            continue
        pieces.append((whole[len(shown) :], prompt_length + index in drafted))
        shown = whole
    return pieces


def _drafter_facts(context: Context) -> list[Fact]:
    folder = context.measured_drafter
    file = folder / "config.json"
    written = standard_config(json.loads(file.read_text(encoding="utf-8")), str(file))
    method = find_method(written["speculators_model_type"])
    facts = [
        ("folder", str(folder)),
        ("method", method.name),
        ("taps", ", ".join(map(str, written.get(method.taps_field) or ())) or "none"),
        ("draft vocabulary", f"{written.get('draft_vocab_size', 0):,}"),
        (
            "weights",
            f"{bytes_text(sum(path.stat().st_size for path in weight_files(folder)))}, "
            f"sha256 {weights_digest(folder)[:16]}",
        ),
    ]
    served = read_serving_config(str(folder))
    other = served.other_target(context.identity)
    if other is not None:
        facts.append(("trained for", other))
    trained = written.get("spectrain") or {}
    if "coverage" in trained and served.belongs_to(context.identity) is not False:
        facts.append(
            ("coverage", f"{trained['coverage']:.2%} of held-out generated tokens are in the draft vocabulary")
        )
    if "step" in trained:
        facts.append(("chosen at step", f"{trained['step']:,}"))
    return facts


def _data_facts(context: Context) -> list[Fact]:
    generated, captured = context.data_dir.outputs("generate"), context.data_dir.outputs("capture")
    facts: list[Fact] = [("target", f"{context.target.id} at {context.target.revision[:16]}")]
    if context.config.target.template_kwargs:
        facts.append(("chat template", f"with {json.dumps(context.config.target.template_kwargs)}"))
    if context.prompts_or_none is not None:
        facts.append(
            ("prompts", f"{len(context.prompts.train):,} training, {len(context.prompts.heldout):,} held out, disjoint")
        )
    for source in generated.get("sources", []):
        revision, licence = source.get("revision", "")[:12], source.get("license") or "not known"
        facts.append(("prompts of", f"{source.get('path')} at {revision}, licence {licence}"))
    if "generated_tokens" in generated and "cut_off" in generated:
        facts.append(
            (
                "responses",
                f"{generated['generated_tokens']:,} generated tokens, {generated['cut_off']:,} answers cut off at the "
                f"limit",
            )
        )
    source = context.run_dir.outputs("fit").get("states_source", "stored")
    if source != "stored":
        facts.append(("hidden states", f"computed while training asked for them (states.source={source})"))
    elif "tokens" in captured and "bytes" in captured:
        facts.append(("hidden states", f"{captured['tokens']:,} tokens, {bytes_text(captured['bytes'])}"))
    return facts


def _trained_on(context: Context) -> TrainedOn | None:
    """What this run's drafter learnt from. None where this command reads no prompts."""
    if context.prompts_or_none is None:
        return None
    config = context.config
    shipped = shipped_folder("data_gen")
    names = config.data.train
    files = [file for name in names for file in find_prompt_files(name, prompt_roots(), "data.train")]
    # A recipe's run has the recipe's name, unless the user gave it another one.
    if config.run.name in group_options("recipe"):
        again = [
            f"recipe={config.run.name}",
            *([] if _from_group(config.target) else [f"target.path={config.target.path}"]),
        ]
    else:
        again = [f"target.path={config.target.path}", f"drafter={config.drafter.method}"]
    return TrainedOn(
        workload=config.data.source,
        shipped=shipped is not None
        and bool(files)
        and all(file.resolve().is_relative_to(shipped.resolve()) for file in files),
        prompts=len(context.prompts.train),
        run_dir=str(context.run_dir.path),
        again=again,
    )


def _from_group(target: TargetConfig) -> bool:
    """Whether the target is what the option of that name in the group ``target`` says."""
    file = group_options("target").get(target.name)
    return file is not None and yaml.safe_load(file.read_text(encoding="utf-8")).get("path") == target.path


def _step_costs(context: Context) -> list[tuple[str, list[tuple[int, float]]]]:
    """The scheduler's measured costs: of each file, tokens in the target's pass and steps a second, with all rows
    drafting.
    """
    found = []
    for path in sorted(context.run_dir.step_costs.glob("*.json")):
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
            check_digest(written, path, "measure again")
            rows = written["concurrency"]
            cost = StepCost(tuple(map(tuple, written["verify"])), tuple(map(tuple, written["draft"])))
        except (ValueError, KeyError, TypeError, InputError):
            say(f"note: {path} is damaged and left out of the report")
            continue
        found.append(
            (
                f"{rows} at a time",
                [(tokens, cost.steps_per_s(rows, tokens)) for tokens, _ in cost.verify if tokens >= rows],
            )
        )
    return found


def _serve_commands(context: Context) -> list[ServeCommand]:
    folder = str(context.measured_drafter.resolve())
    drafter = read_serving_config(folder)
    if not drafter.known_to_vllm:
        return []
    speculation = drafter.speculative_config(context.config.decoding.num_speculative_tokens)
    target, settings = shlex.quote(context.target_for_vllm), shlex.quote(json.dumps(speculation))
    return [
        ServeCommand(
            "vLLM, with the number of drafts that evaluation recommends",
            f"spectrain serve drafter.path={shlex.quote(folder)}",
        ),
        ServeCommand("vLLM by itself", f"vllm serve {target} --speculative-config {settings}"),
        ServeCommand("vLLM, target and settings taken from the drafter's folder", f"vllm serve {shlex.quote(folder)}"),
    ]


def _hardware(context: Context) -> dict[str, str]:
    import torch

    facts = {
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }
    device = choose_device(context.config.target.device)  # the target may be loaded elsewhere alone
    if device.type == "cuda":
        return facts | {"device": torch.cuda.get_device_name(device)}
    return facts | {"device": cpu_name(), "dtype": context.dtype_name}
