"""Layers and heads that draft, copied out of packed checkpoints: what a drafter begins with is what the codes stand for
(``packed_codes.py``), in every scheme; what is not read is named, before anything else.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_tools import MtpTarget, mtp_target
from packed_codes import SCHEMES, with_packed
from quantised_targets import write_checkpoint
from safetensors.torch import load_file
from tiny import tiny_target
from torch import Tensor

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.data.vocab import full_vocab
from spectrain.drafters.autoregressive.mtp import METHOD
from spectrain.drafters.build import build_drafter
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.drafter_folder import load_drafter, save_drafter
from spectrain.drafters.overlay import TUNED_HEAD
from spectrain.drafters.registry import find_method
from spectrain.errors import InputError
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec

LAST = "model.layers.3."
MATRICES = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target("llama", tmp_path_factory.mktemp("llama"), intermediate_size=64)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_target("qwen3_5_text", tmp_path_factory.mktemp("qwen") / "t", intermediate_size=64)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_target("glm4_moe", tmp_path_factory.mktemp("glm") / "t", moe_intermediate_size=32)


def begun(folder: Path, method: str, **options: Any) -> Drafter:
    spec, config = TargetSpec.from_folder(folder), DrafterConfig(method, **{"init": "target", **options})
    find_method(method).check_copies(config, spec, folder)
    return build_drafter(config, spec, full_vocab(spec.vocab_size), TargetHead.from_checkpoint(folder), folder)


def equal(found: Tensor, values: Tensor) -> None:
    torch.testing.assert_close(found.detach().double(), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_is_what_its_codes_stand_for(scheme: str, llama: Path, tmp_path: Path) -> None:
    folder, values = with_packed(llama, tmp_path / "q", scheme, [LAST + name for name in MATRICES])
    layer = begun(folder, "dflash").body.layers[0]
    for name in MATRICES:
        equal(layer.get_parameter(name), values[LAST + name])


def test_an_eagle3_begins_with_a_packed_mlp(llama: Path, tmp_path: Path) -> None:
    folder, values = with_packed(llama, tmp_path / "q", "awq", [LAST + name for name in MATRICES])
    layer = begun(folder, "eagle3").body.layers[0]
    for name in MATRICES[4:]:
        equal(layer.get_parameter(name), values[LAST + name])


def test_a_part_under_other_names_is_left_out(llama: Path, tmp_path: Path) -> None:
    """Fused matrices, say: what is not copied whole is not copied, and needs not be read."""
    names = [LAST + name for name in MATRICES[1:4]]
    folder, _ = with_packed(llama, tmp_path / "q", "gptq 4", names, sym=False)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAST}self_attn.other.weight"] = tensors.pop(f"{LAST}self_attn.q_proj.weight")
    folder = write_checkpoint(folder, tmp_path / "f", tensors, json.loads((folder / "config.json").read_text()))
    own = load_file(llama / "model.safetensors")
    layer = begun(folder, "dflash").body.layers[0]
    equal(layer.mlp.up_proj.weight, own[f"{LAST}mlp.up_proj.weight"].double())


# --- heads that draft ------------------------------------------------------------------------------------------------


def head_matrices(folder: Path, start: str) -> list[str]:
    names = load_file(folder / "model.safetensors").items()
    return [
        name for name, one in names if name.startswith(start) and one.ndim == 2 and not name.endswith("gate.weight")
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_head_is_what_its_codes_stand_for(scheme: str, qwen: Path, tmp_path: Path) -> None:
    names = head_matrices(qwen, "mtp.")
    folder, values = with_packed(qwen, tmp_path / "q", scheme, names)
    state = begun(folder, "mtp").body.state_dict()
    equal(state["layers.0.projection.weight"], values["mtp.fc.weight"])
    for name in set(names) - {"mtp.fc.weight"}:
        equal(state[name.removeprefix("mtp.")], values[name])


@pytest.mark.parametrize(
    ("scheme", "key"),
    [
        ("int4 zero points", "ignore"),
        ("gptq 4", "dynamic"),
        ("auto-round", "extra_config"),
        ("awq", "modules_to_not_convert"),
        ("modelopt nvfp4", "ignore"),
        ("compressed-tensors mxfp4", "ignore"),
    ],
)
def test_a_tuned_head_is_written_in_full_without_its_codes(scheme: str, key: str, qwen: Path, tmp_path: Path) -> None:
    """That vLLM understands what is written there says ``tests/vllm/test_unquantised_in_vllm.py``."""
    names = head_matrices(qwen, "mtp.")
    folder, values = with_packed(qwen, tmp_path / "q", scheme, names)
    target = MtpTarget("qwen3_5_text", folder, torch.float32)
    drafter, made = target.drafter(), tmp_path / "made"
    save_drafter(drafter, made, target="t", target_architectures=target.spec.architectures, num_speculative_tokens=3)
    found = load_file(made / TUNED_HEAD)
    everything = {name for file in made.glob("*.safetensors") for name in load_file(file)}
    assert {name for name in everything if name.startswith("mtp.")} == set(found)
    for name in names:
        torch.testing.assert_close(found[name], values[name].to(torch.bfloat16), rtol=2**-7, atol=0)
    before, after = (json.loads((one / "config.json").read_text())["quantization_config"] for one in (folder, made))
    assert {name for name in after if after[name] != before.get(name)} == {key}
    again = load_drafter(made).body.state_dict()
    assert all(torch.equal(again[name], one.bfloat16()) for name, one in drafter.body.state_dict().items())


def test_packed_experts_of_a_head_are_stacked(glm: Path, tmp_path: Path) -> None:
    start = "model.layers.4.mlp.experts."
    names = head_matrices(glm, start)
    folder, values = with_packed(glm, tmp_path / "q", "int4 group", names)
    state = begun(folder, "mtp").body.state_dict()
    for expert in range(4):
        gate, up, down = (values[f"{start}{expert}.{one}_proj.weight"] for one in ("gate", "up", "down"))
        equal(state["layers.0.mlp.experts.gate_up_proj"][expert], torch.cat([gate, up]))
        equal(state["layers.0.mlp.experts.down_proj"][expert], down)


def test_a_new_head_begins_as_a_packed_last_layer(qwen: Path, tmp_path: Path) -> None:
    names = head_matrices(qwen, LAST)
    folder, values = with_packed(qwen, tmp_path / "q", "modelopt nvfp4", names)
    layer = begun(folder, "mtp", init="last_layer").body.state_dict()
    for name in names:
        equal(layer[name.replace(LAST, "layers.0.")], values[name])


# --- what is not read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_columns_in_an_order_of_their_own_are_named(
    method: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error where copies are asked for; else that part begins at random, and it is said."""
    folder, _ = with_packed(llama, tmp_path / "q", "gptq 4", [LAST + name for name in MATRICES])
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAST}mlp.up_proj.g_idx"] = tensors[f"{LAST}mlp.up_proj.g_idx"].flip(0)
    folder = write_checkpoint(folder, tmp_path / "d", tensors, json.loads((folder / "config.json").read_text()))
    spec, wanted = TargetSpec.from_folder(folder), rf"{LAST}mlp\.up_proj\.weight.*gptq with g_idx"
    with pytest.raises(InputError, match=wanted + r".*drafter\.init=closed_form"):
        find_method(method).check_copies(DrafterConfig(method, init="target"), spec, folder)
    capsys.readouterr()
    drafter = begun(folder, method, init="closed_form", num_layers=1)
    assert re.search(wanted + ".*begins at random", " ".join(capsys.readouterr().err.split()))
    assert not torch.equal(drafter.body.norm.weight, torch.ones_like(drafter.body.norm.weight))  # a copy


