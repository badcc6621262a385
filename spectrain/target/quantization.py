"""Quantised checkpoints: by what they are quantised, whether transformers computes them right, and single matrices of
them in full precision.

``engine=hf`` computes with the weights that codes and scales stand for, and does not round activations: matrices are
dequantised as they are loaded, into the type the target runs in. Schemes for which that was compared with weights
dequantised by hand are in ``_READ``; every other one is refused by name, before anything starts, because transformers
drops scales that it does not know and takes the codes for weights. vLLM reads them all.

Legend: N outputs and K inputs of a matrix.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.errors import InputError
from spectrain.target.checkpoint import CheckpointReader

# Layouts of compressed-tensors that hold what transformers dequantises exactly.
_READ_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
# ModelOpt describes older checkpoints in a file of its own, beside a config.json that knows nothing of it.
MODELOPT_FILE = "hf_quant_config.json"
_FLOAT_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_CODES = (*_FLOAT_CODES, torch.int8)
# Bits of a code and of its share of a scale: microscaling has one of 8 bits for 32 codes.
_BITS = {"fp8": 8.0, "mxfp8": 8.25, "mxfp4": 4.25}
# Microscaling (OCP MX 1.0, section 5): 32 codes of a row share a scale, a power of two whose exponent is kept with 127
# added to it.
_MX_BLOCK, _MX_BIAS, _MX_NAN = (1, 32), 127, 255
# Beside a weight: it is not codes times one scale.
_MORE_THAN_SCALED = ("_scale_2", "_global_scale", "_zero_point")


@dataclass(frozen=True)
class Quantization:
    """``fields``: the checkpoint's ``quantization_config``, as it is."""

    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        if self.fields.get("load_in_4bit") or self.fields.get("load_in_8bit"):
            return "bitsandbytes"  # older ones do not say
        return str(self.fields.get("quant_method") or "a method that it does not name")

    @property
    def unwrapped(self) -> Quantization:
        """Where config.json holds what ModelOpt's own file would, as if it held it flat."""
        inner = self.fields.get("quantization")
        return Quantization({**inner, "quant_method": "modelopt"}) if isinstance(inner, Mapping) else self

    @property
    def name(self) -> str:
        """As a person would name it: the method, and which of its kinds."""
        kinds = (
            self._formats if self.method == "compressed-tensors" else {self.fields.get("quant_algo"), *self._unusual}
        )
        known = sorted(str(kind) for kind in kinds if kind)
        return f"{self.method} ({', '.join(known)})" if known else self.method

    def refused(self) -> str | None:
        """What of it ``engine=hf`` cannot read, as a person would name it; None where it computes the target right."""
        if self.method in ("fp8", "mxfp8", "mxfp4"):
            return None
        if self.method != "compressed-tensors" or not self._formats <= set(_READ_FORMATS):
            return self.name
        for part in ("sparsity_config", "transform_config"):
            if self.fields.get(part):
                return f"{self.name} with a {part}"
        if any(not weights.get("symmetric", True) for weights in self._weights):
            return f"{self.name} with zero points"
        if importlib.util.find_spec("compressed_tensors") is None:
            return f"{self.name}, whose package compressed-tensors is not installed"
        return None

    def loading_options(self, shapes_only: bool) -> dict[str, Any]:
        """What ``from_pretrained`` is told, so that every matrix is dequantised. ``shapes_only``: there are no numbers,
        and some layouts of compressed-tensors keep shapes as numbers, so those stay as they are.
        """
        from transformers import CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

        if self.method == "compressed-tensors":
            return {"quantization_config": CompressedTensorsConfig(dequantize=not shapes_only)}
        kinds = {"fp8": FineGrainedFP8Config, "mxfp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
        return {"quantization_config": kinds[self.method](dequantize=True)} if self.method in kinds else {}

    @cached_property
    def blocks(self) -> frozenset[tuple[int, int]]:
        """Rows and columns of a matrix that share a scale, as the configuration says."""
        named = [self.fields.get("weight_block_size")]
        for weights in self._weights:
            named.append(weights.get("block_structure"))
            if weights.get("strategy") == "group":
                named.append([1, weights.get("group_size")])
        parts = [one.split("x") if isinstance(one, str) else one for one in named]
        return frozenset((int(one[0]), int(one[1])) for one in parts if one and len(one) == 2)

    @property
    def bits(self) -> float | None:
        """That a quantised weight takes, its share of the scales included; None where that is not known."""
        if self.method in _BITS:
            return _BITS[self.method]
        for weights in self._weights:
            if isinstance(weights.get("num_bits"), int):
                group = weights.get("group_size") if weights.get("strategy") == "group" else None
                return weights["num_bits"] + (16 / group if group else 0)
        return None

    @property
    def experts_alone(self) -> bool:
        """Whether attention is in full precision and routed experts are not."""
        ignored = " ".join(str(name) for name in self.fields.get("ignore") or ())
        return self.method == "mxfp4" or "self_attn" in ignored

    @property
    def scales_alone(self) -> bool:
        """Whether codes times scales are the weights of the model that was quantised."""
        return not self.fields.get("transform_config")

    @property
    def is_gptq(self) -> bool:
        """Whether packed matrices lie as GPTQ has them; auto-round writes them so, too."""
        return self.method == "gptq" or "gptq" in str(self.fields.get("packing_format"))

    @property
    def is_awq_gemm(self) -> bool:
        return self.method == "awq" and not self._unusual

    @property
    def symmetric(self) -> bool:
        """Whether GPTQ's zero points are the middle of the codes, in every matrix."""
        own = [rules for part in ("dynamic", "extra_config") for rules in (self.fields.get(part) or {}).values()]
        exceptions = [rules.get("sym", True) for rules in own if isinstance(rules, Mapping)]
        return self.fields.get("sym") is True and all(exceptions)

    @property
    def zero_points(self) -> bool | None:
        """Whether compressed-tensors' matrices have zero points; None where some have."""
        found = {not weights.get("symmetric", True) for weights in self._weights}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def integer_bits(self) -> frozenset[int]:
        """Bits of packed integers, as the configuration says."""
        found = (weights.get("num_bits") for weights in self._weights if weights.get("type", "int") == "int")
        return frozenset(bits for bits in found if isinstance(bits, int) and 0 < bits <= 8)

    def groups_of(self, inputs: int) -> frozenset[int]:
        """How many of a row's ``inputs`` may share a scale, of codes that come with integers: of each described kind of
        weights its groups', and all where a scale is a row's or the whole matrix's.
        """
        groups = {columns for rows, columns in self.blocks if rows == 1}
        shared = any(weights.get("strategy") != "group" for weights in self._weights)
        return frozenset(groups | ({inputs} if shared or not self._weights else set()))

    @property
    def group_size(self) -> int | None:
        """That GPTQ and AWQ say of all modules alike, -1: a whole row; None where they do not, or some differ."""
        size = self.fields.get("group_size")
        return size if isinstance(size, int) and not self.fields.get("dynamic") else None

    @property
    def _unusual(self) -> list[str]:
        """What a kind of AWQ or GPTQ has that others of its name have not, as its configuration says it."""
        if self.method == "awq":
            version, zeros = str(self.fields.get("version") or "gemm").lower(), self.fields.get("zero_point", True)
            return [*([version] if version != "gemm" else []), *([] if zeros else ["zero_point=false"])]
        return ["sym=false"] if self.is_gptq and not self.symmetric else []

    @property
    def _groups(self) -> list[Mapping[str, Any]]:
        groups = self.fields.get("config_groups")
        found = groups.values() if isinstance(groups, Mapping) else ()
        return [group for group in found if isinstance(group, Mapping)]

    @property
    def _weights(self) -> list[Mapping[str, Any]]:
        return [group["weights"] for group in self._groups if isinstance(group.get("weights"), Mapping)]

    @property
    def _formats(self) -> set[str]:
        named = [self.fields.get("format"), *(group.get("format") for group in self._groups)]
        return {str(one) for one in named if one and one != "mixed-precision"}


def quantization_of(hf_config: Any, folder: Path | None = None) -> Quantization | None:
    """How the target of a transformers configuration is quantised; None: not at all. ``folder``: where its other files
    are.
    """
    for config in (hf_config, hf_config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            found = getattr(config, name, None)
            if found:
                return Quantization(dict(found) if isinstance(found, Mapping) else found.to_dict()).unwrapped
    return _of_modelopt(folder / MODELOPT_FILE) if folder is not None else None


def _of_modelopt(path: Path) -> Quantization | None:
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))["quantization"]
        algorithm = fields["quant_algo"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} does not say how the target is quantised ({error}): fetch the file again") from error
    return Quantization({**fields, "quant_method": "modelopt"}) if algorithm else None


