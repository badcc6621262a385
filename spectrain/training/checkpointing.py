"""Training state on disk, for exact resume: weights, optimiser moments and counters, safetensors and JSON only.

Everything random in training is a function of (seed, epoch), so the step counter is all the randomness there is to
save. A checkpoint is a folder that appears in one step; a kill while writing leaves the one before.

It holds whole tensors by the names of parameters, whatever strategy they were sharded by: the first rank gathers them
on its host, one at a time, and writes them. So a training goes on with another strategy or another number of ranks, and
there is one format. torch.distributed.checkpoint, where every rank writes what it has, is for states that no host
holds; a drafter's is a few GB.

``state.json`` holds the digests of the tensor files and of itself. A checkpoint is loaded only if they are right; one
that is damaged stays as it is, and the one before is taken. Cost: each file is read once more when it is written and
once more when it is loaded, about a second a GB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from spectrain.console import say
from spectrain.errors import InputError
from spectrain.files import (
    DIGEST,
    check_digest,
    file_digest,
    recover_folder,
    remove,
    replace_folder,
    with_digest,
    without_digest,
)

_NAME = re.compile(r"step-(\d{8})")
_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_DIGESTS = "digests"


@dataclass
class TrainingState:
    """The whole state of weights and optimisers, on the host. ``weights``: by the parameters' names; ``moments``: by
    ``optimiser/parameter/moment``, by names so that group order does not matter. Empty on ranks that do not write it.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, optimizers: list[Optimizer]) -> TrainingState:
        """Copies of a model that is whole here."""
        return cls(
            {name: on_host(parameter) for name, parameter in model.named_parameters()},
            {
                f"{type(optimizer).__name__}/{name}/{key}": on_host(value)
                for optimizer, name, moments in named_moments(model, optimizers)
                for key, value in moments.items()
            },
        )


def named_moments(model: nn.Module, optimizers: list[Optimizer]) -> Iterator[tuple[Optimizer, str, dict[str, Tensor]]]:
    """(optimiser, parameter's name, its moments) of every parameter that has some."""
    names = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, moments in optimizer.state.items():
            yield optimizer, names[id(parameter)], moments


def on_host(tensor: Tensor) -> Tensor:
    """A copy that nobody else changes."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def save_checkpoint(folder: Path, tensors: TrainingState, state: dict[str, Any], keep: int) -> Path:
    """Write ``folder/step-…`` and remove all but the newest ``keep``. ``state`` must be JSON and hold ``step``.

    Raises RunError if it cannot be written; the checkpoint before is kept then.
    """
    path = folder / checkpoint_name(state["step"])
    contents = {_MODEL: tensors.weights, _OPTIMIZER: tensors.moments}

    def fill(into: Path) -> None:
        for name, content in contents.items():
            save_file(content, into / name)
        digests = {name: file_digest(into / name) for name in contents}
        text = json.dumps(with_digest({**state, _DIGESTS: digests}), indent=1)
        (into / _STATE).write_text(text, encoding="utf-8")

    size_bytes = sum(tensor.nbytes for content in contents.values() for tensor in content.values())
    replace_folder(path, fill, f"the checkpoint of step {state['step']}", size_bytes)
    prune_checkpoints(folder, state["step"], keep)
    return path


def prune_checkpoints(folder: Path, step: int, keep: int) -> None:
    """Remove all but the newest ``keep`` of those up to ``step``. Later ones are none of this training's (damaged, or
    put there by somebody) and stay.
    """
    own = [path for path in _checkpoints(folder) if _step(path) <= step]
    for stale in own[:-keep]:
        remove(stale)


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def newest_checkpoint(folder: Path) -> Path | None:
    """The one that ``load_checkpoint`` restores: the newest that is whole. What a kill left of one that was being
    written or removed is put in order first.
    """
    for leftover in folder.glob(".step-*"):
        recover_folder(folder / leftover.name[1:].rsplit(".", 1)[0])
    return next((path for path in reversed(_checkpoints(folder)) if damage(path) is None), None)


def load_checkpoint(folder: Path, model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any] | None:
    """Restore the newest whole checkpoint into model and optimisers; None where there is none. Says which are damaged.
    Raises InputError where it is of another model.
    """
    path = newest_checkpoint(folder)
    _say_what_is_damaged(folder, path)
    if path is None:
        return None
    tensors = load_file(path / _MODEL)
    parameters = dict(model.named_parameters())
    if {n: t.shape for n, t in tensors.items()} != {n: p.shape for n, p in parameters.items()}:
        raise InputError(f"{path} holds the state of another drafter: remove {folder} to start anew")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    _restore_optimizers(model, optimizers, load_file(path / _OPTIMIZER), path)
    state = without_digest(_read_state(path))
    del state[_DIGESTS]
    return state


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint: a file that is missing or whose digest differs; None: nothing."""
    try:
        state = _read_state(path)
        if state["step"] != _step(path):
            return f"{_STATE} is that of step {state['step']}"
        for name in (_MODEL, _OPTIMIZER):
            if file_digest(path / name) != state[_DIGESTS][name]:
                return f"the digest of {name} differs"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, InputError):
        return f"{_STATE} cannot be read"
    return None


def _read_state(path: Path) -> dict[str, Any]:
    state = json.loads((path / _STATE).read_text(encoding="utf-8"))
    if not isinstance(state, dict) or DIGEST not in state:
        raise ValueError(f"{path / _STATE} is no state")
    check_digest(state, path / _STATE, "it is damaged")
    return state


def _say_what_is_damaged(folder: Path, chosen: Path | None) -> None:
    later = [path for path in _checkpoints(folder) if chosen is None or path > chosen]
    for path in reversed(later):
        say(f"fit: {path} is damaged ({damage(path)}): it is passed over, and left as it is")
    if later and chosen is None:
        say("fit: no checkpoint is whole: training starts anew")


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)) if folder.is_dir() else []


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
