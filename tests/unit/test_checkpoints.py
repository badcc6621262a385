"""A checkpoint is loaded only if its tensors are those that its configuration asks for, and what it need not have is no
false alarm.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CONFIGS, tiny_target
from torch import Tensor

from spectrain.config.target_schema import TargetConfig
from spectrain.errors import InputError
from spectrain.target.model import TargetModel, check_weights
from spectrain.target.resolve import resolve_target

WEIGHTS = "model.safetensors"
LAYER = "model.layers.2."
Tensors = dict[str, Tensor]


def change(folder: Path, edit: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def describe(folder: Path, **fields: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def refused(folder: Path) -> str:
    """What is said of it; the same before anything is read and when it is loaded."""
    config = TargetConfig(path=str(folder))
    with pytest.raises(InputError) as before:
        check_weights(folder, config)
    with pytest.raises(InputError) as loading:
        TargetModel.load(resolve_target(config), config)
    assert str(before.value) == str(loading.value)
    return str(before.value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_family_is_sound_as_transformers_saves_it(family: str, tied: bool, tmp_path: Path) -> None:
    folder = tiny_target(family, tmp_path, tie_word_embeddings=tied)
    attention = "eager" if family == "gpt_oss" else "sdpa"
    check_weights(folder, TargetConfig(path=str(folder), attn_implementation=attention))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", f"{LAYER}mlp.up_proj.weight"),
        ("llama", f"{LAYER}input_layernorm.weight"),
        ("llama", "model.norm.weight"),
        ("llama", "model.embed_tokens.weight"),
        ("llama", "lm_head.weight"),
        ("qwen2", f"{LAYER}self_attn.q_proj.bias"),
        ("phi3", f"{LAYER}self_attn.qkv_proj.weight"),
        ("gemma3", "language_model.model.layers.2.mlp.up_proj.weight"),
    ],
)
def test_a_missing_tensor_is_named(family: str, name: str, tmp_path: Path) -> None:
    folder = tiny_target(family, tmp_path)
    named = next(
        one
        for one in load_file(folder / WEIGHTS)
        if one.endswith(name.split("language_model.")[-1].removeprefix("model."))
    )
    message = refused(change(folder, lambda tensors: tensors.pop(named)))
    assert name.split("model.")[-1] in message and "missing" in message


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """Experts are stacked as they are loaded, so transformers names none of them."""
    folder, name = tiny_target("qwen3_moe", tmp_path), f"{LAYER}mlp.experts.3.up_proj.weight"
    change(folder, lambda tensors: tensors.pop(name))
    config = TargetConfig(path=str(folder))
    with pytest.raises(InputError, match=f"{name} is missing"):
        check_weights(folder, config)
    with pytest.raises(InputError):
        TargetModel.load(resolve_target(config), config)


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("llama", "model.embed_tokens.weight", (320, 32)),
        ("llama", "lm_head.weight", (320, 32)),
        ("llama", f"{LAYER}mlp.down_proj.weight", (32, 47)),
        ("llama", f"{LAYER}self_attn.k_proj.weight", (32, 32)),
        ("qwen3", f"{LAYER}self_attn.q_norm.weight", (4,)),
    ],
)
def test_another_shape_is_named_with_both(family: str, name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = tiny_target(family, tmp_path)
    asked = tuple(load_file(folder / WEIGHTS)[name].shape)
    message = refused(change(folder, lambda tensors: tensors.update({name: torch.zeros(shape)})))
    assert name in message and str(shape) in message and str(asked) in message


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}self_attn.q_proj.bias",
        f"{LAYER}self_attn.q_norm.weight",
        "model.layers.4.mlp.up_proj.weight",
        "lm_head.bias",
    ],
)
def test_a_tensor_without_a_place_is_named(name: str, tmp_path: Path) -> None:
    """Of another family, of a layer too many: config.json is not the checkpoint's."""
    folder = tiny_target("llama", tmp_path)
    assert name in refused(change(folder, lambda tensors: tensors.update({name: torch.zeros(32)})))


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}self_attn.rotary_emb.inv_freq",
        "mtp.layers.0.mlp.up_proj.weight",
        "model.mtp_layers.0.norm.weight",
        "model.layers.4.eh_proj.weight",
        "model.vision_tower.blocks.0.weight",
        "visual.merger.mlp.0.weight",
        "multi_modal_projector.mm_input_projection_weight",
        f"{LAYER}self_attn.k_scale",
    ],
)
def test_what_the_language_model_does_without_is_no_alarm(name: str, tmp_path: Path) -> None:
    folder = describe(tiny_target("llama", tmp_path), num_nextn_predict_layers=1)
    change(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    config = TargetConfig(path=str(folder))
    check_weights(folder, config)
    TargetModel.load(resolve_target(config), config)


def test_a_wrapper_may_lack_its_vision_tower(tmp_path: Path) -> None:
    folder = tiny_target("gemma3", tmp_path)

    def blind(tensors: Tensors) -> None:
        for name in [name for name in tensors if "vision" in name or "multi_modal" in name]:
            del tensors[name]

    check_weights(change(folder, blind), TargetConfig(path=str(folder)))


def test_a_tied_head_may_be_stored_or_not(tmp_path: Path) -> None:
    folder = tiny_target("llama", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    check_weights(folder, TargetConfig(path=str(folder)))


def test_codes_without_a_word_about_them_are_an_error(tmp_path: Path) -> None:
    folder = tiny_target("llama", tmp_path)
    name = f"{LAYER}mlp.up_proj.weight"
    change(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(InputError, match=f"{name} is of type F8_E4M3"):
        check_weights(folder, TargetConfig(path=str(folder)))