def require_readable(quantization: Quantization, target: str) -> None:
    """``InputError`` for a scheme that transformers does not compute right. ``target``: its folder or Hub id."""
    refused = quantization.refused()
    if refused is not None:
        raise InputError(
            f"target {target} is quantised by {refused}, which engine=hf cannot read: use engine=vllm, or a copy "
            f"of the target in 16 bits"
        )


def require_even_rows(reader: CheckpointReader) -> None:
    """``InputError`` for codes in MXFP8 whose rows no whole number of blocks makes: transformers shares out what there
    is of scales evenly.
    """
    names, block = reader.names, _MX_BLOCK[1]
    for name, dtype, shape in reader.described():
        if dtype.startswith("F8_") and f"{name}_scale_inv" in names and shape[-1] % block:
            raise InputError(
                f"the checkpoint in {reader.folder}: {name} has {shape[-1]} inputs, engine=hf reads MXFP8 of multiples "
                f"of {block} alone: use engine=vllm, or a copy of the target in 16 bits"
            )


def full_precision(reader: CheckpointReader, name: str, quantization: Quantization | None) -> Tensor | None:
    """The weights that tensor ``name`` stands for, with 16 bits or more: as stored, or 8-bit codes times their scales
    (float32). None where it holds codes of another kind, or its scales do not fit it.
    """
    tensor = reader.get(name)
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor
    scale_name = next((one for one in (f"{name}_scale_inv", f"{name}_scale") if one in reader.names), None)
    others = [*(name + suffix for suffix in _MORE_THAN_SCALED), name.removesuffix("weight") + "pre_quant_scale"]
    if tensor.dtype not in _CODES or scale_name is None or any(other in reader.names for other in others):
        return None
    if quantization is not None and not quantization.scales_alone:
        return None
    scale = reader.get(scale_name)
    blocks = quantization.blocks if quantization is not None else frozenset()
    if scale.dtype == torch.uint8 and tensor.dtype in _FLOAT_CODES:
        scale, blocks = power_of_two(scale), frozenset({_MX_BLOCK})
    if not scale.is_floating_point():
        return None
    spread = _spread(scale.float(), tensor.shape, blocks)
    return None if spread is None else tensor.float() * spread


def power_of_two(exponents: Tensor) -> Tensor:
    """Scales of microscaling (E8M0) from their bytes."""
    return torch.exp2(exponents.float() - _MX_BIAS).masked_fill(exponents == _MX_NAN, torch.nan)


def _spread(scale: Tensor, shape: torch.Size, blocks: frozenset[tuple[int, int]]) -> Tensor | None:
    """A scale for each entry of a matrix [N, K], or what broadcasts to that; None if the scales are of another shape.
    What a block is cannot be told from shapes: 48 rows with two scales are 24 each, or 32 and 16.
    """
    if scale.numel() == 1:
        return scale.reshape(())
    if len(shape) != 2:
        return None
    outputs, inputs = shape
    if tuple(scale.shape) in ((outputs,), (outputs, 1)):
        return scale.reshape(outputs, 1)
    fitting = [(n, k) for n, k in blocks if tuple(scale.shape) == (-(-outputs // n), -(-inputs // k))]
    if len(fitting) != 1:
        return None
    n, k = fitting[0]
    return scale.repeat_interleave(n, 0)[:outputs].repeat_interleave(k, 1)[:, :inputs]
