"""Everything that can be checked before work starts.

Conflicts inside one section are rejected by its dataclass (``config/schema.py``). Here are those between sections, and
between the configuration and the world: prompt files, the target's dimensions, the run directory, the disk; drafters in
``drafter_checks.py``. Each check raises ConfigError or InputError with one sentence; nothing here writes anything.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from spectrain.config.commands import Command
from spectrain.config.folders import prompt_roots
from spectrain.config.schema import SpectrainConfig
from spectrain.drafters.drafter_digests import check_drafter_digests
from spectrain.errors import ConfigError, InputError
from spectrain.stages.drafter_checks import (
    check_continued,
    check_dimensions,
    check_drafter_folder,
    check_kind,
    check_measured,
    check_measurement,
    check_training_kernels,
)
from spectrain.stages.run_dir import RunDir, work_dir
from spectrain.stages.states_checks import check_disk, check_source
from spectrain.stages.target_checks import (
    check_at_work,
    check_family,
    check_strategy,
    check_trackers,
    check_trackers_answer,
)

if TYPE_CHECKING:
    from spectrain.data.prompts import Conversation, PromptSplit
    from spectrain.stages.context import Context
    from spectrain.target.resolve import TargetSource
    from spectrain.target.spec import TargetSpec


def check_config(config: SpectrainConfig, command: Command, given: Set[str] = frozenset()) -> None:
    """What the configuration alone tells. Only the last check needs torch, so most errors come at once. ``given``: keys
    that the command line set.
    """
    if not config.target.path:
        there = os.path.isfile(Path(config.run.dir) / "config.yaml")
        known = "" if there else f" (run.dir={config.run.dir} holds no config.yaml to go on from)"
        raise ConfigError(
            f"no target is chosen: add recipe=quickstart, target=smollm2_135m, or target.path=FOLDER_OR_HUB_ID{known}"
        )
    if not config.run.dir:
        raise ConfigError("run.dir is empty: name the folder of the run")
    if command.measures and not config.suite.source:
        raise ConfigError("suite.prompts is empty: name a JSON-lines file, as in suite=jsonl suite.prompts=FILE.jsonl")
    if command.needs_prompts and not config.data.source:
        raise ConfigError("no prompts are chosen: add data=support, or data=jsonl data.train=FILE.jsonl")
    if config.run.tasks > 1 and command.name not in ("generate", "capture", "plan"):
        raise ConfigError(
            f"run.tasks={config.run.tasks}: generate and capture are shared out to tasks, {command.name} is not: leave "
            f"run.tasks out, and it takes over what they have made"
        )
    _check_lengths(config, command)
    check_measurement(config, command)
    check_trackers(config)
    check_strategy(config, command)
    for engine in config.swept_engines if command.sweeps else (config.engine,):
        _check_engine(replace(config, engine=engine), command)
    check_source(config, command)
    if config.drafter.path is not None:
        from spectrain.drafters.hub_drafters import drafter_path

        check_drafter_folder(drafter_path(config.drafter), "drafter.path")
    check_kind(config, command, given)


def prepare(
    config: SpectrainConfig,
    command: Command,
    data_dir: Path | None = None,
    fetch: bool = True,
    given: frozenset[str] = frozenset(),
) -> Context:
    """Check everything that ``command`` depends on, and gather what was learnt. The run directory is not touched.

    Args:
        data_dir: the run directory that has responses, hidden states and drafter for this one (a job of a sweep).
        fetch: a target that is not on this machine is downloaded or converted, once everything else is known to be
            right; otherwise its dimensions stay unknown.
        given: keys that the command line sets, rather than a file or a default.
    """
    from spectrain.stages.context import Context
    from spectrain.stages.known_prompts import find_known
    from spectrain.stages.select_prompts import run_prompts
    from spectrain.target.resolve import locate_target

    RunDir(config.run.dir).check({})
    run_dir = work_dir(config.run)
    run_dir.check({})
    asks_suite = command.asks_suite(config.sweep.suites)
    if asks_suite:
        check_suite(config)
    reads_prompts = command.needs_prompts or (config.suite.uses_heldout and bool(asks_suite or config.data.source))
    shared = run_dir if data_dir is None else RunDir(data_dir)
    known = find_known(config, shared.path) if fetch and reads_prompts else None
    read = reads_prompts and known is None
    prompts, drawn = run_prompts(config, shared.path, planning=not fetch) if read else (None, None)
    source = locate_target(config.target, unreachable_ok=not fetch)
    if source.revision:
        run_dir.check({"id": source.id, "revision": source.revision})
    if command.trains and command.measures and prompts is not None:
        _check_suite_is_unseen(config, prompts)
    context = Context(
        config=config,
        command=command,
        given=given,
        run_dir=run_dir,
        source=source,
        spec_or_none=target_spec(config, source),
        prompts_or_none=prompts,
        data_dir=shared,
        drawn=drawn,
    )
    if known is not None:
        context.use_known(known)
    if command.needs_drafter:
        check_drafter_folder(context.measured_drafter, "drafter.path" if config.drafter.path else "run.dir")
    if fetch and context.spec_or_none is None:
        context.learn_spec()
    if context.spec_or_none is not None:
        _check_against_target(context)
        check_family(context)
    if fetch or context.source.folder is not None:
        _ = context.template  # raises for a target that cannot chat
        _screen_prompts(context)
        check_at_work(context)
        check_trackers_answer(context)
    folder = context.target.folder if fetch else source.folder
    if folder is not None and not command.looks_only:
        _check_checkpoint(context, folder)
    return context


def _screen_prompts(context: Context) -> None:
    """What only the target's template tells of prompts: too long, rejected, or the same as others after it."""
    from spectrain.console import say
    from spectrain.data.prompt_screening import PromptScreen

    if context.prompts_or_none is None:
        return
    config, command = context.config, context.command
    screen = PromptScreen(context.template, config.target.max_length)
    if context.known is None:
        context.keep_prompts(screen.screened(context.prompts, config.data))
        context.screen = screen
    if command.trains and command.measures:
        suite = load_suite_prompts(config, context.prompts)
        if context.known is None or context.known.may_train_on(suite, screen):
            _check_suite_is_unseen(config, context.prompts)  # what is remembered was not looked at before
            _refuse_seen([(c, trained.where) for c, trained in screen.seen_in_training(suite, context.prompts.train)])
    if command.needs_prompts and context.data_dir is context.run_dir:  # jobs of a sweep need not all say it
        for note in context.prompts.notes():
            say(note)