def test_experts_in_one_stack_of_codes_are_named(glm: Path, tmp_path: Path) -> None:
    tensors = load_file(glm / "model.safetensors")
    start = "model.layers.4.mlp.experts."
    tensors = {name: one for name, one in tensors.items() if not name.startswith(start)}
    tensors[f"{start}gate_up_proj_blocks"] = torch.zeros(4, 64, 1, 16, dtype=torch.uint8)
    tensors[f"{start}gate_up_proj_scales"] = torch.zeros(4, 64, 1, dtype=torch.uint8)
    config = json.loads((glm / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    folder = write_checkpoint(glm, tmp_path / "q", tensors, config)
    with pytest.raises(InputError, match=r"experts\.gate_up_proj_blocks.*one stack, quantised by mxfp4.*16 bits"):
        METHOD.check_copies(DrafterConfig("mtp", init="target"), TargetSpec.from_folder(folder), folder)


def test_a_missing_head_and_a_scheme_without_a_list_are_named_before_work(qwen: Path, tmp_path: Path) -> None:
    config = json.loads((qwen / "config.json").read_text()) | {"quantization_config": {"quant_method": "experts_int8"}}
    tensors = load_file(qwen / "model.safetensors")
    folder = write_checkpoint(qwen, tmp_path / "q", tensors, config)
    with pytest.raises(InputError, match=r"quantised by experts_int8.*not known"):
        METHOD.check_copies(DrafterConfig("mtp", init="target"), TargetSpec.from_folder(folder), folder)
    headless = tiny_target("qwen3_5_text", tmp_path / "t")
    with pytest.raises(InputError, match=r"drafter\.init=last_layer"):
        METHOD.check_copies(DrafterConfig("mtp", init="target"), TargetSpec.from_folder(headless), headless)
