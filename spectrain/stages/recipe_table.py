"""``spectrain recipes``: what each recipe trains, for which target, on what, what it would take, and what came of it.

Figures are those of ``plan`` from configurations alone. Recipes for named devices are planned for the same number of
prompts, since the shipped ones only show that they run; where no device is named, time depends on the machine, and no
hours are given. ``recipes/README.md`` has the same table (``make recipes`` writes it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.table import Table

from spectrain.config.commands import COMMANDS
from spectrain.config.folders import folders, group_options, shipped_folder
from spectrain.config.key_reference import write_part
from spectrain.config.loading import compose
from spectrain.config.plan_schema import DEVICES
from spectrain.config.schema import SpectrainConfig
from spectrain.console import ProgressBar, SafeConsole, stdout
from spectrain.errors import SpectrainError
from spectrain.files import bytes_text
from spectrain.reading import read_text, understood

PROMPTS = 50_000  # that recipes for named devices are planned for
_COLUMNS = ("recipe", "target", "method", "hardware", "disk", "hours", "τ")
_FILE_COLUMNS = 160
PART = "recipes"  # of the README, that `make recipes` writes


@dataclass(frozen=True)
class RecipeRow:
    """A line of the table, as text. ``disk``: of hidden states, at most; ``hours``: of the whole pipeline; empty where
    it is not known.
    """

    recipe: str
    target: str
    method: str
    hardware: str
    disk: str
    hours: str
    tau: str

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.recipe, self.target, self.method, self.hardware, self.disk, self.hours, self.tau)


def list_recipes(line: Any) -> None:
    """Prints the recipes whose name, target, method or hardware contain all the words of the command line."""
    name, *others = _COLUMNS
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(name, no_wrap=True)  # it is what one types
    for other in others:
        table.add_column(other)
    with ProgressBar("recipes", total=len(group_options("recipe")), unit="recipes") as bar:
        for row in recipe_rows():
            bar.advance(1)
            if all(word.lower() in " ".join(row.cells).lower() for word in line.topics):
                table.add_row(*row.cells)
    # A file or another program gets a line for each.
    (stdout if stdout.is_terminal else SafeConsole(width=_FILE_COLUMNS, highlight=False)).print(table)
    stdout.print(caption(), soft_wrap=True)


def caption() -> str:
    return (
        f"disk: hidden states, at most; hours: of generate, capture, fit and eval together, planned for {PROMPTS:,} "
        f"training prompts; both by `spectrain plan`, without hours and for the recipe's own prompts where no device "
        f"is named; τ: acceptance length that was measured, with its 95 % interval"
    )


def recipe_rows(shipped_only: bool = False) -> Iterator[RecipeRow]:
    """One for each recipe, by name; reads configurations and prompt files alone."""
    root, measured = shipped_folder("recipes"), _measured(shipped_only)
    for name, path in sorted(group_options("recipe").items()):
        if not shipped_only or (root is not None and path.is_relative_to(root)):
            yield _row(name, measured.get(name) or {})


def _row(name: str, measured: dict[str, Any]) -> RecipeRow:
    from spectrain.drafters.registry import find_method

    config = compose([f"recipe={name}"])
    disk, hours = _planned(config)
    tau = ""
    if measured:
        low, high = measured["interval"]
        tau = f"{measured['tau']:.2f} ({low:.2f}–{high:.2f})"
    label = find_method(config.drafter.method).label
    return RecipeRow(name, config.target.path.rpartition("/")[2], label, _hardware(config), disk, hours, tau)


def _planned(config: SpectrainConfig) -> tuple[str, str]:
    """(disk, hours), empty where the target's dimensions or the prompts are not known here."""
    from spectrain.stages.checks import check_config, prepare
    from spectrain.stages.plan import device_speed, estimate, stage_seconds
    from spectrain.stages.plan_states import bytes_on_disk

    command = COMMANDS["plan"]
    named = config.plan.device in DEVICES
    if named and config.plan.prompts is None:
        config = replace(config, plan=replace(config.plan, prompts=PROMPTS))
    try:
        check_config(config, command)
        context = prepare(config, command, fetch=False)
        numbers = estimate(context)
        disk = bytes_text(bytes_on_disk(context, numbers.states_bytes))
    except SpectrainError:
        return "", ""
    if not named:
        return disk, ""
    seconds = sum(stage_seconds(context, numbers, device_speed(context)).values())
    return disk, f"{seconds / 3600:,.1f}"


def _hardware(config: SpectrainConfig) -> str:
    """Devices, and how the target lies on them."""
    device, engine = DEVICES.get(config.plan.device), config.engine
    split = engine.tensor_parallel_size * engine.pipeline_parallel_size
    count = 1 if engine.name == "hf" else split * engine.data_parallel_size
    if device is None and count == 1:
        return "CPU or one GPU"
    name = "GPU" if device is None else device.label.removeprefix("AMD Instinct ")
    copies = f", target over {split}" if split > 1 else ", a target on each" if count > 1 else ""
    return f"{count} × {name}{copies}" if count > 1 else f"one {name}"


def _measured(shipped_only: bool) -> dict[str, Any]:
    """Recipe -> what was measured of it, the user's own files first."""
    root = shipped_folder("recipes")
    places = [root] if shipped_only else [*reversed(folders("recipes"))]
    found: dict[str, Any] = {}
    for folder in places:
        if folder is not None and (folder / "measured.yaml").is_file():
            with understood(str(folder / "measured.yaml")):
                found |= yaml.safe_load(read_text(folder / "measured.yaml")) or {}
    return found


# --- README --------------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[RecipeRow]) -> str:
    """The table for ``recipes/README.md``."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    lines += [
        "".join(f"| {cell} " if cell else "| " for cell in (f"`{row.recipe}`", *row.cells[1:])) + "|" for row in rows
    ]
    return "\n".join([*lines, "", caption() + "."])


if __name__ == "__main__":
    import sys

    write_part(Path(sys.argv[1]), PART, markdown([*recipe_rows(shipped_only=True)]))
