"""Tensors of a multi-token-prediction head: between the names and layouts of a target's checkpoint and those of
``mtp.MtpBody``.

Only the head's own tensors are read, whatever else the checkpoint holds. Quantised ones are dequantised by their
scheme, or refused by name. A mixture of experts is stored expert by expert or as two stacks, and is written back as it
was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from spectrain.errors import InputError
from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.mtp_heads import MtpHead
from spectrain.target.packed_weights import ShapesReader, read_weight, scheme_of
from spectrain.target.quantization import Quantization

_NORM, _LAYER = "norm.", "layers.0."
_OWN = {"embedding_norm": "embedding_norm", "hidden_norm": "hidden_norm", "projection": "projection"}
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_REMEDY = "use a checkpoint whose multi-token-prediction head (drafter.init=last_layer: whose last layer) has 16 bits"
# Beside a quantised matrix.
SCALES = re.compile(
    r"((?<!\.[qkv])_scale(_inv|_2)?|_zero_point|_packed|_shape|_scales|_blocks|g_idx|\.(qweight|qzeros|scales))$"
)


def stored_name(body_name: str, head: MtpHead, num_layers: int) -> str:
    """The name in the checkpoint of a tensor of the body."""
    start = head.start(num_layers)
    if body_name.startswith(_NORM):
        return f"{start}{head.output_norm}.{body_name.removeprefix(_NORM)}"
    part = body_name.removeprefix(_LAYER)
    module, _, rest = part.partition(".")
    if module in _OWN:
        return f"{start}{getattr(head, _OWN[module])}.{rest}"
    return f"{start}{head.layer}{part}"


def has_stacked_experts(names: frozenset[str], head: MtpHead, num_layers: int) -> bool:
    """Whether the head's experts are stored as two stacks of all of them."""
    return stored_name(_LAYER + _GATE_UP, head, num_layers) in names


class HeadReader:
    """Reads tensors of the head, or of a layer of the target, from a checkpoint."""

    def __init__(self, folder: Path, quantization: Quantization | None, shapes_only: bool = False) -> None:
        """``shapes_only``: what is read are meta tensors, see ``ShapesReader``."""
        self.reader = ShapesReader(folder) if shapes_only else CheckpointReader(folder)
        self.quantization = quantization

    def tensor(self, name: str) -> Tensor:
        """In full precision. InputError for one that is missing, or quantised in a way that is not read."""
        return read_weight(self.reader, name, self.quantization, _REMEDY)

    def refuse_stack(self, name: str) -> None:
        """InputError for experts whose codes lie in one tensor under another name."""
        module, _, own = name.rpartition(".")
        codes = [one for one in self.reader.of_module(module) if one.rpartition(".")[2].startswith(f"{own}_")]
        if codes:
            raise InputError(
                f"tensor {min(codes)} in {self.reader.folder}: experts in one stack, quantised by "
                f"{scheme_of(self.quantization)}, are not read here: {_REMEDY}"
            )

    def body_tensor(self, body_name: str, shape: torch.Size, name: str) -> Tensor:
        """The tensor ``name`` as the body has it; experts that are stored one by one are stacked."""
        part = body_name.removeprefix(_LAYER)
        if part not in (_GATE_UP, _DOWN) or name in self.reader.names:
            return self.tensor(name)
        self.refuse_stack(name)
        start = name.removesuffix(part.rpartition(".")[2])
        names = ("gate_proj", "up_proj") if part == _GATE_UP else ("down_proj",)
        return torch.stack(
            [torch.cat([self.tensor(f"{start}{expert}.{one}.weight") for one in names]) for expert in range(shape[0])]
        )


def read_head(state: Mapping[str, Tensor], head: MtpHead, num_layers: int, reader: HeadReader) -> dict[str, Tensor]:
    """The head's tensors under the body's names, whose shapes ``state`` has."""
    found = {}
    for name, own in state.items():
        stored = stored_name(name, head, num_layers)
        tensor = reader.body_tensor(name, own.shape, stored)
        _require_shape(tensor, own, stored, reader)
        found[name] = tensor
    return found


def read_layer_as_head(
    state: Mapping[str, Tensor], layer: str, final_norm: str, reader: HeadReader
) -> dict[str, Tensor]:
    """What a new head takes of the target: the layer below the prefix ``layer``, and the final norm."""
    found = {"norm.weight": reader.tensor(final_norm)}
    for name, own in state.items():
        part = name.removeprefix(_LAYER)
        if name.startswith(_NORM) or part.partition(".")[0] in _OWN:
            continue
        found[name] = reader.body_tensor(name, own.shape, layer + part)
        _require_shape(found[name], own, layer + part, reader)
    return found


def _require_shape(tensor: Tensor, own: Tensor, name: str, reader: HeadReader) -> None:
    if tensor.shape != own.shape:
        raise InputError(
            f"the checkpoint in {reader.reader.folder}: tensor {name} has shape {tuple(tensor.shape)}, config.json "
            f"asks for {tuple(own.shape)}: one of them is not the other's, fetch both again"
        )


def stored_tensors(
    state: Mapping[str, Tensor], head: MtpHead, num_layers: int, stacked_experts: bool
) -> dict[str, Tensor]:
    """The body's tensors under the checkpoint's names and in its layout."""
    result = {}
    for name, tensor in state.items():
        stored, part = stored_name(name, head, num_layers), name.removeprefix(_LAYER)
        if part not in (_GATE_UP, _DOWN) or stacked_experts:
            result[stored] = tensor
            continue
        start = stored.removesuffix(part.rpartition(".")[2])
        for expert, matrix in enumerate(tensor):
            if part == _DOWN:
                result[f"{start}{expert}.down_proj.weight"] = matrix
            else:
                gate, up = matrix.chunk(2)
                result[f"{start}{expert}.gate_proj.weight"] = gate
                result[f"{start}{expert}.up_proj.weight"] = up
    return {name: tensor.contiguous() for name, tensor in result.items()}


def body_tensors(
    stored: Mapping[str, Tensor], state: Mapping[str, Tensor], head: MtpHead, num_layers: int
) -> dict[str, Tensor]:
    """The inverse of ``stored_tensors``. KeyError for one that is missing."""
    result = {}
    for name, own in state.items():
        found, part = stored_name(name, head, num_layers), name.removeprefix(_LAYER)
        if found in stored or part not in (_GATE_UP, _DOWN):
            result[name] = stored[found]
            continue
        start = found.removesuffix(part.rpartition(".")[2])
        names = ("gate_proj", "up_proj") if part == _GATE_UP else ("down_proj",)
        result[name] = torch.stack(
            [torch.cat([stored[f"{start}{e}.{one}.weight"] for one in names]) for e in range(own.shape[0])]
        )
    return result
