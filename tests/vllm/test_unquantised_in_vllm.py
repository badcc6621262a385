"""What the overlay of a tuned head writes into ``quantization_config``, as vLLM's own classes of each scheme read it:
the head's modules are loaded in 16 bits, all others as before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spectrain.drafters.unquantised_modules import ServedModules, leave_unquantised

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
_CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head"],
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
}
_QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
_QUARK = {
    "quant_method": "quark",
    "export": {"pack_method": "reorder", "kv_cache_group": []},
    "global_quant_config": {"weight": _QUARK_FP8, "input_tensors": _QUARK_FP8},
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "exclude": ["lm_head"],
}
# Name -> (quantization_config, vLLM's name of its class).
SCHEMES: dict[str, tuple[dict[str, Any], str]] = {
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
    "fp8 with a list": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]},
        "fp8",
    ),
    "mxfp8": ({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, "mxfp8"),
    "compressed-tensors": (_CT, "compressed-tensors"),
    "gptq": (_GPTQ, "auto_gptq"),
    "gptq with rules": (
        _GPTQ
        | {
            "dynamic": {"+:.*": {"bits": 8}},
            "modules_in_block_to_quantize": [
                [
                    "self_attn.q_proj",
                    "self_attn.k_proj",
                    "self_attn.v_proj",
                    "mlp.gate_proj",
                    "mlp.up_proj",
                    "fc",
                    "experts",
                ]
            ],
        },
        "auto_gptq",
    ),
    "awq": (_AWQ, "awq"),
    "awq with a list": (_AWQ | {"modules_to_not_convert": ["lm_head"]}, "awq"),
    "auto-round": (_ROUND, "inc"),
    "auto-round with entries": (_ROUND | {"extra_config": {"mtp.fc": {"bits": 8}}}, "inc"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, "modelopt"),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        "modelopt_fp4",
    ),
    "quark": (_QUARK, "quark"),
}
MODULES = {
    "dense": [
        "mtp.fc",
        *(f"mtp.layers.0.self_attn.{name}_proj" for name in "qkvo"),
        *(f"mtp.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
    ],
    "experts": [
        "mtp.fc",
        *(f"mtp.layers.0.self_attn.{name}_proj" for name in "qkvo"),
        "mtp.layers.0.mlp.gate",
        *(f"mtp.layers.0.mlp.experts.{number}.{name}_proj" for number in range(4) for name in ("gate", "up", "down")),
    ],
    "stack": ["mtp.fc", *(f"mtp.layers.0.self_attn.{name}_proj" for name in "qkvo"), "mtp.layers.0.mlp.experts"],
}


def of(kind: str) -> ServedModules:
    return ServedModules(MODULES[kind], "mtp.", "")


@pytest.fixture
def vllm_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The class by which vLLM computes the module ``prefix`` of a target with this quantization_config."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, get_quantization_config

    monkeypatch.setattr(UnquantizedFusedMoEMethod, "__init__", lambda self, moe: None)
    for scheme in (auto_awq, auto_gptq):  # as of a GPU and ordinary widths
        monkeypatch.setattr(scheme, "check_moe_marlin_supports_layer", lambda *args, **kwargs: True)

    def reads(fields: dict[str, Any], name: str, prefix: str) -> str:
        config = get_quantization_config(name).from_config(json.loads(json.dumps(fields)))
        config.packed_modules_mapping = FUSED
        kind = RoutedExperts if prefix.endswith("experts") else LinearBase
        layer = kind.__new__(kind)
        torch.nn.Module.__init__(layer)
        layer.moe_config = None
        layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = (
            *("gate_proj", "up_proj"),
            "down_proj",
        )
        try:
            found = config.get_quant_method(layer, prefix)
        except Exception as error:  # a kernel that asks for its device: it is quantised
            return f"{type(error).__name__}: {error}"
        return type(found).__name__

    return reads


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with a module in 16 bits that no list names."""
    tensors = {
        "model.layers.0.self_attn.q_proj.qweight": torch.zeros(4, 4, dtype=torch.int32),
        "model.layers.0.self_attn.q_proj.scales": torch.zeros(4, 4, dtype=torch.float16),
        "model.layers.0.linear_attn.in_proj_ba.weight": torch.zeros(4, 4, dtype=torch.float16),
        "model.layers.0.self_attn.k_scale": torch.zeros(()),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_head_is_unquantised_and_all_else_is_not(scheme: str, folder: Path, vllm_reads: Callable[..., str]) -> None:
    fields, name = SCHEMES[scheme]
    written = leave_unquantised({"quantization_config": fields}, folder, of("dense"))["quantization_config"]
    for prefix in ("mtp.fc", "mtp.layers.0.self_attn.qkv_proj", "mtp.layers.0.mlp.gate_up_proj"):
        assert vllm_reads(written, name, prefix) == "UnquantizedLinearMethod"
        assert vllm_reads(fields, name, prefix) != "UnquantizedLinearMethod"
    assert vllm_reads(written, name, "model.layers.0.self_attn.qkv_proj") != "UnquantizedLinearMethod"


@pytest.mark.parametrize("kind", ["experts", "stack"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_so_are_its_experts(scheme: str, kind: str, folder: Path, vllm_reads: Callable[..., str]) -> None:
    """ModelOpt says None, for which vLLM takes the unquantised class. Of auto-round's experts the CPU build computes
    none, and takes all for unquantised.
    """
    fields, name = SCHEMES[scheme]
    written = leave_unquantised({"quantization_config": fields}, folder, of(kind))["quantization_config"]
    plain = ("UnquantizedFusedMoEMethod", "NoneType")
    assert vllm_reads(written, name, "mtp.layers.0.mlp.experts") in plain
    if name != "inc":
        assert vllm_reads(fields, name, "mtp.layers.0.mlp.experts") not in plain
        assert vllm_reads(written, name, "model.layers.0.mlp.experts") not in plain


def test_what_awq_finds_by_itself_stays_in_16_bits(folder: Path, vllm_reads: Callable[..., str]) -> None:
    """Where the configuration has no list vLLM makes one of the checkpoint's types; with one it does not look."""
    written = leave_unquantised({"quantization_config": _AWQ}, folder, of("dense"))["quantization_config"]
    assert vllm_reads(written, "awq", "model.layers.0.linear_attn.in_proj_ba") == "UnquantizedLinearMethod"
    assert not [one for one in written["modules_to_not_convert"] if one in "model.layers.0.self_attn.qkv_proj"]


def test_modules_that_stay_quantised_are_left_so(folder: Path, vllm_reads: Callable[..., str]) -> None:
    """An indexer's (DeepSeek-V3.2)."""
    kept = ServedModules(["model.layers.4.self_attn.o_proj"], "model.layers.4.", "self_attn.indexer.")
    written = leave_unquantised({"quantization_config": _GPTQ}, folder, kept)["quantization_config"]
    assert vllm_reads(written, "auto_gptq", "model.layers.4.self_attn.o_proj") == "UnquantizedLinearMethod"
    for other in ("model.layers.4.self_attn.indexer.wk", "model.layers.40.self_attn.o_proj", "model.layersA4.o_proj"):
        assert vllm_reads(written, "auto_gptq", other) != "UnquantizedLinearMethod"


def test_modelopts_own_file_is_taken_into_the_configuration(folder: Path, vllm_reads: Callable[..., str]) -> None:
    """As before ModelOpt 0.31; vLLM reads the file only where config.json says nothing."""
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    own = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inner}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    written = leave_unquantised({"model_type": "qwen3"}, folder, of("dense"))["quantization_config"]
    assert vllm_reads(written, "modelopt_fp4", "mtp.layers.0.mlp.gate_up_proj") == "UnquantizedLinearMethod"
    assert vllm_reads(own, "modelopt_fp4", "mtp.layers.0.mlp.gate_up_proj") == "ModelOptLinearMethod"
    assert written["quantization"]["exclude_modules"][0] == "lm_head"
