"""Matrices whose codes share words, as a person with the layout's description and double precision makes them.

Codes and scales are drawn, each code is put into its bits one by one, and what it stands for is reckoned in float64.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from quantised_targets import write_checkpoint
from safetensors.torch import load_file
from torch import Tensor

GROUP = 16
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Tensors of a matrix by suffix, and the values that they stand for (float64).
Encoded = tuple[dict[str, Tensor], Tensor]


def drawn(outputs: int, inputs: int, levels: int) -> list[list[int]]:
    source = random.Random(1000 * levels + 10 * outputs + inputs)
    return [[source.randrange(levels) for _ in range(inputs)] for _ in range(outputs)]


def scales(outputs: int, groups: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(outputs, groups, generator=torch.Generator().manual_seed(outputs)).add(0.5).mul(0.01).to(dtype)


def words(rows: Sequence[Sequence[int]], bits: int, places: Sequence[int] | None = None) -> Tensor:
    """int32 [rows, words]: the code at ``i`` of a word in the bits from ``bits * places[i]`` on."""
    each = 32 // bits
    places = places or range(each)
    packed = []
    for row in rows:
        packed.append([])
        for start in range(0, len(row), each):
            word = sum(code << bits * places[at] for at, code in enumerate(row[start : start + each]))
            packed[-1].append(word - (1 << 32) if word >> 31 else word)
    return torch.tensor(packed, dtype=torch.int32)


def columns(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def reckoned(codes: list[list[int]], scale: Tensor, zero: Callable[[int, int], float], group: int) -> Tensor:
    """(code - zero) · scale, entry by entry."""
    of_scale = scale.double().tolist()
    entries = [
        [(code - zero(n, k // group)) * of_scale[n][k // group] for k, code in enumerate(row)]
        for n, row in enumerate(codes)
    ]
    return torch.tensor(entries, dtype=torch.float64)


def packed_integers(outputs: int, inputs: int, bits: int, group: int, zeros: bool) -> Encoded:
    codes, scale = drawn(outputs, inputs, 1 << bits), scales(outputs, -(-inputs // group), torch.bfloat16)
    zero_NG = drawn(outputs, scale.shape[1], 1 << bits)
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if zeros:
        tensors["weight_zero_point"] = words(columns(zero_NG), bits).T
    middle = 1 << (bits - 1)
    return tensors, reckoned(codes, scale, lambda n, g: zero_NG[n][g] if zeros else middle, group)


def gptq(outputs: int, inputs: int, bits: int) -> Encoded:
    codes, scale = drawn(outputs, inputs, 1 << bits), scales(outputs, inputs // GROUP, torch.float16)
    middle = 1 << (bits - 1)
    tensors = {
        "qweight": words(codes, bits).T,
        "scales": scale.T,
        "qzeros": words([[middle - 1] * outputs] * scale.shape[1], bits),  # one less than the zero point
        "g_idx": torch.tensor([k // GROUP for k in range(inputs)], dtype=torch.int32),
    }
    return tensors, reckoned(codes, scale, lambda n, g: middle, GROUP)


def awq(outputs: int, inputs: int) -> Encoded:
    codes, scale = drawn(outputs, inputs, 16), scales(outputs, inputs // GROUP, torch.float16)
    zero_NG = drawn(outputs, scale.shape[1], 16)
    # Outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up.
    places = [[0, 2, 4, 6, 1, 3, 5, 7].index(output) for output in range(8)]
    tensors = {
        "qweight": words(columns(codes), 4, places),
        "qzeros": words(columns(zero_NG), 4, places),
        "scales": scale.T,
    }
    return tensors, reckoned(codes, scale, lambda n, g: zero_NG[n][g], GROUP)


def four_bit_floats(outputs: int, inputs: int, scale: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Bytes, and what codes and ``scale`` [N, G] (float64) make."""
    codes = drawn(outputs, inputs, 16)
    pairs = [[row[k] + 16 * row[k + 1] for k in range(0, inputs, 2)] for row in codes]
    of_scale = scale.tolist()
    entries = [
        [(-1.0 if code & 8 else 1.0) * FP4[code & 7] * of_scale[n][k // group] for k, code in enumerate(row)]
        for n, row in enumerate(codes)
    ]
    return torch.tensor(pairs, dtype=torch.uint8), torch.tensor(entries, dtype=torch.float64)


def nvfp4(outputs: int, inputs: int, divides: bool) -> Encoded:
    scale = scales(outputs, inputs // 16).mul(10_000).to(torch.float8_e4m3fn)
    whole = 0.0007
    packed, values = four_bit_floats(outputs, inputs, scale.double() * whole, 16)
    if divides:
        return {
            "weight_packed": packed,
            "weight_scale": scale,
            "weight_global_scale": torch.tensor([1 / whole]),
            "input_global_scale": torch.tensor([100.0]),
        }, values
    beside = {"weight_scale_2": torch.tensor(whole), "input_scale": torch.tensor(0.1)}
    return {"weight": packed, "weight_scale": scale} | beside, values


def mxfp4(outputs: int, inputs: int) -> Encoded:
    exponent = torch.randint(115, 125, (outputs, inputs // 32), generator=torch.Generator().manual_seed(0))
    packed, values = four_bit_floats(outputs, inputs, torch.exp2(exponent.double() - 127), 32)
    return {"weight_packed": packed, "weight_scale": exponent.to(torch.uint8)}, values


def packed_by(bits: int, group: int | None, symmetric: bool = True) -> dict[str, Any]:
    shared = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric} | shared
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def floats_by(format: str, group: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": group, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm", "lm_head": True}
ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "sym": True}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}

# Name -> (what it makes of a matrix [N, K], quantization_config).
SCHEMES: dict[str, tuple[Callable[[int, int], Encoded], dict[str, Any]]] = {
    "int4 group": (lambda n, k: packed_integers(n, k, 4, GROUP, False), packed_by(4, GROUP)),
    "int4 zero points": (lambda n, k: packed_integers(n, k, 4, GROUP, True), packed_by(4, GROUP, False)),
    "int4 channel": (lambda n, k: packed_integers(n, k, 4, k, True), packed_by(4, None, False)),
    "int8 group": (lambda n, k: packed_integers(n, k, 8, GROUP, False), packed_by(8, GROUP)),
    "int8 zero points": (lambda n, k: packed_integers(n, k, 8, GROUP, True), packed_by(8, GROUP, False)),
    "int3 in part-filled words": (lambda n, k: packed_integers(n, k, 3, GROUP, False), packed_by(3, GROUP)),
    "gptq 4": (lambda n, k: gptq(n, k, 4), GPTQ | {"bits": 4}),
    "gptq 8": (lambda n, k: gptq(n, k, 8), GPTQ | {"bits": 4, "dynamic": {"lm_head": {"bits": 8}}}),
    "auto-round": (lambda n, k: gptq(n, k, 4), ROUND),
    "awq": (awq, AWQ),
    "modelopt nvfp4": (lambda n, k: nvfp4(n, k, divides=False), NVFP4),
    "compressed-tensors nvfp4": (lambda n, k: nvfp4(n, k, divides=True), floats_by("nvfp4-pack-quantized", 16)),
    "compressed-tensors mxfp4": (mxfp4, floats_by("mxfp4-pack-quantized", 32)),
}


def with_packed(
    source: Path, folder: Path, scheme: str, names: Iterable[str], **described: Any
) -> tuple[Path, dict[str, Tensor]]:
    """``source`` with the matrices ``names`` packed, and what their codes stand for by name (float64)."""
    encode, description = SCHEMES[scheme]
    tensors, values = load_file(source / "model.safetensors"), {}
    for name in names:
        parts, values[name] = encode(*tensors.pop(name).shape)
        tensors |= {name.removesuffix("weight") + part: one.contiguous() for part, one in parts.items()}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": description | described}
    return write_checkpoint(source, folder, tensors, config), values
