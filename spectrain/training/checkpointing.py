"""Training state on disk, for exact resume: weights, optimiser moments and counters, safetensors and JSON only.

Everything random in training is a function of (seed, epoch), so the step counter is all the randomness there is to
save. A checkpoint is a folder that appears in one step; a kill while writing leaves the one before.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from spectrain.errors import InputError
from spectrain.files import recover_folder, replace_folder

_NAME = re.compile(r"step-(\d{8})")


def save_checkpoint(
    folder: Path, model: nn.Module, optimizers: list[Optimizer], state: dict[str, Any], keep: int
) -> Path:
    """Write ``folder/step-…`` and remove all but the newest ``keep``. ``state`` must be JSON and hold ``step``."""
    path = folder / f"step-{state['step']:08d}"

    def fill(into: Path) -> None:
        save_file(
            {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}, into / "model.safetensors"
        )
        save_file(_optimizer_tensors(model, optimizers), into / "optimizer.safetensors")
        (into / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")

    replace_folder(path, fill)
    for stale in _checkpoints(folder)[:-keep]:
        shutil.rmtree(stale, ignore_errors=True)
    return path


def newest_checkpoint(folder: Path) -> Path | None:
    """The one that ``load_checkpoint`` restores; what a kill left of one that was being written is put in
    order first.
    """
    for leftover in folder.glob(".step-*"):
        recover_folder(folder / leftover.name[1:].rsplit(".", 1)[0])
    return next(reversed(_checkpoints(folder)), None)


def load_checkpoint(folder: Path, model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any] | None:
    """Restore the newest checkpoint into model and optimisers; None where there is none. Raises InputError where it is
    of another model.
    """
    path = newest_checkpoint(folder)
    if path is None:
        return None
    tensors = load_file(path / "model.safetensors")
    parameters = dict(model.named_parameters())
    if {n: t.shape for n, t in tensors.items()} != {n: p.shape for n, p in parameters.items()}:
        raise InputError(f"{path} holds the state of another drafter: remove {folder} to start anew")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    _restore_optimizers(model, optimizers, load_file(path / "optimizer.safetensors"), path)
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def _optimizer_tensors(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Moments keyed ``optimiser/parameter/moment``: by names, so that group order does not matter."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{type(optimizer).__name__}/{names[id(parameter)]}/{key}": value.detach().cpu().contiguous()
        for optimizer in optimizers
        for parameter, moments in optimizer.state.items()
        for key, value in moments.items()
    }


def _restore_optimizers(model: nn.Module, optimizers: list[Optimizer], tensors: dict[str, Tensor], path: Path) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    owners = {
        (type(optimizer).__name__, names[id(parameter)]): (optimizer, parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    moments = {tuple(key.split("/")): value for key, value in tensors.items()}
    if {(kind, name) for kind, name, _ in moments} != set(owners):
        raise InputError(
            f"{path} was written with another optimiser: set trainer.optimizer back, or remove the folder to start anew"
        )
    for (kind, name, moment), value in moments.items():
        optimizer, parameter = owners[kind, name]
        # Step counters live on the CPU or beside the parameter, as the optimiser likes it; moments beside the
        # parameter.
        optimizer.state[parameter][moment] = value.to(parameter.device) if value.ndim or parameter.is_cuda else value
