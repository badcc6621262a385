"""DFlash (arXiv:2602.06036): a block of mask tokens behind the last committed token, filled in one pass. No head beside
the lm_head.
"""

from __future__ import annotations

from typing import Any

from spectrain.drafters.block.block_method import BlockMethod
from spectrain.drafters.foreign_checkpoints import count, refuse_unknown_arithmetic, section
from spectrain.errors import InputError


class DFlashMethod(BlockMethod):
    """The kind ``dflash``."""

    name = "dflash"
    label = "DFlash"
    reads_options = False
    architecture = "DFlashDraftModel"
    speculative_config = {"method": "dflash"}
    foreign_architectures = ("DFlashDraftModel",)

    def read_foreign(self, architecture: str, config: dict[str, Any], where: str) -> dict[str, Any]:
        """z-lab's layout: a Qwen3 configuration, with what is DFlash's own under ``dflash_config``."""
        nested = section(config, "dflash_config", where)
        refuse_unknown_arithmetic(config, nested, where=where)
        block = count(config, "block_size", where)
        standard, causal = self.foreign_block(config, nested, block, block - 1, where)
        if nested.get("sample_from_anchor"):
            raise InputError(
                f"{where}: dflash_config.sample_from_anchor is true, but only dspark drafts from the anchor's slot"
            )
        return standard | {"sample_from_anchor": False, "sliding_window_non_causal": not causal}


METHOD = DFlashMethod()
