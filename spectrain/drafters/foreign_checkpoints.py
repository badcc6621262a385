"""Drafter folders as others write them, turned into the one layout that the rest of the package knows.

``config.json`` of any known layout becomes that of the speculators layout with every switch written out, tensors get
the names they have there. Both happen here and nowhere else, so each convention for layer ids is converted once:

    layout                          recognised by                    ids of the taps
    speculators (and spectrain)     speculators_model_type           (eagle_)aux_hidden_state_layer_ids: as ours
    z-lab DFlash, DFlash2           DFlash(2)DraftModel              dflash_config.target_layer_ids: ours - 1
    DeepSpec DSpark                 Qwen3DSparkModel                 target_layer_ids: ours - 1
    EAGLE, SpecForge, AngelSlim     LlamaForCausalLMEagle3           eagle_aux_hidden_state_layer_ids: as ours, as vLLM
                                    reads them

Our id is the number of layers behind which the residual stream is read. Where a field is missing, the default is the
one with which vLLM serves such a folder; where a field asks for something that this package does not compute, reading
ends with an error that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spectrain.drafters.field_checks import positive, whole
from spectrain.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from spectrain.target.head import TargetHead

_BLOCK_ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",  # DeepSpec's name while training
}
_EAGLE3_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
}
EAGLE3_TAPS, BLOCK_TAPS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
# What vLLM takes where a folder in the speculators layout is silent.
_SPECULATORS_DEFAULTS: dict[str, dict[str, Any]] = {
    "eagle3": {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False},
    "dflash": {"sample_from_anchor": False, "sliding_window_non_causal": True},
    "dflash2": {"sample_from_anchor": False, "sliding_window_non_causal": True},
    "dspark": {"sample_from_anchor": False, "markov_head_type": "vanilla"},
}
_DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_DSPARK_DEFAULTS = {
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
_EAGLE3_DRAFTS = 3  # a round, where a layout has no field for it
_LLAMA_THETA = 10000.0
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_ROWS = 8192  # of a matrix that is compared
_ROUNDING = 0.01  # relative: bfloat16 rounds by less than half a percent
_PLAIN_LAYER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Fields that change the arithmetic, and the only values this package computes.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "is_neox_style": (True, None),
    "logit_scale": (1, None),
    "use_aux_hidden_state": (True, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "attention_sink_bias": (False, None),
    "add_swa_attention_sink_bias": (False, None),
    "attention_value_scale": (1, None),
    "input_embedding_scale": (1, None),
    "output_multiplier": (1, None),
    "final_logit_softcapping": (0, None),
}


def standard_config(config: dict[str, Any], where: str, usual_taps: Sequence[int] | None = None) -> dict[str, Any]:
    """A drafter's configuration in the speculators layout; fields that no layout knows are kept.

    Args:
        config: the content of ``config.json``.
        where: its name, for errors.
        usual_taps: what a drafter reads that does not say which layers: the target's 2, N//2 and N-3. None: such a
        drafter keeps no taps.

    Raises InputError, naming ``where`` and the field that is missing, makes no sense or asks for what this package does
    not compute.
    """
    if "speculators_model_type" in config or "speculators_config" in config:
        standard = _from_speculators(config, where)
    else:
        standard = _from_architecture(config, where)
    if usual_taps is not None and standard.get("speculators_model_type") == "eagle3" and not standard.get(EAGLE3_TAPS):
        standard[EAGLE3_TAPS] = list(usual_taps)
    return standard


def standard_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of the speculators layout. EAGLE's only layer is called ``midlayer``; ``t2d`` says
    nothing beyond ``d2t``.
    """
    return {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items() if name != "t2d"}


@dataclass(frozen=True)
class Copies:
    """Matrices of the target that a drafter's file carries along. A drafter borrows them from its target, so they must
    be the same.

    ``path``: the file, for errors. ``tensors``: by the names they have there.
    """

    path: str
    tensors: dict[str, Tensor]

    @classmethod
    def taken_from(cls, tensors: dict[str, Tensor], owns_head: bool, path: str) -> Copies:
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


# --- the speculators layout ----------------------------------------------------------------------------------------


def _from_speculators(config: dict[str, Any], where: str) -> dict[str, Any]:
    kind, layer = config.get("speculators_model_type"), config.get("transformer_layer_config")
    given = {name: value for name, value in config.items() if value is not None}
    standard = {**_SPECULATORS_DEFAULTS.get(str(kind), {}), **given}
    if not isinstance(layer, dict) or str(kind) not in _SPECULATORS_DEFAULTS:
        return standard  # whoever reads it says what is wrong
    _refuse_unknown_arithmetic(config, layer, where=where)
    standard["transformer_layer_config"] = {
        **layer,
        "rope_parameters": _rope(layer, where, _LLAMA_THETA if kind == "eagle3" else None),
    }
    if "hidden_size" in layer:
        _refuse_other_width(config.get("target_hidden_size"), layer["hidden_size"], where)
    name = EAGLE3_TAPS if kind == "eagle3" else BLOCK_TAPS
    if standard.get(name):
        standard[name] = _taps(standard[name], 0, name, where)
    if "vocab_size" in layer:
        standard.setdefault("draft_vocab_size", layer["vocab_size"])
    return standard


