"""Weights that a multi-token-prediction head begins with: the target's own head, or a new one from its last layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectrain.drafters.autoregressive.mtp_layer import MtpBody
from spectrain.drafters.autoregressive.mtp_shape import MtpShape
from spectrain.drafters.autoregressive.mtp_tensors import HeadReader, read_head, read_layer_as_head
from spectrain.errors import InputError
from spectrain.target.families import Family
from spectrain.target.head import TargetHead
from spectrain.target.mtp_heads import require_head
from spectrain.target.spec import TargetSpec

if TYPE_CHECKING:
    from spectrain.drafters.autoregressive.mtp import Mtp


def load_native(drafter: Mtp, spec: TargetSpec, head: TargetHead, folder: Path) -> None:
    """The target's own head into ``drafter``. InputError for a target without one."""
    shape, reader = drafter.shape, HeadReader(folder, spec.quantization)
    found = read_native(drafter.body.state_dict(), shape, reader)
    _refuse_own_head(shape, head, reader)
    _fill(drafter.body, found)


def read_native(state: Mapping[str, Tensor], shape: MtpShape, reader: HeadReader) -> dict[str, Tensor]:
    """The target's own head. ``state``: the body's tensors, whose shapes count."""
    require_head(shape.family, reader.reader.names, shape.target_layers, str(reader.reader.folder))
    return read_head(state, shape.head, shape.target_layers, reader)


def _refuse_own_head(shape: MtpShape, head: TargetHead, reader: HeadReader) -> None:
    """A head's copy of lm_head must be one."""
    name = f"{shape.head.start(shape.target_layers)}shared_head.head.weight"
    if name not in reader.reader.names:
        return
    ours = head.lm_head_weight
    if not torch.equal(reader.tensor(name).to(ours.device, ours.dtype), ours):
        raise InputError(
            f"the checkpoint in {reader.reader.folder}: tensor {name} is not the target's lm_head: heads that share it "
            f"are tuned here"
        )


def begin_with_last_layer(drafter: Mtp, spec: TargetSpec, head: TargetHead, folder: Path) -> None:
    """The last layer with attention of the head's kind; the projection adds the normed token to the normed state."""
    shape, reader = drafter.shape, HeadReader(folder, spec.quantization)
    _fill(drafter.body, read_last_layer(drafter.body.state_dict(), spec, head.math.family, reader))
    layer = drafter.body.layers[0]
    for norm in (layer.embedding_norm, layer.hidden_norm):
        norm.weight.fill_(1.0 - shape.offset)
    eye = torch.eye(shape.hidden_size)
    layer.projection.weight.copy_(torch.cat([eye, eye], dim=1))


def read_last_layer(
    state: Mapping[str, Tensor], spec: TargetSpec, family: Family, reader: HeadReader
) -> dict[str, Tensor]:
    """What a new head takes of the target, as ``read_layer_as_head``."""
    layers = [index for index, kind in enumerate(spec.layer_types) if kind == "full_attention"]
    norm = f"{family.final_norm}.weight"
    prefix = next((one for one in family.prefixes if one + norm in reader.reader.names), family.prefixes[-1])
    start = f"{prefix}{family.layers}.{layers[-1] if layers else spec.num_layers - 1}."
    return read_layer_as_head(state, start, prefix + norm, reader)


def _fill(body: MtpBody, found: Mapping[str, Tensor]) -> None:
    state = body.state_dict()
    for name, tensor in found.items():
        state[name].copy_(tensor.to(state[name].dtype))
