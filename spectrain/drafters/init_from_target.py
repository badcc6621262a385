"""Parts of a target that a fresh drafter begins with: rows of its head, weights of single decoder layers.

With a few hundred documents, where a drafter begins decides how far it gets. All gains are plain in a drafter, whatever
the family's convention.

Least squares from sums: what the closed-form initialisations are solved with. S samples, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from spectrain.console import say
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.shared_solving import SharedText
from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.families import Family, family_of
from spectrain.target.head import TargetHead
from spectrain.target.packed_weights import NotReadError, ShapesReader, is_stored, read_weight
from spectrain.target.spec import TargetSpec

# The norm in front of a layer's MLP: Gemma's has a name of its own, and its post_attention_layernorm is something else.
MLP_NORMS = ("pre_feedforward_layernorm.weight", "post_attention_layernorm.weight")
# What is copied together or not at all, by its names in a layer and in the drafter's.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
_REMEDY = "use a checkpoint whose layers have 16 bits, or drafter.init=closed_form, which does without"
_GROUPS = {"self_attn": ATTENTION, "mlp": MLP}
_NORMS = {
    "self_attn": ("input_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    "mlp": MLP_NORMS,
}


@dataclass(frozen=True)
class CopiedLayers:
    """What a drafter begins with: ``parts`` (self_attn, mlp) of each of the target's last ``count`` layers, with their
    norms.

    A part that the checkpoint has under other names is left out. One that is quantised in a way that is not read is,
    too, unless it is ``required``.
    """

    count: int
    parts: tuple[str, ...]
    required: bool

    def read(
        self, family: Family, spec: TargetSpec, reader: CheckpointReader, left_out: list[NotReadError]
    ) -> Iterator[dict[str, Tensor]]:
        """Weights by their names inside a layer, layer by layer; nothing where the target has fewer. ``left_out`` gets
        the first tensors of parts that are not read; InputError for one that is required.
        """
        for index in range(spec.num_layers - self.count, spec.num_layers):
            yield {} if index < 0 else self._layer(family, spec, reader, index, left_out)

    def check(self, spec: TargetSpec, folder: Path) -> None:
        """As ``read``, of shapes alone; says what is left out."""
        left_out: list[NotReadError] = []
        for _ in self.read(family_of(spec.config), spec, ShapesReader(folder), left_out):
            pass
        if left_out:
            others = f" (and {len(left_out) - 1} more parts of layers)" if len(left_out) > 1 else ""
            say(f"{left_out[0].what}{others}: what would have begun as a copy of it begins at random")

    def _layer(
        self, family: Family, spec: TargetSpec, reader: CheckpointReader, index: int, left_out: list[NotReadError]
    ) -> dict[str, Tensor]:
        prefixes = (f"{prefix}{family.layers}.{index}." for prefix in family.prefixes)
        start = next((one for one in prefixes if any(name.startswith(one) for name in reader.names)), None)
        found: dict[str, Tensor] = {}
        for part in self.parts if start is not None else ():
            names = [name for name in _NORMS[part] if f"{start}{name}" in reader.names]
            matrices = [f"{part}.{name}.weight" for name in _GROUPS[part]]
            if all(is_stored(reader.names, f"{start}{name}") for name in matrices):
                names += matrices
            try:
                found |= {name: read_weight(reader, f"{start}{name}", spec.quantization, _REMEDY) for name in names}
            except NotReadError as error:
                if self.required:
                    raise
                left_out.append(error)
        return found


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


@torch.no_grad()
def copy_head_rows(drafter: Drafter, head: TargetHead) -> None:
    """The target's own rows of the draft vocabulary, where the drafter has a head of its own."""
    if drafter.shape.owns_head:
        ids_D = drafter.draft_ids_D.to(head.lm_head_weight.device)
        drafter.body.lm_head.weight.copy_(head.lm_head_weight[ids_D])


RIDGE = 3e-3  # of the mean diagonal of the Gram matrix


class Gram:
    """Sums of a least-squares problem, XᵀX and XᵀY, in float64. ``text``: what they are sums over."""

    def __init__(self, text: SharedText) -> None:
        self._text = text
        self.xx: Tensor | float = 0.0
        self.xy: Tensor | float = 0.0

    def add(self, x_SI: Tensor, y_SO: Tensor) -> None:
        self.xx = self.xx + (x_SI.T @ x_SI).double()
        self.xy = self.xy + (x_SI.T @ y_SO).double()

    def gather(self) -> None:
        """Once all has been added: what other processes have, too."""
        self.xx, self.xy = self._text.total(self.xx), self._text.total(self.xy)

    def solve(self) -> Tensor:
        """Ridge solution [I, O]."""
        assert isinstance(self.xx, Tensor) and isinstance(self.xy, Tensor)
        ridge = RIDGE * self.xx.diagonal().mean() * torch.eye(len(self.xx), dtype=self.xx.dtype, device=self.xx.device)
        return torch.linalg.solve(self.xx + ridge, self.xy)


def unit(x: Tensor) -> Tensor:
    """Divided by its root mean square: a hidden state as the final norm sees it."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
