"""What decides the parameters and the arithmetic of a block drafter: DFlash, DSpark and DFlash2 are settings of one
architecture.

A block of B slots begins at the anchor, the last token the target has committed: slot 0 holds the anchor's embedding,
the others that of the mask token, and slot j sits at the anchor's position + j. One pass fills all slots; slot j drafts
the token at its own position (``sample_from_anchor`` false, slots 1 … B−1) or the one behind it (true, slots 0 … B−1).
"""

from __future__ import annotations

from dataclasses import dataclass

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.drafters.closed_form_size import block_operations, most_blocks
from spectrain.drafters.drafter import DrafterShape
from spectrain.drafters.field_checks import check_sizes, check_token, whole
from spectrain.drafters.layers import LayerShape

_MARKOV_KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class MarkovShape:
    """A sequential head of DSpark: the bias of a slot's logits depends on the token before it (``heads.py``)."""

    kind: str  # vanilla, gated, rnn
    rank: int

    def __post_init__(self) -> None:
        if self.kind not in _MARKOV_KINDS:
            raise ValueError(f"markov_head_type is {self.kind!r}, known are {', '.join(_MARKOV_KINDS)}")
        whole(self.rank, "markov_rank")


@dataclass(frozen=True)
class ConvShape:
    """The dynamic causal convolutions of DFlash2 (``heads.py``)."""

    kernel_size: int
    group_size: int  # channels that share a dynamic coefficient

    def __post_init__(self) -> None:
        whole(self.kernel_size, "conv_kernel_size")
        whole(self.group_size, "conv_group_size")


@dataclass(frozen=True)
class SelectorShape:
    """The candidate selector of DFlash2 (``heads.py``)."""

    rank: int
    top_k: int

    def __post_init__(self) -> None:
        whole(self.rank, "selector_rank")
        whole(self.top_k, "selector_top_k")


@dataclass(frozen=True)
class BlockShape(DrafterShape):
    """Everything that decides the parameters' shapes and the arithmetic. The drafter is as wide as its target."""

    method: str  # dflash, dspark, dflash2: the layout of the folder
    layer: LayerShape
    num_layers: int
    taps: tuple[int, ...]
    target_vocab_size: int
    draft_vocab_size: int
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool
    sliding_window: int | None = None  # a slot at position p sees keys at p − sliding_window + 1 and later; None: all
    causal: bool = False  # inside the block, slot j sees slots 0 … j; else all
    markov: MarkovShape | None = None
    confidence: bool = False
    confidence_with_markov: bool = False
    conv: ConvShape | None = None
    selector: SelectorShape | None = None

    def __post_init__(self) -> None:
        check_sizes(self, self.num_layers)
        whole(self.block_size, "block_size", least=2)
        check_token(self.mask_token_id, "mask_token_id", self.target_vocab_size)
        if self.sliding_window is not None:
            whole(self.sliding_window, "sliding_window")
        if self.conv is not None and self.layer.hidden_size % self.conv.group_size:
            raise ValueError(
                f"conv_group_size is {self.conv.group_size}, it must divide hidden_size={self.layer.hidden_size}"
            )

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def max_drafts(self) -> int:
        return self.num_drafts

    @property
    def has_confidence(self) -> bool:
        return self.confidence

    @property
    def first_slot(self) -> int:
        """The first slot that drafts."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size - self.first_slot

    def closed_form_size(self, config: DrafterConfig) -> tuple[int, float]:
        return most_blocks(self.layer, self.block_size), block_operations(self.layer, self.block_size)

    def slots(self, num_drafts: int) -> int:
        """Length of the block that drafts so many tokens; a server asked for fewer tokens runs a shorter block."""
        return num_drafts + self.first_slot


_SCORED_ROWS = 4096  # slots of blocks that are scored together: enough to keep an accelerator busy


def blocks_together(slots: int) -> int:
    """How many blocks of so many slots an evaluation runs at a time."""
    return max(1, _SCORED_ROWS // slots)
