"""DFlash (arXiv:2602.06036): a block of mask tokens behind the last committed token, filled in one pass. No head beside
the lm_head.
"""

from __future__ import annotations

from typing import Any, ClassVar

from spectrain.drafters.block.block_method import BlockMethod, layers_below, write_block
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
    layout = "zlab"
    nested_fields: ClassVar[tuple[str, ...]] = ()  # of the kind's own, which z-lab keeps in ``dflash_config``

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

    def write_foreign(self, standard: dict[str, Any], where: str) -> dict[str, Any]:
        layer = standard["transformer_layer_config"]
        nested = {
            "mask_token_id": standard["mask_token_id"],
            "target_layer_ids": layers_below(standard[self.taps_field]),
            "causal": not standard["sliding_window_non_causal"],
            **{name: standard[name] for name in self.nested_fields},
        }
        if layer.get("use_sliding_window"):
            nested |= {"use_swa": True, "swa_window_size": layer["sliding_window"]}
        return {
            "architectures": [self.foreign_architectures[0]],
            **write_block(standard),
            "dflash_config": nested,
            "layer_types": ["full_attention"] * layer["num_hidden_layers"],
            "use_sliding_window": False,
            "sliding_window": None,
        }


METHOD = DFlashMethod()
