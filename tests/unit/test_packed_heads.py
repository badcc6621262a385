"""Heads whose codes share words: read as a person with the layout's description and double precision reads them.

Codes and scales are drawn, each code is put into its bits one by one, and what it stands for is reckoned in float64.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_targets import write_checkpoint
from safetensors.torch import load_file
from tiny import tiny_target
from torch import Tensor

from spectrain.errors import InputError
from spectrain.target.head import TargetHead, check_head

GROUP = 16
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Tensors of the head by suffix, and the values that they stand for (float64).
Encoded = tuple[dict[str, Tensor], Tensor]


def drawn(outputs: int, inputs: int, levels: int) -> list[list[int]]:
    source = random.Random(levels)
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

# Name -> (what it makes of a head [N, K], quantization_config).
HEADS: dict[str, tuple[Callable[[int, int], Encoded], dict[str, Any]]] = {
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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target("llama", tmp_path_factory.mktemp("llama"))


def with_head(source: Path, folder: Path, parts: dict[str, Tensor], description: dict[str, Any]) -> Path:
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors |= {f"lm_head.{name}": part.contiguous() for name, part in parts.items()}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": description}
    return write_checkpoint(source, folder, tensors, config)


def encoded(name: str, source: Path) -> Encoded:
    return HEADS[name][0](*load_file(source / "model.safetensors")["lm_head.weight"].shape)


@pytest.mark.parametrize("name", HEADS)
def test_a_packed_head_is_what_its_codes_stand_for(name: str, llama: Path, tmp_path: Path) -> None:
    parts, values = encoded(name, llama)
    head = TargetHead.from_checkpoint(with_head(llama, tmp_path / "q", parts, HEADS[name][1]))
    assert head.lm_head_weight.dtype == torch.float32
    torch.testing.assert_close(head.lm_head_weight.double(), values, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HEADS if name.startswith(("int", "compressed"))])
def test_the_package_that_writes_it_reads_the_same(name: str, llama: Path, tmp_path: Path) -> None:
    """compressed-tensors computes in the type of the scales: bfloat16."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    parts, _ = encoded(name, llama)
    description = HEADS[name][1]
    weights = description["config_groups"]["group_0"]["weights"]
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))
    reads = compressors.BaseCompressor.get_value_from_registry(description["format"])
    theirs = reads.decompress({part: tensor.contiguous() for part, tensor in parts.items()}, scheme)["weight"]
    head = TargetHead.from_checkpoint(with_head(llama, tmp_path / "q", parts, description))
    torch.testing.assert_close(head.lm_head_weight, theirs.float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("name", "described", "beside", "named"),
    [
        ("gptq 4", {"sym": False}, {}, r"gptq \(sym=false\)"),
        ("gptq 4", {"dynamic": {"lm_head": {"sym": False}}}, {}, r"gptq \(sym=false\)"),
        ("gptq 4", {}, {"g_idx": torch.arange(64, dtype=torch.int32) % 4}, "gptq"),
        ("awq", {"version": "gemv"}, {}, r"awq \(gemv\)"),
        ("awq", {"zero_point": False}, {}, r"awq \(zero_point=false\)"),
        ("modelopt nvfp4", {"quant_algo": "NVFP4_AWQ"}, {"pre_quant_scale": torch.ones(64)}, r"modelopt \(NVFP4_AWQ\)"),
        ("int4 group", {}, {"weight_g_idx": torch.arange(64, dtype=torch.int32) % 4}, r"\(pack-quantized\)"),
        ("int4 group", {"config_groups": {}}, {}, r"\(pack-quantized\)"),
        ("int4 group", {"transform_config": {"config_groups": {"u": {}}}}, {}, r"\(pack-quantized\)"),
    ],
)
def test_what_has_more_to_it_is_refused_by_name(
    name: str, described: dict[str, Any], beside: dict[str, Tensor], named: str, llama: Path, tmp_path: Path
) -> None:
    parts, _ = encoded(name, llama)
    folder = with_head(llama, tmp_path / "q", parts | beside, HEADS[name][1] | described)
    with pytest.raises(InputError, match=rf"lm_head\.weight.*quantised by .*{named}.*16 or 32 bits"):
        check_head(folder)