# --- flat layouts, recognised by their architecture ----------------------------------------------------------------


def _from_architecture(config: dict[str, Any], where: str) -> dict[str, Any]:
    architectures = config.get("architectures") or []
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else None
    if name in _EAGLE3_ARCHITECTURES:
        return _from_eagle3(config, _EAGLE3_ARCHITECTURES[name], where)
    if name not in _BLOCK_ARCHITECTURES:
        known = ", ".join((*_BLOCK_ARCHITECTURES, *_EAGLE3_ARCHITECTURES))
        raise InputError(
            f"{where} is no drafter's: it has no speculators_model_type, and its architecture {name} is none of {known}"
        )
    method = _BLOCK_ARCHITECTURES[name]
    return _from_dspark(config, where) if method == "dspark" else _from_dflash(config, method, where)


def _from_eagle3(config: dict[str, Any], layer_type: str, where: str) -> dict[str, Any]:
    nested = _section(config, "eagle_config", where)
    _refuse_unknown_arithmetic(config, nested, where=where)
    standard = _base(config, "eagle3", _EAGLE3_DRAFTS, _layer(config, layer_type, where, _LLAMA_THETA), where)
    standard |= {name: bool(config.get(name, False)) for name in ("norm_before_residual", "fc_norm", "norm_output")}
    standard["norm_before_fc"] = bool(nested.get("norm_before_fc", config.get("norm_before_fc", False)))
    ids, field = (config, EAGLE3_TAPS) if config.get(EAGLE3_TAPS) else (nested, f"eagle_config.{EAGLE3_TAPS}")
    if ids.get(EAGLE3_TAPS):
        standard[EAGLE3_TAPS] = _taps(ids[EAGLE3_TAPS], 0, field, where)
    return standard


def _from_dflash(config: dict[str, Any], method: str, where: str) -> dict[str, Any]:
    nested = _section(config, "dflash_config", where)
    _refuse_unknown_arithmetic(config, nested, where=where)
    block = _count(config, "block_size", where)
    layer, causal = _block_layer(config, nested, where)
    standard = _base(config, method, block - 1, layer, where) | {
        BLOCK_TAPS: _block_taps(config, nested, where),
        "mask_token_id": _mask(config, nested, where),
        "block_size": block,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not causal,
    }
    if nested.get("sample_from_anchor"):
        raise InputError(
            f"{where}: dflash_config.sample_from_anchor is true, but only dspark drafts from the anchor's slot"
        )
    if method == "dflash2":
        standard |= {name: _count(nested, name, where, "dflash_config.") for name in _DFLASH2_FIELDS}
    return standard


def _from_dspark(config: dict[str, Any], where: str) -> dict[str, Any]:
    nested = _section(config, "dflash_config", where)
    _refuse_unknown_arithmetic(config, nested, where=where)
    fields = {**config, **nested}  # older exports keep everything in dflash_config
    block, from_anchor = _count(fields, "block_size", where), bool(config.get("sample_from_anchor", True))
    layer, causal = _block_layer(config, nested, where)
    if causal != (layer["use_sliding_window"]):
        raise InputError(
            f"{where}: its attention is {'' if causal else 'not '}causal, but a dspark drafter's is exactly where it "
            f"slides"
        )
    return _base(config, "dspark", block if from_anchor else block - 1, layer, where) | {
        BLOCK_TAPS: _block_taps(config, nested, where),
        "mask_token_id": _mask(config, nested, where),
        "block_size": block,
        "sample_from_anchor": from_anchor,
        "markov_rank": _count(fields, "markov_rank", where, least=0),
        **{name: fields.get(name, default) for name, default in _DSPARK_DEFAULTS.items()},
    }


