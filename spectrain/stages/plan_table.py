"""``spectrain plan`` and ``--dry-run`` on the terminal: what a command would do, and a table of what it would take."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table

from spectrain.console import duration_text, say, stdout
from spectrain.files import bytes_text
from spectrain.stages.closed_form import closed_form_work
from spectrain.stages.context import Context
from spectrain.stages.plan import (
    Estimate,
    MachineSpeed,
    device_speed,
    estimate,
    fit_flops,
    host_bytes,
    on_accelerator,
    planned_ranks,
    stage_seconds,
    training_epochs,
    training_memory,
)
from spectrain.stages.plan_states import disk_lines, engine_devices, target_beside
from spectrain.stages.run_dir import Decision
from spectrain.stages.select_prompts import PLANNED_CHARS
from spectrain.stages.target_checks import memory_bytes
from spectrain.stages.target_size import active_parameters, target_parameters
from spectrain.stages.training_memory import STRATEGIES


def show_plan(context: Context) -> None:
    """Print what the context's command would do here (``plan``: the whole pipeline) and what it would take."""
    config, command = context.config, context.command
    lines = [
        ("run directory", str(context.run_dir.path)),
        ("target", f"{config.target.name}: {context.source.summary}"),
    ]
    if context.spec_or_none is not None:
        spec = context.spec
        lines.append(
            (
                "",
                f"{spec.num_layers} layers, hidden size {spec.hidden_size}, {spec.vocab_size:,} tokens, "
                f"{context.dtype_name}",
            )
        )
        lines += _drafter_lines(context)
    if context.prompts_or_none is not None:
        reckoned = f"; {config.plan.prompts:,} are planned for" if config.plan.prompts and command.looks_only else ""
        known = f"{len(context.prompts.train):,} training, {len(context.prompts.heldout):,} held out"
        lines.append(("prompts", f"{known}{reckoned}"))
    elif context.prompts_to_plan is not None:
        most = context.prompts_to_plan
        lines.append(
            (
                "prompts",
                f"at most {len(most.train):,} training, {len(most.heldout):,} held out, of "
                f"{', '.join(config.data.source)}, which is not read for a plan: taken to have {PLANNED_CHARS:,} "
                f"characters each",
            )
        )
    if command.sweeps:
        lines += _sweep_lines(context)
    elif "eval" in command.stages:
        lines.append(
            ("suite", f"{config.suite.name}: {config.suite.source}, at most {config.suite.max_prompts} prompts")
        )
        batches, policies = (", ".join(map(str, several)) for several in (config.batch_sizes, config.draft_policies))
        lines.append(("", f"conversations at a time: {batches}; draft policy: {policies}"))
    if context.spec_or_none is None:
        lines.append(("", "its dimensions are not known here, so neither are disk, memory and time"))
    decisions = _decisions(context)
    lines += [("stage", str(decision)) for decision in decisions]
    counted = command.needs_prompts and context.spec_or_none is not None and context.prompts_to_plan is not None
    if counted:
        lines += _cost_lines(context, {decision.name for decision in decisions if decision.skip})
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for name, text in lines:
        table.add_row(name, text)
    stdout.print(table)
    if counted and "fit" in command.stages:
        stdout.print(memory_table(context))
        for line in _fitting(context):
            stdout.print(line, soft_wrap=True)
    say("everything that can be checked before work starts has been checked; nothing was written")


def _sweep_lines(context: Context) -> list[tuple[str, str]]:
    """What a sweep measures."""
    config, sweep = context.config, context.config.sweep

    def listed(values: Iterable[object]) -> str:
        return ", ".join(map(str, values))

    lines = [("drafter", f"beside it: {listed(sweep.drafters)}")] if sweep.drafters else []
    lines.append(("methods", listed(sweep.methods) or "none, ngram, suffix and each drafter"))
    lines.append(
        ("suites", f"{listed(sweep.suites or [config.suite.name])}, at most {config.suite.max_prompts} prompts")
    )
    cells = {
        "drafts": sweep.num_speculative_tokens,
        "engines": [engine.name for engine in config.swept_engines],
        "conversations at a time": sweep.concurrency,
        "temperatures": [f"{warm:g}" for warm in sweep.temperatures or [config.decoding.temperature]],
        "tokens of context": sweep.context_tokens,
    }
    lines.append(("", "; ".join(f"{name}: {listed(values)}" for name, values in cells.items() if values)))
    return lines


