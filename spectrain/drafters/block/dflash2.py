"""DFlash2: DFlash with dynamic convolutions in its layers and a selector among the likeliest tokens of each slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.drafters.block.block_shape import BlockShape, ConvShape, SelectorShape
from spectrain.drafters.block.dflash import DFlashMethod
from spectrain.drafters.foreign_checkpoints import count, section
from spectrain.errors import ConfigError
from spectrain.target.spec import TargetSpec

_GROUP_SIZE = 64
_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


class DFlash2Method(DFlashMethod):
    """The kind ``dflash2``. Full vocabulary only. vLLM runs it as a variant of dflash."""

    name = "dflash2"
    label = "DFlash2"
    sections = (*DFlashMethod.sections, "dflash2")
    architecture = "DFlash2DraftModel"
    foreign_architectures = ("DFlash2DraftModel",)
    nested_fields = _FIELDS

    def check(self, config: DrafterConfig) -> None:
        super().check(config)
        if config.draft_vocab_size is not None:
            raise ConfigError("drafter.draft_vocab_size: dflash2 drafts from the whole vocabulary, leave it at null")

    def heads(self, config: DrafterConfig, spec: TargetSpec) -> dict[str, Any]:
        own = config.dflash2
        return {
            "conv": ConvShape(own.conv_kernel_size, _group_size(own.conv_group_size, spec.hidden_size)),
            "selector": SelectorShape(own.selector_rank, min(own.selector_top_k, spec.vocab_size)),
        }

    def extra_widths(self, config: DrafterConfig, slots: int) -> float:
        """Each of four mixes keeps what it reads, and the coefficients of every slot that a step of its kernel
        reaches.
        """
        reached = sum(1 - step / slots for step in range(min(config.dflash2.conv_kernel_size, slots)))
        return 4 * (1 + reached)

    def describe_heads(self, shape: BlockShape) -> dict[str, Any]:
        assert shape.conv is not None and shape.selector is not None
        conv, selector = shape.conv, shape.selector
        values = (conv.kernel_size, conv.group_size, selector.rank, selector.top_k)
        return dict(zip(_FIELDS, values, strict=True))

    def read_heads(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        kernel_size, group_size, rank, top_k = (fields[name] for name in _FIELDS)
        return {"conv": ConvShape(kernel_size, group_size), "selector": SelectorShape(rank, top_k)}

    def head_settings(self, shape: BlockShape) -> dict[str, object]:
        return {f"dflash2.{name}": value for name, value in self.describe_heads(shape).items()}

    def read_foreign(self, architecture: str, config: dict[str, Any], where: str) -> dict[str, Any]:
        nested = section(config, "dflash_config", where)
        own = {name: count(nested, name, where, "dflash_config.") for name in _FIELDS}
        return super().read_foreign(architecture, config, where) | own


def _group_size(wanted: int | None, hidden_size: int) -> int:
    if wanted is None:
        return next(size for size in range(min(_GROUP_SIZE, hidden_size), 0, -1) if hidden_size % size == 0)
    if hidden_size % wanted:
        raise ConfigError(f"drafter.dflash2.conv_group_size={wanted} must divide the target's width of {hidden_size}")
    return wanted


METHOD = DFlash2Method()
