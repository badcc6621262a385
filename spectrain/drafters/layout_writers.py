"""A drafter's folder in the layout of another project, or back in ours: ``foreign_checkpoints.py`` the other way round.

Tensors keep their bits: they are renamed, and what a layout holds besides is added (t2d, which tokens can be drafted;
copies of the target's embedding and lm_head). Before anything is written, the new configuration is read as a stranger's
would be, and has to describe the same drafter: what a layout cannot say is an error that names the field, never left
out. What only this project records (target, drafts a round, scores) goes along under ``spectrain``, where other readers
do not look, so that a folder comes back as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from spectrain.data.vocab import vocab_from_d2t
from spectrain.drafters.drafter_digests import CONFIG, INDEX, WEIGHTS, with_digests
from spectrain.drafters.drafter_folder import load_drafter, read_tensors
from spectrain.drafters.foreign_checkpoints import standard_config, standard_tensors
from spectrain.drafters.registry import DrafterMethod, all_methods, find_method
from spectrain.errors import ConfigError, InputError
from spectrain.files import replace_folder
from spectrain.reading import read_json

OURS = "speculators"
_OWN, _SPECULATION, _DIGESTS = "spectrain", "speculators_config", "digests"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
# Name -> tensor of the target, for layouts that hold copies of it. Raises InputError where the target is not here.
Copies = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Converted:
    """What was written: the method, the files with weights, whether copies of the target's matrices are among them."""

    method: str
    files: int
    has_copies: bool


def convert_drafter(
    source: Path, layout: str, out: Path, target_copies: Copies, max_shard_bytes: int | None = None
) -> Converted:
    """Write the drafter in ``source``, of any layout, into ``out``.

    Raises ConfigError where the layout has no such drafters, InputError for a folder that is broken or holds what the
    layout cannot say, RunError where ``out`` cannot be written.
    """
    where = str(source / CONFIG)
    found = read_json(source / CONFIG)
    standard = standard_config(found, where)
    load_drafter(source)  # raises for tensors that are missing, broken, of another shape or changed
    method = find_method(str(standard["speculators_model_type"]))
    if layout not in (OURS, method.layout):
        kinds = [known.name for known in all_methods() if known.layout == layout]
        raise ConfigError(
            f"convert.to={layout} holds {', '.join(kinds)} drafters, the one in {source} is a {method.name} drafter: "
            f"use {' or '.join(filter(None, [OURS, method.layout]))}"
        )
    tensors = standard_tensors(read_tensors(source))
    if layout == OURS:
        config, tensors = _ours(found, standard, method), _without_copies(tensors, method, standard, target_copies)
    else:
        config = {**method.write_foreign(standard, where), _OWN: _kept(found, standard)}
        tensors = method.foreign_tensors(_with_extras(tensors, method, standard, target_copies))
    _check_same(standard, standard_config(config, f"{out / CONFIG} in layout {layout}"), method, layout)
    return Converted(method.name, _write(config, tensors, out, max_shard_bytes), _EMBEDDING in tensors)


# --- configurations ------------------------------------------------------------------------------------------------


def _ours(found: Mapping[str, Any], standard: dict[str, Any], method: DrafterMethod) -> dict[str, Any]:
    """In the speculators layout; one that is in it already stays as it is."""
    if _SPECULATION in found:
        return dict(found)
    own = dict(found.get(_OWN) or {})
    speculation = own.pop(_SPECULATION, None) or {
        "default_proposal_method": "greedy",
        **standard[_SPECULATION],
    }
    layer = standard["transformer_layer_config"]
    theta = {"rope_theta": layer["rope_parameters"]["rope_theta"]} if "rope_parameters" in layer else {}
    ordered = {
        "architectures": [method.architecture],
        **standard,
        _SPECULATION: speculation,
        "target_hidden_size": layer["hidden_size"],
        "transformer_layer_config": {**layer, **theta},
        "torch_dtype": found.get("torch_dtype") or found.get("dtype"),
    }
    restored = own.pop("config", None)
    return {**(ordered if restored is None else restored), **({_OWN: own} if own else {})}