def _base(config: dict[str, Any], method: str, drafts: int, layer: dict[str, Any], where: str) -> dict[str, Any]:
    """What all drafters have. The target's name is in none of these layouts."""
    _refuse_other_width(config.get("target_hidden_size"), layer["hidden_size"], where)
    return {
        "speculators_model_type": method,
        "speculators_config": {
            "algorithm": method,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "verifier": {"name_or_path": None},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.get("draft_vocab_size") or layer["vocab_size"],
    }


def _layer(config: dict[str, Any], layer_type: str, where: str, default_theta: float | None) -> dict[str, Any]:
    """The fields of a Hugging Face decoder configuration that say how a layer computes."""
    plain = {name: _count(config, name, where) for name in _PLAIN_LAYER}
    heads = plain["num_attention_heads"]
    if "rms_norm_eps" not in config:
        raise InputError(f"{where}: field 'rms_norm_eps' is missing")
    return plain | {
        "model_type": layer_type,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or plain["hidden_size"] // heads,
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_parameters": _rope(config, where, default_theta),
        "max_position_embeddings": _count(config, "max_position_embeddings", where),
    }


def _block_layer(config: dict[str, Any], nested: dict[str, Any], where: str) -> tuple[dict[str, Any], bool]:
    """(the layers' configuration with their kind of attention, whether a slot sees no later slots)."""
    layer = _layer(config, "qwen3", where, None)
    kinds = _layer_types(config, layer["num_hidden_layers"], where)
    sliding = "sliding_attention" in kinds
    if sliding and "full_attention" in kinds:
        raise InputError(f"{where}: layer_types mixes sliding and full layers, this version reads all of one kind")
    sliding = sliding or bool(nested.get("use_swa"))
    window = nested.get("swa_window_size") or config.get("sliding_window")
    if sliding and not window:
        raise InputError(
            f"{where}: its layers slide, but neither dflash_config.swa_window_size nor sliding_window says how far"
        )
    causal = next((value for value in (config.get("is_causal"), nested.get("causal")) if value is not None), None)
    if causal is None:
        causal = "sliding_attention" in kinds  # dflash_config.use_swa alone leaves a block bidirectional
    kind = "sliding_attention" if sliding else "full_attention"
    layer |= {"layer_types": [kind] * layer["num_hidden_layers"], "use_sliding_window": sliding}
    return layer | {"sliding_window": window if sliding else None}, bool(causal)


def _layer_types(config: dict[str, Any], num_layers: int, where: str) -> set[str]:
    """Kinds of the layers; without a list, those that a Qwen3 configuration derives."""
    kinds = config.get("layer_types")
    if kinds:
        if not isinstance(kinds, list) or any(kind not in ("sliding_attention", "full_attention") for kind in kinds):
            raise InputError(
                f"{where}: layer_types is {kinds!r}, this version reads sliding_attention and full_attention alone"
            )
        return set(kinds)
    slides = config.get("use_sliding_window") and config.get("sliding_window")
    first = _count({"max_window_layers": 28, **config}, "max_window_layers", where, least=0) if slides else num_layers
    return {"sliding_attention" if index >= first else "full_attention" for index in range(num_layers)}


# --- single fields -------------------------------------------------------------------------------------------------


def _block_taps(config: dict[str, Any], nested: dict[str, Any], where: str) -> list[int]:
    """Taps of a flat block configuration. Both places for its ids count layers from 0: the layer whose output
    is read.
    """
    if config.get(EAGLE3_TAPS):
        return _taps(config[EAGLE3_TAPS], 0, EAGLE3_TAPS, where)
    for section, field in ((nested, "dflash_config.target_layer_ids"), (config, "target_layer_ids")):
        if section.get("target_layer_ids"):
            return _taps(section["target_layer_ids"], 1, field, where)
    raise InputError(
        f"{where}: field 'target_layer_ids' is missing: it says which layers of the target the drafter reads"
    )


def _taps(ids: Any, offset: int, field: str, where: str) -> list[int]:
    """Our ids: layers behind which the residual stream is read. Engines put the taps into ascending order, so no other
    can be meant.
    """
    if not isinstance(ids, list | tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise InputError(f"{where}: {field} is {ids!r}, it must be a list of layers")
    taps = [i + offset for i in ids]
    if taps[0] < 0 or taps != sorted(set(taps)):
        raise InputError(f"{where}: {field} is {list(ids)}: layers must ascend and be {-offset} or more")
    return taps


def _mask(config: dict[str, Any], nested: dict[str, Any], where: str) -> int:
    return _count(nested if "mask_token_id" in nested else config, "mask_token_id", where, least=0)


def _count(section: dict[str, Any], name: str, where: str, prefix: str = "", least: int = 1) -> int:
    """A whole number of at least ``least``."""
    value = section.get(name)
    if value is None:
        raise InputError(f"{where}: field '{prefix}{name}' is missing")
    try:
        return whole(value, prefix + name, least)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def _section(config: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise InputError(f"{where}: {name} is {value!r}, it must be a section with fields")
    return value


def _rope(layer: dict[str, Any], where: str, default_theta: float | None) -> dict[str, Any]:
    """``rope_parameters`` as transformers 5 has them, also from the ``rope_theta`` and ``rope_scaling`` of older
    releases.
    """
    found = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise InputError(f"{where}: rope_parameters is {found!r}: this version reads one set of them for all layers")
    parameters = {name: value for name, value in found.items() if name != "type" and value is not None}
    _refuse_unknown_arithmetic(parameters, where=where)
    parameters["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    theta = found.get("rope_theta") or layer.get("rope_theta") or default_theta
    if theta is None:
        raise InputError(f"{where}: field 'rope_theta' is missing, and so is rope_parameters")
    try:
        return parameters | {"rope_theta": positive(theta, "rope_theta")}
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def _refuse_other_width(target_width: Any, width: Any, where: str) -> None:
    if target_width is not None and target_width != width:
        raise InputError(
            f"{where}: target_hidden_size is {target_width}, hidden_size {width}: this version reads drafters as wide "
            f"as their target"
        )


def _refuse_unknown_arithmetic(*sections: dict[str, Any], where: str) -> None:
    for section in sections:
        for name, values in _ONLY.items():
            if name in section and section[name] not in values:
                raise InputError(
                    f"{where}: {name} is {section[name]!r}, this version reads drafters with {values[0]!r} alone"
                )
