"""Single decoder layers of a target's checkpoint, for drafters that start from parts of them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.head import TargetHead

# The norm in front of a layer's MLP: Gemma's has a name of its own, and its post_attention_layernorm is something else.
MLP_NORMS = ("pre_feedforward_layernorm.weight", "post_attention_layernorm.weight")


def read_layer(head: TargetHead, folder: Path, index: int, parts: tuple[str, ...]) -> dict[str, Tensor]:
    """Tensors of layer ``index`` whose names inside the layer begin with one of ``parts``; empty where the checkpoint
    has other names.
    """
    reader = CheckpointReader(folder)
    family = head.math.family
    for prefix in family.prefixes:
        start = f"{prefix}{family.layers}.{index}."
        names = [name for name in reader.names if name.startswith(tuple(f"{start}{part}" for part in parts))]
        if names:
            return {name.removeprefix(start): reader.get(name) for name in names}
    return {}


def mlp_norm(layer: dict[str, Tensor]) -> Tensor | None:
    """The gain of the norm in front of the MLP, as stored."""
    return next((layer[name] for name in MLP_NORMS if name in layer), None)


def copy_weights(
    module: nn.Module, prefix: str, names: tuple[str, ...], layer: dict[str, Tensor], offset: float = 0.0
) -> bool:
    """Copy weights of submodules from ``prefix.name`` of a layer, if all are there with the same shapes; whether that
    was so.
    """
    pairs = [(getattr(module, name).weight, layer.get(f"{prefix}.{name}.weight")) for name in names]
    if any(found is None or found.shape != own.shape for own, found in pairs):
        return False
    for own, found in pairs:
        assert found is not None
        own.copy_(found.float() + offset)
    return True
