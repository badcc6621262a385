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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from spectrain.drafters.foreign_fields import refuse_other_width, refuse_unknown_arithmetic, rope, taps
from spectrain.drafters.registry import all_methods, known_method
from spectrain.errors import InputError


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
    method = known_method(str(standard.get("speculators_model_type")))
    if usual_taps is not None and method is not None and method.may_leave_out_taps:
        standard[method.taps_field] = standard.get(method.taps_field) or list(usual_taps)
    return standard


def standard_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of the speculators layout. EAGLE's only layer is called ``midlayer``; ``t2d`` says
    nothing beyond ``d2t``.
    """
    return {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items() if name != "t2d"}


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
