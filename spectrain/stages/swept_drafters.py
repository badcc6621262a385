"""The drafters of a sweep: the run's own, and those of ``sweep.drafters``, one of each kind.

A kind is what tells their cells apart, in names of files as in tables, so two drafters of one kind are two sweeps,
which ``eval compare`` puts side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.schema import SpectrainConfig
from spectrain.drafters.drafter_digests import check_drafter_digests
from spectrain.drafters.drafter_folder import read_method, read_shape
from spectrain.drafters.hub_drafters import drafter_path
from spectrain.drafters.serving_config import read_serving_config
from spectrain.errors import ConfigError
from spectrain.stages.drafter_checks import check_drafter_fits, check_drafter_folder, note_other_target

if TYPE_CHECKING:
    from spectrain.stages.context import Context

_ANY_TAPS = (0,)  # for questions that taps do not decide


@dataclass(frozen=True)
class SweptDrafter:
    """A drafter of a sweep, as the section ``drafter`` of its cells names it.

    most_drafts: more than so many a round it cannot give; None: no limit. step_by_step: whether a shorter round is the
    beginning of a longer one. known_to_vllm: whether vLLM has such drafters.
    """

    config: DrafterConfig
    folder: Path
    most_drafts: int | None
    step_by_step: bool
    known_to_vllm: bool


def swept_drafters(context: Context) -> dict[str, SweptDrafter]:
    """Kind -> drafter, the run's own first. Raises ConfigError for two of a kind."""
    found = {}
    if context.command.needs_drafter:
        found[read_method(context.measured_drafter)] = _described(context.config.drafter, context.measured_drafter)
    for config, folder in _further(context.config):
        kind = read_method(folder)
        if kind in found:
            raise ConfigError(
                f"sweep.drafters: {folder} and {found[kind].folder} are both {kind} drafters: sweep one at a time "
                f"with drafter.path, and compare them with spectrain eval compare"
            )
        found[kind] = _described(replace(config, method=kind), folder)
    return found


def check_further(context: Context) -> None:
    """Each of ``sweep.drafters`` is whole and fits the target."""
    for _, folder in _further(context.config):
        check_drafter_fits(folder, context.spec)
        check_drafter_digests(folder)
        note_other_target(context, folder)


def step_by_step(drafters: Mapping[str, SweptDrafter]) -> tuple[str, ...]:
    """Methods whose shorter rounds are beginnings of their longer ones."""
    return ("ngram", "draft_model", *(kind for kind, drafter in drafters.items() if drafter.step_by_step))


def _further(config: SpectrainConfig) -> list[tuple[DrafterConfig, Path]]:
    """``sweep.drafters`` with their folders; a run directory stands for its drafter."""
    found = []
    for name in config.sweep.drafters:
        own = Path(name).expanduser() / "drafter"
        section = replace(config.drafter, path=str(own) if own.is_dir() else name, revision=None, taps=None)
        folder = drafter_path(section)
        check_drafter_folder(folder, "sweep.drafters")
        found.append((section, folder))
    return found


def _described(config: DrafterConfig, folder: Path) -> SweptDrafter:
    served = read_serving_config(str(folder))
    most = read_shape(folder, _ANY_TAPS).max_drafts
    return SweptDrafter(config, folder, most, served.drafts_step_by_step, served.known_to_vllm)
