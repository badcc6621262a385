"""Heads whose codes share words: read as a person with the layout's description and double precision reads them
(``packed_codes.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_codes import SCHEMES, Encoded
from quantised_targets import write_checkpoint
from safetensors.torch import load_file
from tiny import tiny_target
from torch import Tensor

from spectrain.errors import InputError
from spectrain.target.head import TargetHead, check_head


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
    return SCHEMES[name][0](*load_file(source / "model.safetensors")["lm_head.weight"].shape)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_packed_head_is_what_its_codes_stand_for(name: str, llama: Path, tmp_path: Path) -> None:
    parts, values = encoded(name, llama)
    head = TargetHead.from_checkpoint(with_head(llama, tmp_path / "q", parts, SCHEMES[name][1]))
    assert head.lm_head_weight.dtype == torch.float32
    torch.testing.assert_close(head.lm_head_weight.double(), values, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCHEMES if name.startswith(("int", "compressed"))])
def test_the_package_that_writes_it_reads_the_same(name: str, llama: Path, tmp_path: Path) -> None:
    """compressed-tensors computes in the type of the scales: bfloat16."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    parts, _ = encoded(name, llama)
    description = SCHEMES[name][1]
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
        ("gptq 4", {}, {"g_idx": torch.arange(64, dtype=torch.int32) % 4}, "gptq with g_idx"),
        ("awq", {"version": "gemv"}, {}, r"awq \(gemv\)"),
        ("awq", {"zero_point": False}, {}, r"awq \(zero_point=false\)"),
        (
            "modelopt nvfp4",
            {"quant_algo": "NVFP4_AWQ"},
            {"pre_quant_scale": torch.ones(64)},
            r"modelopt \(NVFP4_AWQ\) with pre_quant_scale",
        ),
        (
            "int4 group",
            {},
            {"weight_g_idx": torch.arange(64, dtype=torch.int32) % 4},
            r"\(pack-quantized\) with weight_g_idx",
        ),
        ("int4 group", {"config_groups": {}}, {}, r"\(pack-quantized\)"),
        ("int4 group", {"transform_config": {"config_groups": {"u": {}}}}, {}, r"\(pack-quantized\)"),
    ],
)
def test_what_has_more_to_it_is_refused_by_name(
    name: str, described: dict[str, Any], beside: dict[str, Tensor], named: str, llama: Path, tmp_path: Path
) -> None:
    parts, _ = encoded(name, llama)
    folder = with_head(llama, tmp_path / "q", parts | beside, SCHEMES[name][1] | described)
    with pytest.raises(InputError, match=rf"lm_head\.weight.*quantised by .*{named}.*16 or 32 bits"):
        check_head(folder)


FLAT, TO_NAN = (lambda t: t.reshape(-1)), (lambda t: torch.full_like(t.float(), math.nan).to(t.dtype))


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("gptq 4", "qweight", FLAT),
        ("gptq 4", "scales", FLAT),
        ("gptq 4", "scales", lambda t: t[:0]),
        ("gptq 4", "scales", TO_NAN),
        ("gptq 4", "qzeros", FLAT),
        ("awq", "qweight", FLAT),
        ("awq", "qzeros", lambda t: t.half()),
        ("awq", "scales", lambda t: t / 0),
        ("int4 group", "weight_packed", lambda t: t.reshape(-1)[0]),
        ("int4 group", "weight_shape", lambda t: t[None]),
        ("int4 group", "weight_shape", lambda t: t.float()),
        ("int4 group", "weight_scale", TO_NAN),
        ("int4 group", "weight_scale", lambda t: t.long()),
        ("modelopt nvfp4", "weight_scale_2", TO_NAN),
        ("compressed-tensors mxfp4", "weight_scale", lambda t: torch.full_like(t, 255)),
    ],
)
def test_parts_that_no_scheme_has_are_named(
    name: str, part: str, change: Callable[[Tensor], Tensor], llama: Path, tmp_path: Path
) -> None:
    """Else a traceback, or a head of NaN that looks as if the drafter had learned nothing."""
    parts, _ = encoded(name, llama)
    folder = with_head(llama, tmp_path / "q", parts | {part: change(parts[part])}, SCHEMES[name][1])
    with pytest.raises(InputError, match=rf"lm_head\.{part} in .* (is of type|not finite)"):
        TargetHead.from_checkpoint(folder)


@pytest.mark.parametrize("name", ["int4 zero points", "int8 zero points"])
def test_zero_points_that_are_described_and_not_there_are_not_guessed(name: str, llama: Path, tmp_path: Path) -> None:
    parts, _ = encoded(name, llama)
    del parts["weight_zero_point"]
    folder = with_head(llama, tmp_path / "q", parts, SCHEMES[name][1])
    with pytest.raises(InputError, match=r"lm_head\.weight.*\(pack-quantized\)"):
        check_head(folder)


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("int4 group", "weight_scale", lambda t: t[:, :1]),
        ("int8 group", "weight_scale", lambda t: t[:1, :1]),
        ("int3 in part-filled words", "weight_scale", lambda t: t.reshape(-1)[:1]),
        ("gptq 4", "scales", lambda t: t[:1]),
        ("awq", "scales", lambda t: t[:1]),
    ],
)
def test_scales_that_are_fewer_than_described_are_not_spread(
    name: str, part: str, change: Callable[[Tensor], Tensor], llama: Path, tmp_path: Path
) -> None:
    parts, _ = encoded(name, llama)
    if name == "awq":
        parts["qzeros"] = change(parts["qzeros"])
    folder = with_head(llama, tmp_path / "q", parts | {part: change(parts[part]).contiguous()}, SCHEMES[name][1])
    with pytest.raises(InputError, match=r"lm_head\.weight"):
        TargetHead.from_checkpoint(folder)
