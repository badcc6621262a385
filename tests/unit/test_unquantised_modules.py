"""The configuration beside a head in 16 bits, where the order and the extent of what is written decide; whether vLLM
understands each scheme's words says ``tests/vllm/test_unquantised_in_vllm.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spectrain.drafters.unquantised_modules import ServedModules, leave_unquantised
from spectrain.errors import InputError

HEAD = ServedModules(["mtp.fc", "mtp.layers.0.self_attn.q_proj"], "mtp.")
EXPERTS = ServedModules(["mtp.fc", "mtp.layers.0.mlp.experts.0.up_proj", "mtp.layers.0.mlp.experts.1.up_proj"], "mtp.")


def written(fields: dict[str, Any], folder: Path, modules: ServedModules = HEAD) -> dict[str, Any]:
    changed = leave_unquantised({"quantization_config": fields}, folder, modules)["quantization_config"]
    return {name: value for name, value in changed.items() if value != fields.get(name)}


def test_gptqs_rule_stands_before_those_that_match_too(tmp_path: Path) -> None:
    """vLLM takes the first."""
    found = written({"quant_method": "gptq", "dynamic": {"+:.*fc": {"bits": 8}}}, tmp_path)
    assert list(found["dynamic"].items()) == [(r"-:mtp\.", {}), ("+:.*fc", {"bits": 8})]


def test_entries_of_auto_round_for_what_is_no_longer_quantised_go(tmp_path: Path) -> None:
    """vLLM takes an exact name before a pattern."""
    fields = {"quant_method": "auto-round", "extra_config": {"mtp.fc": {"bits": 8}, "lm_head": {"bits": 8}}}
    found = written(fields, tmp_path)["extra_config"]
    assert set(found) == {r"^mtp\.", "lm_head"}
    assert found[r"^mtp\."]["bits"] == 16


def test_a_list_that_is_begun_for_awq_has_what_was_in_16_bits(tmp_path: Path) -> None:
    tensors = {
        "a.qweight": torch.zeros(1, 1, dtype=torch.int32),
        "a.scales": torch.zeros(1, 1, dtype=torch.float16),
        "b.weight": torch.zeros(1, 1, dtype=torch.float16),
        "norm.weight": torch.zeros(1, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = written({"quant_method": "awq"}, tmp_path, EXPERTS)["modules_to_not_convert"]
    assert found == ["b", *EXPERTS.names, "mtp.layers.0.mlp.experts"]
    had = {"quant_method": "awq", "modules_to_not_convert": ["lm_head"]}
    assert written(had, tmp_path)["modules_to_not_convert"] == ["lm_head", *HEAD.names]


def test_the_configuration_is_found_where_vllm_finds_it(tmp_path: Path) -> None:
    fields = {"quant_method": "fp8"}
    assert leave_unquantised({"model_type": "qwen3"}, tmp_path, HEAD) == {"model_type": "qwen3"}
    inside = leave_unquantised({"text_config": {"quantization_config": fields}}, tmp_path, HEAD)["text_config"]
    assert inside["quantization_config"]["modules_to_not_convert"] == HEAD.names
    older = leave_unquantised({"compression_config": {"quant_method": "compressed-tensors"}}, tmp_path, HEAD)
    assert older["compression_config"]["ignore"] == HEAD.names


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quant_method": "experts_int8"}, "experts_int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, r"modelopt \(MIXED_PRECISION\)"),
        (
            {
                "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {}}},
                "quant_method": "modelopt",
            },
            r"modelopt \(MIXED_PRECISION\)",
        ),
    ],
)
def test_a_scheme_without_words_for_it_is_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"quantised by {named}.*16 bits"):
        written(fields, tmp_path, EXPERTS)


def test_mxfp4_leaves_all_but_experts_alone(tmp_path: Path) -> None:
    assert written({"quant_method": "mxfp4"}, tmp_path, HEAD) == {}
