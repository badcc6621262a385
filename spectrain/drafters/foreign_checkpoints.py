"""Drafter folders as others write them, turned into the one layout that the rest of the package knows.

``config.json`` of any known layout becomes that of the speculators layout with every switch written out, tensors get
the names they have there. Both happen here and in ``DrafterMethod.read_foreign`` and nowhere else, so each convention
for layer ids is converted once:

    layout                          recognised by             ids of the taps
    speculators (and spectrain)     speculators_model_type    (eagle_)aux_hidden_state_layer_ids: as ours
    z-lab DFlash, DFlash2           DFlash(2)DraftModel       dflash_config.target_layer_ids: ours - 1
    DeepSpec DSpark                 Qwen3DSparkModel          target_layer_ids: ours - 1
    EAGLE, SpecForge, AngelSlim     LlamaForCausalLMEagle3    eagle_aux_hidden_state_layer_ids: as ours, as vLLM reads
                                    them

Our id is the number of layers behind which the residual stream is read. Where a field is missing, the default is the
one with which vLLM serves such a folder; where a field asks for something that this package does not compute, reading
ends with an error that names it.

Fields of the configurations that other projects write for their drafters, read and checked one by one.

A kind of drafter reads another project's layout with these (``DrafterMethod.read_foreign``). Each raises InputError
that names the file (``where``) and the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from spectrain.drafters.field_checks import positive, whole
from spectrain.drafters.layers import sliding_layers
from spectrain.drafters.registry import all_methods, known_method
from spectrain.errors import InputError
from spectrain.target.folder_files import refuse_absurd_sizes

_MIXED = "layer_types mixes sliding and full layers, this version reads all of one kind"
_EAGLE_TAPS = "eagle_aux_hidden_state_layer_ids"
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


def speculators_fields(
    config: dict[str, Any], method: str, drafts: int, layer: dict[str, Any], where: str
) -> dict[str, Any]:
    """What all drafters have. The target's name is in none of these layouts."""
    refuse_other_width(config.get("target_hidden_size"), layer["hidden_size"], where)
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


def decoder_layer(config: dict[str, Any], layer_type: str, where: str, default_theta: float | None) -> dict[str, Any]:
    """The fields of a Hugging Face decoder configuration that say how a layer computes."""
    plain = {name: count(config, name, where) for name in _PLAIN_LAYER}
    heads = plain["num_attention_heads"]
    if "rms_norm_eps" not in config:
        raise InputError(f"{where}: field 'rms_norm_eps' is missing")
    return plain | {
        "model_type": layer_type,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or plain["hidden_size"] // heads,
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_parameters": rope(config, where, default_theta),
        "max_position_embeddings": count(config, "max_position_embeddings", where),
    }