def _drafter_lines(context: Context) -> list[tuple[str, str]]:
    """What is trained or measured, and how it drafts."""
    from spectrain.drafters.drafter_folder import read_method, read_shape
    from spectrain.drafters.hub_drafters import drafter_path
    from spectrain.drafters.registry import find_method

    config = context.config
    if context.command.sweeps and not context.command.needs_drafter:
        return [("drafter", f"none: the methods are {', '.join(config.sweep.methods)}")]
    folder = None if config.drafter.path is None else str(drafter_path(config.drafter))
    most = find_method(config.drafter.method).max_drafts(config.drafter)
    if context.command.needs_drafter:
        folder = str(context.measured_drafter)
    if folder is None:
        method, size = config.drafter.method, config.drafter.draft_vocab_size or context.spec.vocab_size
        lines = [("drafter", f"{method}, taps {list(context.taps)}, draft vocabulary of {size:,}")]
    else:
        shape = read_shape(folder, context.spec.default_taps())
        most = shape.max_drafts
        lines = [("drafter", f"{read_method(folder)}, taps {list(shape.taps)}, from {folder}")]
    n = config.decoding.num_speculative_tokens
    blocks = f" of the {most} that it can give" if most is not None and n < most else ""
    return [*lines, ("", f"drafts {n} tokens a round{blocks}, judged at temperature {config.decoding.temperature:g}")]


def _kv_lines(context: Context, numbers: Estimate) -> list[tuple[str, str]]:
    """What of the hidden states is keys and values of the target, which only some drafters read."""
    values = sum(2 * heads * size for _, heads, size in context.kv_shapes)
    if not values:
        return []
    share = values / (values + (len(context.taps) + 1) * context.spec.hidden_size)
    layers = list(context.kv_layers)
    return [
        ("", f"of these {bytes_text(numbers.states_bytes * share)} keys and values of the target's layers {layers}")
    ]


def _decisions(context: Context) -> list[Decision]:
    """What each stage of the command would do; none where the target has to be fetched first."""
    from spectrain.stages import capture, fit, generate

    if context.source.folder is None or context.prompts_or_none is None:
        return []
    stages = {"generate": generate.decide, "capture": capture.decide, "fit": fit.decide}
    if context.config.states_computed:
        del stages["capture"]
    return [decide(context) for name, decide in stages.items() if name in context.command.stages]


def _cost_lines(context: Context, skipped: set[str]) -> list[tuple[str, str]]:
    numbers = estimate(context)
    speed = device_speed(context)
    every = stage_seconds(context, numbers, speed)
    seconds = {name: value for name, value in every.items() if name in context.command.stages and name not in skipped}
    captures = "capture" not in skipped and context.planned_device is None
    beside = " beside it" if context.config.states_computed == "inprocess" else ""
    return [
        ("tokens", f"at most {numbers.tokens:,}, of which {numbers.generated_tokens:,} generated"),
        *disk_lines(context, numbers.states_bytes, captures),
        *_kv_lines(context, numbers),
        (
            "memory",
            f"target {bytes_text(numbers.target_bytes)}, training {bytes_text(numbers.train_bytes)} a rank{beside}",
        ),
        *_parameter_lines(context, numbers),
        *_work_lines(context, numbers, every, speed),
        (
            "time",
            ", ".join(f"{name} {duration_text(value)}" for name, value in seconds.items())
            + f"; about {duration_text(sum(seconds.values()))} in all",
        ),
    ]


def _parameter_lines(context: Context, numbers: Estimate) -> list[tuple[str, str]]:
    every, active = target_parameters(context.spec), active_parameters(context.spec)
    met = "" if every == active else f", of which a token meets {active / 1e9:,.2f} B"
    return [
        ("", f"the target has {every / 1e9:,.2f} B parameters{met}"),
        ("drafter", f"{numbers.drafter_parameters / 1e6:,.1f} M trained parameters"),
    ]


def _work_lines(
    context: Context, numbers: Estimate, seconds: dict[str, float], speed: MachineSpeed
) -> list[tuple[str, str]]:
    """Operations, devices, and how fast hidden states go from capture to training."""
    device, config, ranks = context.planned_device, context.config, planned_ranks(context)
    epochs = training_epochs(context)
    name = "this machine, measured"
    if device is not None:
        peak = device.peak_flops(config.trainer.precision_on(accelerator=True)) / 1e12
        name = f"{device.label}, {config.plan.utilisation:.0%} of {peak:,.0f} TFLOPS in training"
    written = numbers.states_bytes / max(seconds["capture"] or seconds["generate"], 1e-9)
    read = numbers.states_bytes * epochs / max(seconds["fit"], 1e-9)
    writes = f"capture writes {bytes_text(written)}/s, training reads"
    if context.config.states_computed:
        writes = "training asks for"
    return [
        ("device", f"{name}; target on {_target_devices(context)}, training on {ranks}"),
        (
            "work",
            f"{2 * active_parameters(context.spec) * numbers.tokens:.2g} operations for one pass of the target, "
            f"{fit_flops(context, numbers) * epochs:.2g} for training",
        ),
        *_init_lines(context, numbers, speed),
        (
            "states",
            f"{writes} {bytes_text(read)}/s, a rank {bytes_text(read / ranks)}/s",
        ),
    ]


