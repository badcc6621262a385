"""``spectrain doctor``: what of this machine, and of a run directory, would spoil a run; each line with what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rich import box
from rich.table import Table
from rich.text import Text

from spectrain.config.schema import SpectrainConfig
from spectrain.console import stdout
from spectrain.errors import RunError
from spectrain.stages import machine_checks as machine
from spectrain.stages.findings import Check, Finding, found_by

_COLOURS = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def doctor(
    config: SpectrainConfig, given: Sequence[str] = (), dry_run: bool = False, json: bool = False
) -> list[Finding]:
    """Check, print a table or JSON, and return the findings. Raises RunError (exit code 1) where something failed;
    warnings are none. ``dry_run``: it changes nothing anyway.
    """
    named_run = any(override.partition("=")[0] == "run.dir" for override in given)
    findings = [finding for name, check in _checks(config, named_run) for finding in found_by(name, check)]
    if json:
        failed = sum(finding.level == "failure" for finding in findings)
        stdout.print_json(data={"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        stdout.print(_table(findings))
    failures = [finding.name for finding in findings if finding.level == "failure"]
    if failures:
        raise RunError(f"doctor: {len(failures)} of {len(findings)} checks fail: {', '.join(dict.fromkeys(failures))}")
    return findings


def _checks(config: SpectrainConfig, named_run: bool) -> list[tuple[str, Check]]:
    from spectrain.stages.attention_check import check_attention_kernels
    from spectrain.stages.run_dir_checks import check_run_dir

    checks: list[tuple[str, Check]] = [
        ("interpreter", machine.check_interpreter),
        ("torch", machine.check_torch),
        ("devices", machine.check_devices),
        ("device map", partial(machine.check_device_map, config)),
        ("all-reduce", machine.check_all_reduce),
        ("vllm", machine.check_vllm),
        ("transformers", partial(machine.check_transformers, config)),
        ("attention", check_attention_kernels),
        ("disk", partial(machine.check_disk, config)),
        ("hub", machine.check_hub),
        ("wandb", partial(machine.check_wandb, config)),
        ("limits", machine.check_limits),
    ]
    return [*checks, *([("run directory", partial(check_run_dir, config.run.dir))] if named_run else [])]


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "check", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        level = Text(finding.level, style=_COLOURS[finding.level])
        table.add_row(level, finding.name, Text(finding.text), Text(finding.remedy))
    return table