def flat_layer(layer: dict[str, Any]) -> dict[str, Any]:
    """``decoder_layer`` the other way round: fields of a flat configuration, as transformers 4 and 5 read them."""
    rope = dict(layer["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type", "default")
    return {name: layer[name] for name in (*_PLAIN_LAYER, "num_key_value_heads", "head_dim", "rms_norm_eps")} | {
        "model_type": layer["model_type"],
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": layer["max_position_embeddings"],
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" and not rope else {"rope_type": kind, **rope},
        "rope_parameters": layer["rope_parameters"],
        "tie_word_embeddings": False,
    }


def window_fields(config: dict[str, Any], layer: dict[str, Any], where: str) -> dict[str, Any]:
    """What ``decoder_layer`` lacks where the layers of an EAGLE-3 configuration slide: Llama's only where it says so of
    each.
    """
    if layer["model_type"] == "llama" and not config.get("layer_types"):
        return {}
    kinds, window = _layer_types(config, layer["num_hidden_layers"], where), config.get("sliding_window")
    if kinds == {"full_attention"}:
        return {}
    if len(kinds) > 1:
        raise InputError(f"{where}: {_MIXED}")
    if not window:
        raise InputError(f"{where}: its layers slide, but sliding_window does not say how far")
    return sliding_layers(layer["num_hidden_layers"], window)


def block_decoder_layer(config: dict[str, Any], nested: dict[str, Any], where: str) -> tuple[dict[str, Any], bool]:
    """(the layers' configuration with their kind of attention, whether a slot sees no later slots)."""
    layer = decoder_layer(config, "qwen3", where, None)
    kinds = _layer_types(config, layer["num_hidden_layers"], where)
    sliding = "sliding_attention" in kinds
    if sliding and "full_attention" in kinds:
        raise InputError(f"{where}: {_MIXED}")
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
    first = count({"max_window_layers": 28, **config}, "max_window_layers", where, least=0) if slides else num_layers
    return {"sliding_attention" if index >= first else "full_attention" for index in range(num_layers)}


def block_taps(config: dict[str, Any], nested: dict[str, Any], where: str) -> list[int]:
    """Taps of a flat block configuration. Both fields for its ids count layers from 0: the layer whose output
    is read.
    """
    if config.get(_EAGLE_TAPS):
        return taps(config[_EAGLE_TAPS], 0, _EAGLE_TAPS, where)
    for section, field in ((nested, "dflash_config.target_layer_ids"), (config, "target_layer_ids")):
        if section.get("target_layer_ids"):
            return taps(section["target_layer_ids"], 1, field, where)
    raise InputError(
        f"{where}: field 'target_layer_ids' is missing: it says which layers of the target the drafter reads"
    )


def taps(ids: Any, offset: int, field: str, where: str) -> list[int]:
    """Our ids: layers behind which the residual stream is read. Engines put the taps into ascending order, so no other
    can be meant.
    """
    if not isinstance(ids, list | tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise InputError(f"{where}: {field} is {ids!r}, it must be a list of layers")
    taps = [i + offset for i in ids]
    if taps[0] < 0 or taps != sorted(set(taps)):
        raise InputError(f"{where}: {field} is {list(ids)}: layers must ascend and be {-offset} or more")
    return taps


def mask_token(config: dict[str, Any], nested: dict[str, Any], where: str) -> int:
    return count(nested if "mask_token_id" in nested else config, "mask_token_id", where, least=0)


def count(section: dict[str, Any], name: str, where: str, prefix: str = "", least: int = 1) -> int:
    """A whole number of at least ``least``."""
    value = section.get(name)
    if value is None:
        raise InputError(f"{where}: field '{prefix}{name}' is missing")
    try:
        return whole(value, prefix + name, least)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def section(config: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise InputError(f"{where}: {name} is {value!r}, it must be a section with fields")
    return value


def rope(layer: dict[str, Any], where: str, default_theta: float | None) -> dict[str, Any]:
    """``rope_parameters`` as transformers 5 has them, also from the ``rope_theta`` and ``rope_scaling`` of older
    releases.
    """
    found = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise InputError(f"{where}: rope_parameters is {found!r}: this version reads one set of them for all layers")
    parameters = {name: value for name, value in found.items() if name != "type" and value is not None}
    refuse_unknown_arithmetic(parameters, where=where)
    parameters["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    theta = found.get("rope_theta") or layer.get("rope_theta") or default_theta
    if theta is None:
        raise InputError(f"{where}: field 'rope_theta' is missing, and so is rope_parameters")
    try:
        return parameters | {"rope_theta": positive(theta, "rope_theta")}
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def refuse_other_width(target_width: Any, width: Any, where: str) -> None:
    if target_width is not None and target_width != width:
        raise InputError(
            f"{where}: target_hidden_size is {target_width}, hidden_size {width}: this version reads drafters as wide "
            f"as their target"
        )


def refuse_unknown_arithmetic(*sections: dict[str, Any], where: str) -> None:
    for section in sections:
        for name, values in _ONLY.items():
            if name in section and section[name] not in values:
                raise InputError(
                    f"{where}: {name} is {section[name]!r}, this version reads drafters with {values[0]!r} alone"
                )


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
    section = config.get("spectrain")
    if isinstance(section, dict) and isinstance(section.get("drafter"), dict):
        # A folder in its kind's own layout, or a target's with a tuned head, keeps beside what a server reads of it
        # what this package does.
        config = {**section["drafter"], "spectrain": section}
    refuse_absurd_sizes(where, config)
    if "speculators_model_type" in config or "speculators_config" in config:
        standard = _from_speculators(config, where)
    else:
        standard = _from_architecture(config, where)
    method = known_method(str(standard.get("speculators_model_type")))
    if usual_taps is not None and method is not None and method.may_leave_out_taps:
        standard[method.taps_field] = standard.get(method.taps_field) or list(usual_taps)
    return standard


def standard_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of the speculators layout. EAGLE's only layer is called ``midlayer``."""
    return {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}


def _from_speculators(config: dict[str, Any], where: str) -> dict[str, Any]:
    method, layer = known_method(str(config.get("speculators_model_type"))), config.get("transformer_layer_config")
    given = {name: value for name, value in config.items() if value is not None}
    standard = {**({} if method is None else method.vllm_defaults), **given}
    if not isinstance(layer, dict) or method is None or not method.trainable:
        return standard  # whoever reads it says what is wrong
    refuse_unknown_arithmetic(config, layer, where=where)
    if "num_attention_heads" in layer:  # a kind of one's own may have no attention
        standard["transformer_layer_config"] = {**layer, "rope_parameters": rope(layer, where, method.default_theta)}
    if "hidden_size" in layer:
        refuse_other_width(config.get("target_hidden_size"), layer["hidden_size"], where)
    if standard.get(method.taps_field):
        standard[method.taps_field] = taps(standard[method.taps_field], 0, method.taps_field, where)
    if "vocab_size" in layer:
        standard.setdefault("draft_vocab_size", layer["vocab_size"])
    return standard


def _from_architecture(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Flat layouts, recognised by their architecture."""
    architectures = config.get("architectures") or []
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else None
    readers = {architecture: method for method in all_methods() for architecture in method.foreign_architectures}
    if name not in readers:
        known = ", ".join(readers)
        raise InputError(
            f"{where} is no drafter's: it has no speculators_model_type, and its architecture {name} is none of {known}"
        )
    return readers[name].read_foreign(name, config, where)
