"""Tiny targets in the formats that quantised checkpoints come in, each with its twin: the same target in float32, every
weight as its codes and scales say, computed here by hand.

``quantise("fp8 block", source, folder)`` writes the checkpoint ``source`` (of ``tiny_target``) in that format into
``folder`` and its twin into ``folder/twin``. Only the matrices of decoder layers are quantised, as is usual.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK, GROUP = 16, 16
# The sixteen values of a four-bit float (E2M1), by code.
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])

# What a format makes of one matrix [N, K]: tensors by their suffix, and the values that these stand for.
Encoded = tuple[dict[str, Tensor], Tensor]


def _fp8(weight_NK: Tensor, scale_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and the values they stand for; ``scale_NK``: of each entry."""
    codes = (weight_NK / scale_NK).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.float() * scale_NK


def _blocks(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of each block of 16 × 16, and of each entry."""
    n, k = weight_NK.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    scale_RC = torch.stack(
        [
            weight_NK[r * BLOCK : (r + 1) * BLOCK, c * BLOCK : (c + 1) * BLOCK].abs().max() / 448
            for r in range(rows)
            for c in range(columns)
        ]
    ).view(rows, columns)
    return scale_RC, scale_RC.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]


def fp8_block(weight_NK: Tensor) -> Encoded:
    scale_RC, scale_NK = _blocks(weight_NK)
    codes, values = _fp8(weight_NK, scale_NK)
    return {"weight": codes, "weight_scale_inv": scale_RC}, values


def fp8_tensor_static(weight_NK: Tensor) -> Encoded:
    scale = weight_NK.abs().max() / 448
    codes, values = _fp8(weight_NK, scale.expand_as(weight_NK))
    return {"weight": codes, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.1)}, values


def ct_fp8_channel(weight_NK: Tensor) -> Encoded:
    scale_N1 = weight_NK.abs().amax(1, keepdim=True) / 448
    codes, values = _fp8(weight_NK, scale_N1.expand_as(weight_NK))
    return {"weight": codes, "weight_scale": scale_N1}, values


def ct_fp8_tensor(weight_NK: Tensor) -> Encoded:
    scale = weight_NK.abs().max() / 448
    codes, values = _fp8(weight_NK, scale.expand_as(weight_NK))
    return {"weight": codes, "weight_scale": scale[None], "input_scale": torch.tensor([0.1])}, values


def ct_fp8_block(weight_NK: Tensor) -> Encoded:
    scale_RC, scale_NK = _blocks(weight_NK)
    codes, values = _fp8(weight_NK, scale_NK)
    return {"weight": codes, "weight_scale": scale_RC}, values


def mxfp8(weight_NK: Tensor) -> Encoded:
    """As MiniMax stores it; the twin's powers of two are made from the bits of a float32, whose exponent they are."""
    codes_NK, exponent_NG, values = _mxfp8(weight_NK)
    return {"weight": codes_NK, "weight_scale_inv": exponent_NG}, values


def modelopt_mxfp8(weight_NK: Tensor) -> Encoded:
    codes_NK, exponent_NG, values = _mxfp8(weight_NK)
    return {"weight": codes_NK, "weight_scale": exponent_NG}, values


def _mxfp8(weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, a byte for every 32 of a row (fewer at its end), and the values."""
    n, k = weight_NK.shape
    largest_NG = torch.stack([part.abs().amax(1) for part in weight_NK.split(32, dim=1)], 1)
    # The exponent of the largest entry, less that of the largest code (448 = 1.75 · 2⁸).
    exponent_NG = (torch.frexp(largest_NG)[1] - 1 - 8 + 127).to(torch.uint8)
    scale_NG = (exponent_NG.to(torch.int32) << 23).view(torch.float32)
    codes_NK, values = _fp8(weight_NK, scale_NG.repeat_interleave(32, 1)[:, :k])
    return codes_NK, exponent_NG, values


def ct_int8_channel(weight_NK: Tensor) -> Encoded:
    scale_N1 = weight_NK.abs().amax(1, keepdim=True) / 127
    codes = (weight_NK / scale_N1).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale_N1}, codes.float() * scale_N1


def _pack(codes_NK: Tensor) -> Tensor:
    """Codes 0 … 15, eight in each int32, the first one in the lowest bits."""
    n, k = codes_NK.shape
    shifted = codes_NK.view(n, k // 8, 8).long() << (4 * torch.arange(8))
    total = shifted.sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def ct_int4_group(weight_NK: Tensor) -> Encoded:
    n, k = weight_NK.shape
    grouped = weight_NK.view(n, k // GROUP, GROUP)
    scale_NG1 = grouped.abs().amax(-1, keepdim=True) / 7
    codes = (grouped / scale_NG1).round()
    tensors = {
        "weight_packed": _pack((codes + 8).view(n, k)),
        "weight_scale": scale_NG1[..., 0],
        "weight_shape": torch.tensor([n, k]),
    }
    return tensors, (codes * scale_NG1).view(n, k)


def _fp4(scaled: Tensor) -> Tensor:
    """The nearest codes."""
    return (scaled[..., None] - FP4).abs().argmin(-1).to(torch.uint8)


def ct_nvfp4(weight_NK: Tensor) -> Encoded:
    n, k = weight_NK.shape
    grouped = weight_NK.view(n, k // GROUP, GROUP)
    largest = grouped.abs().amax(-1, keepdim=True)
    whole = 448 * 6 / weight_NK.abs().max()
    scale_NG1 = (largest / 6 * whole).to(torch.float8_e4m3fn)
    per_group = scale_NG1.float() / whole
    codes_NK = _fp4(grouped / per_group).view(n, k)
    tensors = {
        "weight_packed": codes_NK[:, ::2] | codes_NK[:, 1::2] << 4,
        "weight_scale": scale_NG1[..., 0],
        "weight_global_scale": whole[None],
        "input_global_scale": torch.tensor([100.0]),
    }
    return tensors, (FP4[codes_NK.long()].view(n, k // GROUP, GROUP) * per_group).view(n, k)


def modelopt_fp8(weight_NK: Tensor) -> Encoded:
    tensors, values = ct_fp8_tensor(weight_NK)
    return {
        "weight": tensors["weight"],
        "weight_scale": tensors["weight_scale"][0],
        "input_scale": torch.tensor(0.1),
    }, values


def gptq(weight_NK: Tensor) -> Encoded:
    """Tensors of the right names and shapes: nothing here reads them."""
    n, k = weight_NK.shape
    zeros = {"qweight": (k // 8, n), "qzeros": (k // GROUP, n // 8), "g_idx": (k,)}
    tensors = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in zeros.items()}
    return tensors | {"scales": torch.ones(k // GROUP, n, dtype=torch.float16)}, weight_NK


def awq(weight_NK: Tensor) -> Encoded:
    n, k = weight_NK.shape
    tensors = {
        name: torch.zeros(shape, n // 8, dtype=torch.int32) for name, shape in (("qweight", k), ("qzeros", k // GROUP))
    }
    return tensors | {"scales": torch.ones(k // GROUP, n, dtype=torch.float16)}, weight_NK


def _groups_of_32(weight_NK: Tensor) -> Tensor:
    n, k = weight_NK.shape
    return weight_NK.view(n, k // 32, 32)


def gptq_32(weight_NK: Tensor) -> Encoded:
    """GPTQ as vLLM computes it: groups of 32, the zero point in the middle. ``gptq`` is for those who read names."""
    n, k = weight_NK.shape
    grouped = _groups_of_32(weight_NK)
    scale_NG1 = (grouped.abs().amax(-1, keepdim=True) / 7).half().float()
    codes = (grouped / scale_NG1).round().clamp(-8, 7)
    tensors = {
        "qweight": _pack((codes + 8).view(n, k)).T,
        "scales": scale_NG1[..., 0].half().T,
        "qzeros": _pack(torch.full((k // 32, n), 7)),  # one less than the zero point
        "g_idx": (torch.arange(k) // 32).int(),
    }
    return tensors, (codes * scale_NG1).view(n, k)


def awq_32(weight_NK: Tensor) -> Encoded:
    """AWQ as vLLM computes it: groups of 32 with zero points, outputs of a word in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    n, k = weight_NK.shape
    grouped, order = _groups_of_32(weight_NK), [0, 2, 4, 6, 1, 3, 5, 7]
    low, high = grouped.amin(-1, keepdim=True).clamp(max=0), grouped.amax(-1, keepdim=True).clamp(min=0)
    scale_NG1 = ((high - low) / 15).half().float()
    zero_NG1 = (-low / scale_NG1).round().clamp(0, 15)
    codes = (grouped / scale_NG1 + zero_NG1).round().clamp(0, 15)
    tensors = {
        "qweight": _pack(codes.view(n, k).T.reshape(k, n // 8, 8)[..., order].reshape(k, n)),
        "qzeros": _pack(zero_NG1[..., 0].T.reshape(k // 32, n // 8, 8)[..., order].reshape(k // 32, n)),
        "scales": scale_NG1[..., 0].half().T,
    }
    return tensors, ((codes - zero_NG1) * scale_NG1).view(n, k)


def bnb_int8(weight_NK: Tensor) -> Encoded:
    codes = (weight_NK / weight_NK.abs().amax(1, keepdim=True) * 127).round().to(torch.int8)
    return {"weight": codes, "SCB": weight_NK.abs().amax(1)}, weight_NK


def bnb_nf4(weight_NK: Tensor) -> Encoded:
    return {
        "weight": torch.zeros(weight_NK.numel() // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.zeros(-(-weight_NK.numel() // 64), dtype=torch.uint8),
        "weight.quant_map": torch.zeros(16),
    }, weight_NK


def _group(weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    base = {"symmetric": True, "dynamic": False}
    return {"group_0": {"targets": ["Linear"], "weights": base | weights, "input_activations": activations}}


def _ct(format: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": _group(weights, activations),
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_FP8 = {"num_bits": 8, "type": "float"}
_DYNAMIC = {**_FP8, "strategy": "token", "symmetric": True, "dynamic": True}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
_NVFP4_INPUT = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "dynamic": "local",
}

# Format -> (what it makes of a matrix, quantization_config).
FORMATS: dict[str, tuple[Callable[[Tensor], Encoded], dict[str, Any]]] = {
    "fp8 block": (
        fp8_block,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "fp8 tensor": (
        fp8_tensor_static,
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "mxfp8": (
        mxfp8,
        {
            "quant_method": "mxfp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
            "ignored_layers": ["lm_head"],
        },
    ),
    "compressed-tensors fp8 channel": (
        ct_fp8_channel,
        _ct("float-quantized", {**_FP8, "strategy": "channel"}, _DYNAMIC),
    ),
    "compressed-tensors fp8 tensor": (
        ct_fp8_tensor,
        _ct(
            "float-quantized",
            {**_FP8, "strategy": "tensor"},
            {**_FP8, "strategy": "tensor", "symmetric": True, "dynamic": False},
        ),
    ),
    "compressed-tensors fp8 block": (
        ct_fp8_block,
        _ct(
            "float-quantized",
            {**_FP8, "strategy": "block", "block_structure": [BLOCK, BLOCK]},
            {**_FP8, "strategy": "group", "group_size": BLOCK, "symmetric": True, "dynamic": True},
        ),
    ),
    "compressed-tensors int8": (
        ct_int8_channel,
        _ct(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
        ),
    ),
    "compressed-tensors int4": (
        ct_int4_group,
        _ct("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
    ),
    "compressed-tensors nvfp4": (
        ct_nvfp4,
        _ct(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            _NVFP4_INPUT,
        ),
    ),
    "modelopt": (modelopt_fp8, _MODELOPT),
    "modelopt mxfp8": (modelopt_mxfp8, {**_MODELOPT, "quant_algo": "MXFP8"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "bitsandbytes int8": (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}),
    "bitsandbytes nf4": (
        bnb_nf4,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"},
    ),
}


# Of more kinds that vLLM computes: matrices whose inputs are a multiple of 32.
OF_VLLM: dict[str, tuple[Callable[[Tensor], Encoded], dict[str, Any]]] = {
    "gptq 32": (gptq_32, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
    "awq 32": (awq_32, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
}

# What engine=hf computes right.
READ = [name for name in FORMATS if name.startswith(("fp8", "mxfp8", "compressed-tensors")) and "nvfp4" not in name]


def quantise(name: str, source: Path, folder: Path) -> Path:
    """Writes ``source`` as ``folder`` in the format ``name``, its twin as ``folder/twin``; returns ``folder``."""
    encode, description = {**FORMATS, **OF_VLLM}[name]
    quantised, twin = {}, {}
    for key, tensor in load_file(source / "model.safetensors").items():
        twin[key] = quantised[key] = tensor
        if ".layers." in key and tensor.ndim == 2 and not key.endswith("mlp.gate.weight"):  # a router
            parts, values = encode(tensor.float())
            del quantised[key]
            quantised |= {key.removesuffix("weight") + suffix: part.contiguous() for suffix, part in parts.items()}
            twin[key] = values.contiguous()
    return _write_both(source, folder, quantised, twin, description)


def quantise_experts(source: Path, folder: Path) -> Path:
    """As ``quantise``, of a gpt-oss: experts in MXFP4, as OpenAI stores them, from random codes."""
    quantised, twin = {}, {}
    random = torch.Generator().manual_seed(0)
    for key, tensor in load_file(source / "model.safetensors").items():
        twin[key] = quantised[key] = tensor
        if key.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            codes = torch.randint(16, (experts, outputs, inputs // 32, 32), generator=random)
            exponents = torch.randint(122, 126, codes.shape[:3], generator=random)
            values = FP4[codes] * torch.exp2(exponents - 127.0)[..., None]
            twin[key] = values.reshape(experts, outputs, inputs).transpose(1, 2).contiguous()
            del quantised[key]
            quantised[f"{key}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
            quantised[f"{key}_scales"] = exponents.to(torch.uint8)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return _write_both(source, folder, quantised, twin, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def _write_both(
    source: Path, folder: Path, quantised: dict[str, Tensor], twin: dict[str, Tensor], description: dict[str, Any]
) -> Path:
    config = json.loads((source / "config.json").read_text())
    write_checkpoint(source, folder, quantised, config | {"quantization_config": description})
    write_checkpoint(source, folder / "twin", twin, config)
    return folder


def write_checkpoint(source: Path, folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """The tokenizer and settings of ``source``, with these weights and this configuration."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*", "twin"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
