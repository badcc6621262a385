"""The configuration of a quantised target beside a head in 16 bits: vLLM takes every module for quantised that
``quantization_config`` does not name, whatever is stored, and each scheme has names of its own.

Which key a scheme reads, and how it compares, is that of vLLM's ``model_executor/layers/quantization``:

    fp8, MXFP8, compressed-tensors, ModelOpt, Quark    a list of modules
    AWQ           a list of parts of names; without one vLLM goes by the checkpoint's tensors, so the list that is begun
                  here has all of the target's modules in 16 bits
    GPTQ          a rule of ``dynamic`` that leaves out what it matches (``-:``); the first one that matches counts
    auto-round    an entry of ``extra_config`` with 16 bits
    MXFP4         leaves all but experts alone, and no experts

A scheme that is not here is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.errors import InputError
from spectrain.reading import read_json
from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.quantization import MODELOPT_FILE, Quantization

# Scheme -> names under which quantization_config lists what it leaves alone; the last is taken where none is there.
_LISTS = {
    "fp8": ("ignored_layers", "modules_to_not_convert"),
    "mxfp8": ("ignored_layers",),
    "compressed-tensors": ("ignore",),
    "modelopt": ("ignore",),
    "quark": ("exclude",),
    "awq": ("modules_to_not_convert",),
}
_AUTO_ROUND = ("auto-round", "inc")
_EXPERTS = re.compile(r"(.*\.experts)(\.\d+\..*)?")
_FULL = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class ServedModules:
    """Modules in 16 bits as vLLM calls them: each one's name, and what all begin with. ``kept``: behind that, the
    beginning of names of modules that stay quantised; empty: there are none.
    """

    names: Sequence[str]
    prefix: str
    kept: str = ""

    @property
    def pattern(self) -> str:
        """A regular expression for the beginning of each name."""
        return re.escape(self.prefix) + (f"(?!{re.escape(self.kept)})" if self.kept else "")

    @property
    def stacks(self) -> list[str]:
        """What holds experts: vLLM has one module for all of a layer."""
        return list(dict.fromkeys(found[1] for found in map(_EXPERTS.fullmatch, self.names) if found))


def leave_unquantised(config: dict[str, Any], folder: Path, modules: ServedModules) -> dict[str, Any]:
    """``config``, of the target in ``folder``, with ``modules`` among those that its quantisation leaves alone.

    InputError for a scheme that has no way to say so.
    """
    for name in ("quantization_config", "compression_config"):
        if config.get(name):
            return {**config, name: _changed(config[name], folder, modules)}
    text = config.get("text_config")
    if isinstance(text, dict) and text.get("quantization_config"):
        fields = _changed(text["quantization_config"], folder, modules)
        return {**config, "text_config": {**text, "quantization_config": fields}}
    if (folder / MODELOPT_FILE).is_file():  # which vLLM reads where config.json has nothing
        fields = {"quant_method": "modelopt", **read_json(folder / MODELOPT_FILE)}
        if (fields.get("quantization") or {}).get("quant_algo"):
            return {**config, "quantization_config": _changed(fields, folder, modules)}
    return config


def _changed(fields: Mapping[str, Any], folder: Path, modules: ServedModules) -> dict[str, Any]:
    method = str(fields.get("quant_method"))
    if method == "gptq":
        return {**fields, "dynamic": {f"-:{modules.pattern}": {}, **(fields.get("dynamic") or {})}}
    if method in _AUTO_ROUND:
        entry, own = {"bits": 16, "group_size": -1, "sym": True}, fields.get("extra_config") or {}
        others = {name: rules for name, rules in own.items() if not re.match(modules.pattern, name)}
        return {**fields, "extra_config": {f"^{modules.pattern}": entry, **others}}
    if method == "mxfp4" and not modules.stacks:
        return dict(fields)
    if method.startswith("modelopt"):
        return _modelopt(fields, folder, modules)
    if method not in _LISTS:
        raise _no_list(fields, folder)
    names = list(modules.names)
    if method == "awq":
        names += modules.stacks
        names = names if fields.get("modules_to_not_convert") else [*_in_full(folder), *names]
    if method == "compressed-tensors":  # vLLM asks for the matrices of an expert, though they are stored in stacks
        names += [f"re:{re.escape(one)}\\..*" for one in modules.stacks if one in modules.names]
    return _listed(fields, method, names)


def _modelopt(fields: Mapping[str, Any], folder: Path, modules: ServedModules) -> dict[str, Any]:
    """The fields of config.json, or those of ModelOpt's own file, which lie deeper and have another name."""
    inner = fields.get("quantization")
    if str((inner or fields).get("quant_algo")).upper() == "MIXED_PRECISION" and not fields.get("quantized_layers"):
        raise _no_list(
            Quantization(fields).unwrapped.fields, folder
        )  # vLLM reads ModelOpt's file, whatever stands here
    if isinstance(inner, Mapping):
        excluded = _joined(inner.get("exclude_modules"), modules.names)
        return {**fields, "quantization": {**inner, "exclude_modules": excluded}}
    return _listed(fields, "modelopt", modules.names)


def _listed(fields: Mapping[str, Any], method: str, names: Iterable[str]) -> dict[str, Any]:
    key = next((one for one in _LISTS[method] if fields.get(one)), _LISTS[method][-1])
    return {**fields, key: _joined(fields.get(key), names)}


def _joined(before: Iterable[str] | None, names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*(before or ()), *names]))


def _in_full(folder: Path) -> list[str]:
    """Modules of a checkpoint with a matrix in 16 bits or more and no codes."""
    full, coded = [], set()
    for name, dtype, shape in CheckpointReader(folder).described():
        module = name.rpartition(".")[0]
        if dtype not in _FULL:
            coded.add(module)
        elif len(shape) > 1:
            full.append(module)
    return [module for module in full if module not in coded]


def _no_list(fields: Mapping[str, Any], folder: Path) -> InputError:
    return InputError(
        f"the target in {folder} is quantised by {Quantization(fields).name}: how vLLM is told to load a tuned head in "
        f"16 bits beside it is not known: use a checkpoint in another scheme, or in 16 bits"
    )
