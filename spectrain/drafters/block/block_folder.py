"""A block drafter's part of a drafter folder's ``config.json`` (the speculators layout).

vLLM reads one flag of causality for all layers: ``sliding_window_non_causal`` for dflash and dflash2; a dspark layer is
causal if it is a sliding one. It serves the plain Markov head only: a folder with another is for this package's own
loop, and vLLM refuses its tensors.
"""

from __future__ import annotations

from typing import Any

from spectrain.data.vocab import DraftVocab
from spectrain.drafters.block.block_drafter import BlockDrafter
from spectrain.drafters.block.block_shape import BlockShape, ConvShape, MarkovShape, SelectorShape
from spectrain.drafters.field_checks import flag, positive, whole
from spectrain.drafters.layer_config import from_layer_config, to_layer_config

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}


def to_config(drafter: BlockDrafter) -> dict[str, Any]:
    shape = drafter.shape
    config: dict[str, Any] = {
        "aux_hidden_state_layer_ids": list(shape.taps),
        "mask_token_id": shape.mask_token_id,
        "block_size": shape.block_size,
        "sample_from_anchor": shape.sample_from_anchor,
        "sliding_window_non_causal": not shape.causal,
    }
    if shape.method == "dspark":
        config |= {
            "markov_rank": shape.markov.rank if shape.markov else 0,
            "markov_head_type": shape.markov.kind if shape.markov else "none",
            "enable_confidence_head": shape.confidence,
            "confidence_head_with_markov": shape.confidence_with_markov,
        }
    if shape.conv is not None and shape.selector is not None:
        config |= {"conv_kernel_size": shape.conv.kernel_size, "conv_group_size": shape.conv.group_size}
        config |= {"selector_rank": shape.selector.rank, "selector_top_k": shape.selector.top_k}
    kind = "full_attention" if shape.sliding_window is None else "sliding_attention"
    layers = {"layer_types": [kind] * shape.num_layers, "use_sliding_window": shape.sliding_window is not None}
    config["transformer_layer_config"] = to_layer_config(shape) | layers | {"sliding_window": shape.sliding_window}
    return config


def facts(drafter: BlockDrafter) -> dict[str, Any]:
    """What a server has no use for and our own loop has."""
    return {"confidence_temperatures": list(drafter.temperatures)} if drafter.temperatures else {}


def to_shape(config: dict[str, Any]) -> BlockShape:
    """Raises KeyError, TypeError or ValueError where the fields describe no block drafter."""
    method, layer = config["speculators_model_type"], config["transformer_layer_config"]
    sliding = whole(layer["sliding_window"], "sliding_window") if _slides(layer) else None
    kind = (config.get("markov_head_type") or "vanilla") if method == "dspark" and config.get("markov_rank") else "none"
    from_anchor = _flag(config, "sample_from_anchor")
    if from_anchor and method != "dspark":
        raise ValueError(f"sample_from_anchor is true, but only dspark drafts from the anchor's slot, not {method}")
    conv = selector = None
    if method == "dflash2":
        conv = ConvShape(config["conv_kernel_size"], config["conv_group_size"])
        selector = SelectorShape(config["selector_rank"], config["selector_top_k"])
    return BlockShape(
        method=method,
        layer=from_layer_config(layer),
        num_layers=layer["num_hidden_layers"],
        taps=tuple(config["aux_hidden_state_layer_ids"]),
        target_vocab_size=layer["vocab_size"],
        draft_vocab_size=config.get("draft_vocab_size") or layer["vocab_size"],
        block_size=config["block_size"],
        mask_token_id=config["mask_token_id"],
        sample_from_anchor=from_anchor,
        sliding_window=sliding,
        causal=sliding is not None if method == "dspark" else not _flag(config, "sliding_window_non_causal", True),
        markov=None if kind == "none" else MarkovShape(kind, config["markov_rank"]),
        confidence=method == "dspark" and _flag(config, "enable_confidence_head"),
        confidence_with_markov=_flag(config, "confidence_head_with_markov") and kind != "none",
        conv=conv,
        selector=selector,
    )


def _slides(layer: dict[str, Any]) -> bool:
    """Whether its layers are sliding ones."""
    kinds = layer.get("layer_types") or ["full_attention"]
    if kinds not in ([kind] * len(kinds) for kind in ("full_attention", "sliding_attention")):
        raise ValueError(
            f"layer_types is {kinds!r}, this version reads sliding_attention or full_attention in all layers"
        )
    return kinds[0] == "sliding_attention"


def _flag(config: dict[str, Any], name: str, default: bool = False) -> bool:
    value = config.get(name)
    return default if value is None else flag(value, name)


def build(shape: BlockShape, vocab: DraftVocab, noted: dict[str, Any]) -> BlockDrafter:
    """Raises TypeError or ValueError where what was noted makes no sense."""
    name = "confidence_temperatures"
    return BlockDrafter(
        shape, vocab, temperatures=[positive(value, f"spectrain.{name}") for value in noted.get(name) or ()]
    )
