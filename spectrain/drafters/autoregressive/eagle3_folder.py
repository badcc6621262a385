"""EAGLE-3's part of a drafter folder's ``config.json`` (the speculators layout)."""

from __future__ import annotations

from typing import Any

from spectrain.data.vocab import DraftVocab
from spectrain.drafters.autoregressive.eagle3 import Eagle3Shape
from spectrain.drafters.autoregressive.eagle3_drafter import Eagle3
from spectrain.drafters.field_checks import flag, whole
from spectrain.drafters.layer_config import from_layer_config, to_layer_config

ARCHITECTURE = "Eagle3DraftModel"
# Defaults differ between writers and readers, so every one is written out.
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def to_config(drafter: Eagle3) -> dict[str, Any]:
    shape = drafter.shape
    return {
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        **{name: getattr(shape, name) for name in _SWITCHES},
        # vLLM's Llama-style EAGLE-3 does not count the layer ids; an extra key in this dictionary reaches its model.
        "transformer_layer_config": to_layer_config(shape) | {"num_aux_hidden_states": len(shape.taps)},
    }


def facts(drafter: Eagle3) -> dict[str, Any]:
    """What a server has no use for and a later training has."""
    return {"ttt_steps": drafter.steps}


def to_shape(config: dict[str, Any]) -> Eagle3Shape:
    """Raises KeyError, TypeError or ValueError where the fields describe no EAGLE-3 drafter."""
    layer = config["transformer_layer_config"]
    return Eagle3Shape(
        layer=from_layer_config(layer),
        num_layers=layer["num_hidden_layers"],
        taps=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        target_vocab_size=layer["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        **{name: flag(config[name], name) for name in _SWITCHES},
    )


def build(shape: Eagle3Shape, vocab: DraftVocab, noted: dict[str, Any]) -> Eagle3:
    """Raises ValueError where what was noted makes no sense."""
    return Eagle3(shape, vocab, steps=whole(noted.get("ttt_steps", 3), "spectrain.ttt_steps"))
