"""P-EAGLE: EAGLE-3 that drafts all positions in one pass. This version can only tell vLLM about such a drafter."""

from __future__ import annotations

from spectrain.drafters.registry import DrafterMethod


class PEagleMethod(DrafterMethod):
    """The kind ``peagle``."""

    name = "peagle"
    label = "P-EAGLE"
    trainable = False
    taps_field = "eagle_aux_hidden_state_layer_ids"
    speculative_config = {"method": "eagle3", "parallel_drafting": True}


METHOD = PEagleMethod()