def _kept(found: Mapping[str, Any], standard: Mapping[str, Any]) -> dict[str, Any]:
    """What the layout has no field for, to be found again."""
    own = {name: value for name, value in (found.get(_OWN) or {}).items() if name != _DIGESTS}
    if _SPECULATION in found:
        rest = {name: value for name, value in found.items() if name != _OWN}
        return {**own, _SPECULATION: found[_SPECULATION], "config": rest}
    return own


def _check_same(before: dict[str, Any], after: dict[str, Any], method: DrafterMethod, layout: str) -> None:
    """The drafter that a reader of ``after`` sees is that of ``before``."""
    ours, theirs = method.read_shape(before), method.read_shape(after)
    different = [name for name, value in vars(ours).items() if value != vars(theirs)[name]]
    if different or method.name != after["speculators_model_type"]:
        name = different[0] if different else "method"
        raise InputError(
            f"convert.to={layout}: that layout cannot say {name}={getattr(ours, name, method.name)}: keep the drafter "
            f"in the speculators layout"
        )


# --- tensors -------------------------------------------------------------------------------------------------------


def _with_extras(
    tensors: dict[str, Tensor], method: DrafterMethod, standard: Mapping[str, Any], target_copies: Copies
) -> dict[str, Tensor]:
    """With the copies that the layout holds, and with ``t2d`` beside ``d2t``."""
    vocabulary = int(standard["transformer_layer_config"]["vocab_size"])
    tensors = dict(tensors)
    if "d2t" in tensors and "t2d" not in tensors:
        t2d = torch.zeros(vocabulary, dtype=torch.bool)
        tensors["t2d"] = t2d.index_fill_(0, vocab_from_d2t(tensors["d2t"], vocabulary).ids_D, True)
    missing = {name for name in (_EMBEDDING, _HEAD) if name not in tensors}
    if method.layout_holds_copies and missing:
        tensors |= {name: tensor.clone() for name, tensor in target_copies().items() if name in missing}
    return tensors


def _without_copies(
    tensors: dict[str, Tensor], method: DrafterMethod, standard: Mapping[str, Any], target_copies: Copies
) -> dict[str, Tensor]:
    """Without ``t2d`` and, where the target is here to compare with, without what is the target's own, bit for bit."""
    tensors = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
    whole = int(standard["transformer_layer_config"]["vocab_size"])
    full = int(standard.get("draft_vocab_size") or whole) == whole
    if full and "d2t" in tensors and not bool(tensors["d2t"].any()):
        del tensors["d2t"]
    held = [name for name in (_EMBEDDING, *([_HEAD] if full else [])) if name in tensors]
    if held:
        try:
            copies = target_copies()
        except InputError:  # kept then: they do no harm but for their size
            return tensors
        for name in held:
            if torch.equal(tensors[name], copies[name].to(tensors[name].dtype)):
                del tensors[name]
    return tensors


def _write(config: dict[str, Any], tensors: dict[str, Tensor], out: Path, max_shard_bytes: int | None) -> int:
    """Returns the number of files with weights."""
    whole = sum(tensor.nbytes for tensor in tensors.values())
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_bytes or max(whole, 1))

    def fill(into: Path) -> None:
        for name, held in split.filename_to_tensors.items():
            part = {key: tensors[key].contiguous() for key in held}
            save_file(part, into / (name if split.is_sharded else WEIGHTS), metadata={"format": "pt"})
        if split.is_sharded:
            index = {"metadata": {"total_size": whole}, "weight_map": split.tensor_to_filename}
            (into / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        (into / CONFIG).write_text(json.dumps(with_digests(config, into), indent=2) + "\n", encoding="utf-8")

    replace_folder(out, fill, "the converted drafter", whole)
    return len(split.filename_to_tensors)
