"""The help texts: what each command does, reads and writes, the groups it takes with their options, and the keys worth
knowing.

Defaults and explanations of keys come from ``config.py`` itself (value and trailing comment of each field), options of
groups from the files that are there, so the help cannot fall behind.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from spectrain.config import drafter_schema as config_drafter
from spectrain.config import schema as config
from spectrain.config.conversion import flatten
from spectrain.config.folders import GROUP_FOLDERS, group_options

_WIDTH = 118


@dataclass(frozen=True)
class CommandHelp:
    """One word of the command line and what a user should know about it."""

    name: str
    summary: str
    detail: str
    reads: str
    writes: str
    sections: tuple[str, ...]  # sections and groups of the configuration that matter
    keys: tuple[str, ...]  # the ones worth showing
    examples: tuple[str, ...]


_PROMPT_KEYS = ("data.train", "data.heldout", "data.max_train", "data.max_heldout", "data.system")
_SAMPLING_KEYS = ("sampling.temperature", "sampling.max_new_tokens", "sampling.seed")
_DRAFTER_KEYS = (
    "drafter.taps",
    "drafter.draft_vocab_size",
    "drafter.num_layers",
    "drafter.ttt_steps",
    "drafter.loss.weights",
    "drafter.path",
)
_TRAINER_KEYS = (
    "trainer.epochs",
    "trainer.learning_rate",
    "trainer.optimizer",
    "trainer.packed_length",
    "trainer.precision",
)
_POLICY_KEYS = ("decoding.draft_policy", "decoding.threshold", "suite.policies", "suite.batches")
_EVAL_KEYS = (
    "decoding.num_speculative_tokens",
    "decoding.temperature",
    "suite.prompts",
    "suite.max_prompts",
    "suite.baselines",
)

COMMANDS = {
    command.name: command
    for command in (
        CommandHelp(
            name="generate",
            summary="let the target answer the prompts",
            detail="Answers every training and held-out prompt, in the target's own chat template. What is answered "
            "already is kept.",
            reads="prompt files (JSON lines)",
            writes="responses/",
            sections=("target", "data", "sampling", "engine"),
            keys=("target.path", *_PROMPT_KEYS, *_SAMPLING_KEYS, "engine.batch_size"),
            examples=("spectrain generate recipe=quickstart data=jsonl data.train=prompts.jsonl run.dir=runs/mine",),
        ),
        CommandHelp(
            name="capture",
            summary="store the target's hidden states on its answers",
            detail="Runs the target once over every response and stores the taps and the last hidden state of each "
            "token.",
            reads="responses/",
            writes="hidden_states/",
            sections=("target", "hidden_states", "engine", "drafter"),
            keys=(
                "drafter.taps",
                "hidden_states.dtype",
                "hidden_states.shard_bytes",
                "engine.capture_tokens",
                "target.max_length",
            ),
            examples=("spectrain capture run.dir=runs/mine hidden_states.dtype=int8",),
        ),
        CommandHelp(
            name="fit",
            summary="train a drafter on the stored states",
            detail="Trains the drafter and keeps the one with the greatest acceptance length on held-out text, "
            "measured as a server would.",
            reads="hidden_states/",
            writes="drafter/ (the folder a server loads), checkpoints/, metrics.jsonl",
            sections=("drafter", "trainer", "decoding", "logger"),
            keys=(*_DRAFTER_KEYS, *_TRAINER_KEYS, "decoding.num_speculative_tokens"),
            examples=(
                "spectrain fit recipe=quickstart trainer.learning_rate=5e-4 drafter.draft_vocab_size=16384",
                "spectrain fit -m recipe=quickstart trainer.learning_rate=5e-4,1e-3,2e-3",
            ),
        ),
        CommandHelp(
            name="eval",
            summary="measure a drafter in the speculative loop",
            detail="Decodes the prompts of a suite with the drafter, by n-gram lookup and without speculation, and "
            "compares them: in our "
            "own loop, or by vLLM (engine=vllm, engine=vllm_server). `spectrain eval parity` checks instead that vLLM "
            "drafts and accepts, "
            "round by round, what our loop does.",
            reads="drafter/ (or drafter.path), prompts of the suite",
            writes="eval/, report.html",
            sections=("suite", "decoding", "engine", "target", "drafter"),
            keys=(
                "drafter.path",
                *_EVAL_KEYS,
                "suite.max_new_tokens",
                "suite.concurrency",
                "decoding.proposal_policy",
                *_POLICY_KEYS,
            ),
            examples=(
                "spectrain eval run.dir=runs/quickstart decoding.num_speculative_tokens=5",
                "spectrain eval parity run.dir=runs/quickstart engine=vllm",
                "spectrain eval drafter.path=FOLDER target=smollm2_135m suite=jsonl suite.prompts=prompts.jsonl",
            ),
        ),
        CommandHelp(
            name="serve",
            summary="start vLLM with the target and a drafter",
            detail="Becomes vLLM's server: target, drafter, method and the number of drafts that evaluation "
            "recommends are set; flags "
            "behind `--` are vLLM's own. `--print` shows the command instead. The target is the one the drafter was "
            "trained for, unless "
            "one is named.",
            reads="drafter/ (or drafter.path, a folder or a Hub id), eval/",
            writes="nothing",
            sections=("target", "engine"),
            keys=(
                "run.dir",
                "drafter.path",
                "target.path",
                "decoding.num_speculative_tokens",
                "engine.tensor_parallel_size",
                "engine.args",
            ),
            examples=(
                "spectrain serve run.dir=runs/mine -- --port 8000",
                "spectrain serve drafter.path=FOLDER_OR_HUB_ID engine.tensor_parallel_size=2 --print",
            ),
        ),
        CommandHelp(
            name="run",
            summary="generate, capture, fit and eval, one after the other",
            detail="The whole pipeline over one run directory. Stages whose inputs have not changed are skipped.",
            reads="prompt files (JSON lines)",
            writes="everything in the run directory; report.html is the page to read",
            sections=("recipe", "target", "data", "sampling", "engine", "drafter", "trainer", "decoding", "suite"),
            keys=(
                "run.dir",
                "capture.during_generation",
                *_PROMPT_KEYS[:2],
                *_SAMPLING_KEYS[:2],
                *_DRAFTER_KEYS[:2],
                *_TRAINER_KEYS[:2],
                *_EVAL_KEYS[:2],
            ),
            examples=(
                "spectrain run recipe=quickstart run.dir=runs/quickstart",
                "spectrain run recipe=quickstart run.dir=runs/mine data=jsonl data.train=A.jsonl data.heldout=B.jsonl",
            ),
        ),
        CommandHelp(
            name="inspect",
            summary="look at stored responses",
            detail="`spectrain inspect responses` prints documents; what the target generated, and a drafter is "
            "trained on, is coloured.",
            reads="responses/",
            writes="nothing",
            sections=("run",),
            keys=("run.dir",),
            examples=("spectrain inspect responses run.dir=runs/quickstart --limit 5 --split heldout",),
        ),
        CommandHelp(
            name="plan",
            summary="estimate disk, memory and hours of a run",
            detail="Prints what the whole pipeline would need here. Loads no weights and writes nothing.",
            reads="prompt files, the target's configuration",
            writes="nothing",
            sections=("recipe", "target", "data", "engine", "hidden_states", "drafter", "trainer"),
            keys=("data.train", "sampling.max_new_tokens", "hidden_states.dtype", "drafter.taps", "trainer.epochs"),
            examples=("spectrain plan recipe=quickstart",),
        ),
    )
}

FLAGS = {
    "--dry-run": "compose and check everything, print the plan, touch nothing",
    "-m, --multirun": "run every combination of comma-separated values (key=a,b), each in its own run directory",
    "--debug": "show the traceback of an error",
    "-h, --help": "this text",
}


def overview() -> str:
    """``spectrain --help``."""
    lines = [
        "spectrain trains drafters for speculative decoding; the acceptance it shows is the acceptance the server "
        "gives.",
        "",
        "Usage: spectrain COMMAND [group=option ...] [key=value ...] [--dry-run] [-m] [--debug]",
        "",
        "Verbs",
        *(f"  {command.name:<10}{command.summary}" for command in COMMANDS.values()),
        "",
        "Options",
        *(f"  {flag:<16}{text}" for flag, text in FLAGS.items()),
        f"  {'--version':<16}the version",
        "",
        "Start with:  spectrain run recipe=quickstart",
        "More:        spectrain COMMAND --help",
    ]
    return "\n".join(lines)


def command_help(name: str) -> str:
    """``spectrain VERB --help``."""
    command = COMMANDS[name]
    groups = [group for group in ("recipe", *command.sections) if group in GROUP_FOLDERS]
    lines = [
        f"spectrain {command.name}: {command.summary}",
        "",
        *_wrapped(command.detail, ""),
        f"  reads   {command.reads}",
        f"  writes  {command.writes}",
        "",
        "Groups (group=option); files of your own beside the working directory are found too",
        *(line for group in dict.fromkeys(groups) for line in _group_lines(group)),
        "",
        "Keys (key=value)",
        *(line for key in command.keys for line in _key_lines(key)),
        *_further_keys(command),
        "",
        "Examples",
        *(f"  {example}" for example in command.examples),
        "",
        "Options",
        *(f"  {flag:<16}{text}" for flag, text in FLAGS.items()),
    ]
    return "\n".join(lines)


@cache
def _comments() -> dict[str, str]:
    """Dotted key -> the comment behind its field in ``config.py`` or ``config_drafter.py``."""
    per_class: dict[str, dict[str, str]] = {}
    for module in (config, config_drafter):
        source = Path(inspect.getfile(module)).read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        rest = lines[(field.end_lineno or field.lineno) - 1].encode()[field.end_col_offset :].decode()
                        per_class.setdefault(node.name, {})[field.target.id] = rest.strip().removeprefix("#").strip()
    found: dict[str, str] = {}

    def collect(section: Any, prefix: str) -> None:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if dataclasses.is_dataclass(value):
                collect(value, f"{prefix}{field.name}.")
            else:
                found[prefix + field.name] = per_class[type(section).__name__][field.name]

    collect(config.SpectrainConfig(), "")
    return found


def _key_lines(key: str) -> list[str]:
    default = flatten(config.SpectrainConfig())[key]
    head = f"  {key}={_yaml_value(default)}"
    comment = _comments()[key]
    if not comment:
        return [head]
    return [
        f"{head:<44}{line}" if index == 0 else f"{'':<44}{line}"
        for index, line in enumerate(_wrapped(comment, "", _WIDTH - 44))
    ]


def _further_keys(command: CommandHelp) -> list[str]:
    further = [
        key
        for key in flatten(config.SpectrainConfig())
        if key.partition(".")[0] in command.sections and key not in command.keys
    ]
    return _wrapped("further: " + ", ".join(further), "  ") if further else []


def _group_lines(group: str) -> list[str]:
    return _wrapped(f"{group + '=':<10}{', '.join(group_options(group))}", "  ")


def _yaml_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ",".join(map(str, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {entry}" for name, entry in value.items()) + "}"
    return str(value)


def _wrapped(text: str, indent: str, width: int = _WIDTH) -> list[str]:
    lines, line = [], indent
    for word in text.split(" "):
        if len(line) + len(word) > width and line.strip():
            lines.append(line.rstrip())
            line = indent + "  " if indent else ""
        line += word + " "
    return [*lines, line.rstrip()]