def _check_against_target(context: Context) -> None:
    from spectrain.drafters.hub_drafters import drafter_path

    config, spec = context.config, context.spec
    if spec.quantization is not None and _runs_in_process(context):
        from spectrain.target.quantization import require_readable

        require_readable(spec.quantization, config.target.path)
    check_dimensions(config, spec)
    if context.command.needs_drafter:
        check_measured(context)
    elif config.drafter.path is not None and not context.command.keeps_config:
        check_continued(context, drafter_path(config.drafter))
    if context.command.sweeps and config.sweep.drafters:
        from spectrain.stages.swept_drafters import check_further

        check_further(context)
    continued = None if config.drafter.path is None or context.command.keeps_config else drafter_path(config.drafter)
    read = context.measured_drafter if context.command.needs_drafter else continued
    if read is not None:
        check_drafter_digests(read)
    if "capture" in context.command.stages and not context.command.looks_only:
        check_disk(context)
    if context.command.trains:
        check_training_kernels(config.drafter)


def _runs_in_process(context: Context) -> bool:
    """Whether the command may run the target by transformers, which the parity check always does."""
    command = context.command
    runs = bool(command.stages) or command.measures
    beside = command.trains and context.config.states_computed == "inprocess"
    engines = context.config.swept_engines if command.sweeps else (context.config.engine,)
    return command.compares or beside or (runs and any(engine.name == "hf" for engine in engines))


def _check_checkpoint(context: Context, folder: Path) -> None:
    """The target's tensors are those that its configuration asks for.

    vLLM fuses matrices as it loads them, and does not notice where a part of one is missing.
    """
    from spectrain.drafters.registry import find_method
    from spectrain.target.head import check_head
    from spectrain.target.model import CannotLoadError, check_weights

    target = context.config.target
    if _runs_in_process(context):
        check_weights(folder, target)
    elif context.command.stages and context.spec.quantization is None and not target.trust_remote_code:
        with suppress(CannotLoadError):  # vLLM has models, too, that transformers has not
            check_weights(folder, replace(target, attn_implementation="eager"))
    if "capture" in context.command.stages or context.command.needs_drafter:
        check_head(folder, target.trust_remote_code)
    drafter = context.config.drafter
    if context.command.trains and drafter.path is None and drafter.init != "random":
        find_method(drafter.method).check_copies(drafter, context.spec, folder)


# --- the configuration alone ---------------------------------------------------------------------------------------


def _check_lengths(config: SpectrainConfig, command: Command) -> None:
    answer, longest = config.sampling.max_new_tokens, config.target.max_length
    # Where nothing is generated, a suite may say itself how long its answers are.
    if answer >= longest and ("generate" in command.stages or config.suite.max_new_tokens is None):
        raise ConfigError(
            f"sampling.max_new_tokens={answer} leaves no room for a prompt in target.max_length={longest}: lower one, "
            f"or raise the other"
        )
    if "fit" in command.stages and answer < 2:
        raise ConfigError(
            "sampling.max_new_tokens=1: a drafter learns what follows a generated token, let answers have 2 tokens at "
            "least"
        )
    rows = config.trainer.packed_length
    if "fit" in command.stages and rows <= answer:
        raise ConfigError(
            f"trainer.packed_length={rows} cannot hold a prompt and an answer of sampling.max_new_tokens={answer}: "
            f"raise packed_length"
        )
    drafts, measured = config.decoding.num_speculative_tokens, config.suite.max_new_tokens or answer
    if drafts > measured:
        raise ConfigError(
            f"decoding.num_speculative_tokens={drafts} is more than an answer may have ({measured} tokens): lower it"
        )


