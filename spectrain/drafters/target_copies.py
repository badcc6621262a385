"""Matrices of the target that come with a drafter's weights.

Most layouts carry the target's embedding and lm_head along. A drafter borrows them from its target instead, so they
must be the target's own; that is compared when both are there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spectrain.errors import InputError
from spectrain.target.head import TargetHead

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_ROWS = 8192  # of a matrix that is compared
_ROUNDING = 0.01  # relative: bfloat16 rounds by less than half a percent


@dataclass(frozen=True)
class TargetCopies:
    """The matrices that were found in a drafter's file.

    ``path``: the file, for errors. ``tensors``: by the names they have there.
    """

    path: str
    tensors: dict[str, Tensor]

    @classmethod
    def taken_from(cls, tensors: dict[str, Tensor], owns_head: bool, path: str) -> TargetCopies:
        """Moves them out of ``tensors``. ``owns_head``: the lm_head there is the drafter's own, of a reduced
        vocabulary.
        """
        names = [name for name in (_EMBEDDING, *(() if owns_head else (_HEAD,))) if name in tensors]
        return cls(path, {name: tensors.pop(name) for name in names})

    def check(self, head: TargetHead) -> None:
        """Raises InputError where one is not the target's, up to rounding: such a drafter computes what this package
        does not.
        """
        for name, ours in ((_EMBEDDING, head.embed_weight), (_HEAD, head.lm_head_weight)):
            if name in self.tensors and not _same(self.tensors[name], ours):
                raise InputError(
                    f"{self.path}: tensor '{name}' is not the target's: this version reads drafters that share it"
                )


def _same(theirs: Tensor, ours: Tensor) -> bool:
    if theirs.shape != ours.shape:
        return False
    difference = total = 0.0
    for rows, own_rows in zip(theirs.split(_ROWS), ours.split(_ROWS), strict=True):  # whole matrices may be gigabytes
        wide = own_rows.float().cpu()
        difference += float((rows.float().cpu() - wide).square().sum())
        total += float(wide.square().sum())
    return difference <= _ROUNDING**2 * total