def _target_devices(context: Context) -> str:
    config = context.config
    spread = config.engine.name == "hf" and config.target.device_map is not None
    return "devices as target.device_map says" if spread else str(engine_devices(config))


def _init_lines(context: Context, numbers: Estimate, speed: MachineSpeed) -> list[tuple[str, str]]:
    ranks = planned_ranks(context)
    work = closed_form_work(context, numbers.generated_tokens, speed, ranks)
    if not work.operations:
        return []
    shared = f", shared by {ranks} ranks" if ranks > 1 else ""
    what = f"{work.operations:.2g} operations at {work.positions:,.0f} positions{shared}"
    return [("", f"closed-form initialisation: {what}: {duration_text(work.seconds)} of fit (drafter.init_seconds)")]


# --- memory of a rank ----------------------------------------------------------------------------------------------


def memory_table(context: Context) -> Table:
    """Parts of a rank's memory under each strategy; what is largest at a time makes the peak."""
    ranks = planned_ranks(context)
    plans = {name: training_memory(context, name) for name in _strategies(ranks)}
    table = Table(box=box.SIMPLE, pad_edge=False, title=f"memory of one rank of {ranks}", title_justify="left")
    for column in ("", *plans):
        table.add_column(column, justify="left" if not column else "right")
    first = next(iter(plans.values()))
    parts = [(part, [plan.lasting[part] for plan in plans.values()]) for part in first.lasting]
    parts.append(("gradients", [plan.gradients for plan in plans.values()]))
    for moment in ("forward", "backward", "evaluation"):
        parts += [
            (f"{moment}: {part}", [getattr(plan, moment)[part] for plan in plans.values()])
            for part in getattr(first, moment)
        ]
    for part, sizes in parts:
        if any(sizes):
            table.add_row(part, *map(bytes_text, sizes))
    table.add_section()
    for moment in first.moments:
        table.add_row(f"in all, {moment}", *(bytes_text(plan.moments[moment]) for plan in plans.values()))
    table.add_row("peak", *(bytes_text(plan.peak) for plan in plans.values()))
    if ranks > 1 or context.planned_device is not None:
        table.add_row("host, beside", *[bytes_text(host_bytes(context))] * len(plans))
    return table


def _strategies(ranks: int) -> tuple[str, ...]:
    """One rank has nothing to share out, so all are the same to it."""
    return STRATEGIES if ranks > 1 else STRATEGIES[:1]


def _fitting(context: Context) -> list[str]:
    """Which strategies fit the device, and what to do where the chosen one does not."""
    there, name = _there(context)
    ranks, chosen = planned_ranks(context), context.config.trainer.strategy
    beside = target_beside(context)
    peaks = {strategy: training_memory(context, strategy).peak + beside for strategy in _strategies(ranks)}
    spread = context.config.states_computed == "inprocess" and not beside
    with_target = (
        ", the target beside it" if beside else ", without what target.device_map lays there" if spread else ""
    )
    lines = []
    for strategy, peak in peaks.items():
        fits = "fits" if peak <= there else "DOES NOT FIT"
        mark = " (trainer.strategy)" if strategy == chosen and ranks > 1 else ""
        lines.append(f"{strategy} {fits} {name}: {bytes_text(peak)} of {bytes_text(there)}{with_target}{mark}")
    if peaks.get(chosen, peaks[STRATEGIES[0]]) > there:
        fitting = [strategy for strategy, peak in peaks.items() if peak <= there]
        others = f"choose trainer.strategy={fitting[0]}, or " if fitting else ""
        lines.append(
            f"{others}set trainer.gradient_checkpointing=true, or lower trainer.packed_length, "
            f"trainer.micro_batch_size, drafter.num_layers, drafter.block.anchors or drafter.autoregressive.ttt_steps"
        )
    return lines


def _there(context: Context) -> tuple[float, str]:
    """(memory that a rank has, of what)."""
    if context.planned_device is not None:
        return context.planned_device.memory_bytes, f"one {context.planned_device.label}"
    if context.config.plan.device == "cpu" or not on_accelerator(context):
        return memory_bytes("cpu") / planned_ranks(context), "its share of this machine's memory"
    return memory_bytes(context.config.target.device), "this machine's device"