def _check_engine(config: SpectrainConfig, command: Command) -> None:
    """vLLM is here if it is to be started here, and knows the arguments it will be given."""
    from spectrain.engines.vllm.args import check_own_args

    # A command that generates nothing may measure a run that did.
    one_pass = config.capture.during_generation and "generate" in command.stages
    if one_pass and config.engine.connector == "stock":
        raise ConfigError(
            "capture.during_generation=true needs engine.connector=spectrain: vLLM's own does not keep whole "
            "conversations"
        )
    if config.engine.name == "hf":
        if one_pass:
            raise ConfigError(
                "capture.during_generation=true needs vLLM: add engine=vllm or engine=vllm_server, or set it to false"
            )
    elif config.engine.name == "vllm" or not config.engine.urls:
        if not command.looks_only:  # a plan may be made where vLLM is not
            check_own_args(config.engine.args, measures=command.measures)
    elif (command.captures and not config.states_computed) or one_pass:
        raise ConfigError(
            "engine.urls: servers that run already do not hand out hidden states: leave engine.urls empty, so that "
            "servers are started "
            "with what capture needs, or use another engine for capture"
        )


# --- files ---------------------------------------------------------------------------------------------------------


def check_suite(config: SpectrainConfig) -> None:
    """The suite's source is there and can be read."""
    from spectrain.evaluation.suites import load_suite

    if not config.suite.uses_heldout:
        load_suite(config.suite, (), prompt_roots())
    elif not config.data.source:
        raise ConfigError(
            "suite.prompts=heldout needs the run's prompts: add data=..., or suite=jsonl suite.prompts=FILE.jsonl"
        )


def _check_suite_is_unseen(config: SpectrainConfig, prompts: PromptSplit) -> None:
    """No prompt of the suite is trained on: what is measured on those says nothing of others."""
    trained = {conversation.prompt_digest(): conversation for conversation in prompts.train}
    _refuse_seen(
        [
            (c, trained[c.prompt_digest()].where)
            for c in load_suite_prompts(config, prompts)
            if c.prompt_digest() in trained
        ]
    )


def load_suite_prompts(config: SpectrainConfig, prompts: PromptSplit) -> list[Conversation]:
    """What the suite asks."""
    from spectrain.evaluation.suites import load_suite

    return load_suite(config.suite, prompts.heldout, prompt_roots(), config.data.system)


def _refuse_seen(seen: list[tuple[Conversation, str]]) -> None:
    if seen:
        raise ConfigError(
            f"suite.prompts: {len(seen)} of its prompts are training prompts too, the first at {seen[0][0].where} "
            f"(as {seen[0][1]}): remove them from one side"
        )


# --- the target ----------------------------------------------------------------------------------------------------


def target_spec(config: SpectrainConfig, source: TargetSource) -> TargetSpec | None:
    """The target as a server of target.max_length computes it, without downloading or converting it; None if its
    configuration is not on this machine.
    """
    spec = _target_spec(config, source)
    return None if spec is None else spec.served_at(config.target.max_length)


def _target_spec(config: SpectrainConfig, source: TargetSource) -> TargetSpec | None:
    from spectrain.console import quiet_transformers
    from spectrain.target.bundled import find_gguf
    from spectrain.target.resolve import known_dimensions
    from spectrain.target.spec import TargetSpec

    if source.folder is not None:
        return TargetSpec.from_folder(source.folder, config.target.trust_remote_code)
    known = known_dimensions(config.target)
    if source.kind == "hub" and not source.revision and known is not None:
        return TargetSpec.from_fields(known, config.target.path)
    if source.kind == "hub":
        return _hub_spec(config, source)
    gguf = (
        find_gguf(config.target.bundled_package) if source.kind == "bundled" and config.target.bundled_package else None
    )
    if gguf is None:
        return None
    from transformers import AutoConfig

    with quiet_transformers():
        return TargetSpec.from_config(
            AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
        )


def _hub_spec(config: SpectrainConfig, source: TargetSource) -> TargetSpec | None:
    """The dimensions of a target on the Hub, from its configuration alone, which is not kept."""
    from spectrain.target.resolve import fetch_config
    from spectrain.target.spec import TargetSpec

    with tempfile.TemporaryDirectory() as folder:
        if not fetch_config(config.target, source, Path(folder)):
            return None
        try:
            return TargetSpec.from_folder(Path(folder), config.target.trust_remote_code)
        except (
            InputError
        ):  # one that needs more than its configuration (code of its own); what is wrong shows once it is here
            return None
