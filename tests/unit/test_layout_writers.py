"""``convert``: a drafter goes into another project's layout and comes back, bit for bit; what a layout cannot say is an
error. The layouts of others are written by ``foreign_layouts.py``, which shares no code with the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from block_tools import DFLASH2, DSPARK, BlockOptions, random_block_drafter
from drafter_tools import Options, random_drafter
from foreign_layouts import deepspec_dspark, eagle3, write, zlab_dflash
from safetensors.torch import load_file
from torch import Tensor

from spectrain import cli
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.drafter_folder import load_drafter, save_drafter, weights_digest
from spectrain.drafters.layout_writers import convert_drafter
from spectrain.drafters.registry import find_method
from spectrain.errors import ConfigError, InputError

CASES: dict[str, tuple[str, Any]] = {
    "dflash": ("zlab", BlockOptions(taps=(1, 4))),
    "dflash, reduced": ("zlab", BlockOptions(taps=(0, 3), reduced=True)),
    "dflash, sliding": ("zlab", BlockOptions(window=4)),
    "dflash, sliding and causal": ("zlab", BlockOptions(window=3, causal=True, block_size=6)),
    "dflash2": ("zlab", DFLASH2),
    "dspark": ("deepspec", DSPARK),
    "dspark, from the masks, causal": ("deepspec", BlockOptions("dspark", window=3, causal=True, markov="vanilla")),
    "eagle3": ("eagle", Options(reduced=True)),
    "eagle3, qwen3 layer": ("eagle", Options(layer_type="qwen3", reduced=True)),
    "eagle3, all switches": (
        "eagle",
        Options(norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True, taps=(0, 4)),
    ),
}


def make(options: Any) -> Drafter:
    build = random_block_drafter if isinstance(options, BlockOptions) else random_drafter
    return build(options, dtype=torch.float32)


def save(drafter: Drafter, folder: Path) -> Path:
    save_drafter(
        drafter,
        folder,
        target="org/target",
        target_architectures=("LlamaForCausalLM",),
        num_speculative_tokens=2,
        metadata={"coverage": 0.5},
    )
    return folder


def copies_of(drafter: Drafter) -> dict[str, Tensor]:
    return {"embed_tokens.weight": drafter.head.embed_weight, "lm_head.weight": drafter.head.lm_head_weight}


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return set(ours) == set(theirs) and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_gives_the_folder_back(tmp_path: Path, name: str):
    layout, options = CASES[name]
    drafter = make(options)
    ours = save(drafter, tmp_path / "ours")
    convert_drafter(ours, layout, tmp_path / "theirs", lambda: copies_of(drafter))
    convert_drafter(tmp_path / "theirs", "speculators", tmp_path / "again", lambda: copies_of(drafter))
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads(
        (ours / "config.json").read_text()
    )


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_what_others_write(tmp_path: Path, name: str):
    """Tensors by name, type and bits; of the configuration every field that decides what is computed."""
    layout, options = CASES[name]
    drafter = make(options)
    convert_drafter(save(drafter, tmp_path / "ours"), layout, tmp_path / "out", lambda: copies_of(drafter))
    layouts = {"zlab": zlab_dflash, "deepspec": deepspec_dspark, "eagle": eagle3}
    theirs = write(layouts[layout], drafter, tmp_path / "theirs")
    assert same(tensors(tmp_path / "out"), tensors(theirs))
    ours, wanted = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", theirs))
    fields = {"block_size", "mask_token_id", "target_layer_ids", "eagle_aux_hidden_state_layer_ids", "markov_rank"}
    fields |= {"hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"}
    for field in fields & set(wanted):
        assert ours[field] == wanted[field], field
    for field, value in wanted.get("dflash_config", {}).items():
        assert ours["dflash_config"][field] == value, field


@pytest.mark.parametrize("name", ["dflash, sliding", "dspark", "eagle3"])
def test_a_folder_of_others_comes_back_through_ours(tmp_path: Path, name: str):
    layout, options = CASES[name]
    drafter = make(options)
    layouts = {"zlab": zlab_dflash, "deepspec": deepspec_dspark, "eagle": eagle3}
    theirs = write(layouts[layout], drafter, tmp_path / "theirs")
    convert_drafter(theirs, "speculators", tmp_path / "ours", lambda: copies_of(drafter))
    assert load_drafter(tmp_path / "ours").shape == drafter.shape
    convert_drafter(tmp_path / "ours", layout, tmp_path / "again", lambda: copies_of(drafter))
    assert same(tensors(tmp_path / "again"), tensors(theirs))


def test_a_target_that_is_not_here_leaves_the_copies_where_they_are(tmp_path: Path):
    drafter = make(DSPARK)

    def nowhere() -> dict[str, Tensor]:
        raise InputError("no target")

    theirs = write(deepspec_dspark, drafter, tmp_path / "theirs")
    convert_drafter(theirs, "speculators", tmp_path / "ours", nowhere)
    assert "embed_tokens.weight" in tensors(tmp_path / "ours")
    assert load_drafter(tmp_path / "ours").shape == drafter.shape
    with pytest.raises(InputError, match="no target"):
        convert_drafter(save(drafter, tmp_path / "plain"), "deepspec", tmp_path / "out", nowhere)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "layout", "says"),
    [
        (Options(reduced=True), "zlab", "dflash"),
        (BlockOptions(), "eagle", "eagle3"),
        (BlockOptions(), "deepspec", "dspark"),
    ],
)
def test_a_layout_of_other_kinds_is_refused(tmp_path: Path, options: Any, layout: str, says: str):
    drafter = make(options)
    with pytest.raises(ConfigError, match=f"convert.to={layout} holds .*{says}"):
        convert_drafter(save(drafter, tmp_path / "ours"), layout, tmp_path / "out", lambda: copies_of(drafter))


def test_what_a_layout_cannot_say_is_an_error(tmp_path: Path):
    drafter = make(Options(num_layers=2, reduced=True))
    with pytest.raises(InputError, match="one layer"):
        convert_drafter(save(drafter, tmp_path / "ours"), "eagle", tmp_path / "out", lambda: copies_of(drafter))
    drafter = make(BlockOptions("dspark", anchor=True))
    folder = save(drafter, tmp_path / "edited")
    convert_drafter(folder, "deepspec", tmp_path / "theirs", lambda: copies_of(drafter))
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config | {"sample_from_anchor": False}))
    with pytest.raises(InputError, match="sample_from_anchor"):
        convert_drafter(tmp_path / "theirs", "speculators", tmp_path / "back", lambda: copies_of(drafter))


def test_several_files_are_one_drafter(tmp_path: Path):
    drafter = make(Options(reduced=True))
    whole = save(drafter, tmp_path / "whole")
    done = convert_drafter(whole, "speculators", tmp_path / "parts", lambda: copies_of(drafter), max_shard_bytes=2000)
    assert done.files > 2 and not (tmp_path / "parts" / "model.safetensors").exists()
    assert same(tensors(tmp_path / "parts"), tensors(whole))
    ours, again = load_drafter(whole).body.state_dict(), load_drafter(tmp_path / "parts").body.state_dict()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    convert_drafter(tmp_path / "parts", "eagle", tmp_path / "eagle", lambda: copies_of(drafter), max_shard_bytes=2000)
    convert_drafter(tmp_path / "eagle", "speculators", tmp_path / "again", lambda: copies_of(drafter))
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_one_file_of_several_that_changed_or_went_is_noticed(tmp_path: Path):
    drafter = make(Options(reduced=True))
    parts = tmp_path / "parts"
    convert_drafter(save(drafter, tmp_path / "o"), "speculators", parts, dict, max_shard_bytes=2000)
    before, last = weights_digest(parts), sorted(parts.glob("*.safetensors"))[-1]
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert weights_digest(parts) != before
    with pytest.raises(InputError, match=f"{last.name} has changed"):
        load_drafter(parts)
    last.unlink()
    with pytest.raises(InputError, match=f"names {last.name}"):
        load_drafter(parts)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    drafter = make(Options(reduced=True))
    ours = save(drafter, tmp_path / "ours")
    command = ["convert", f"drafter.path={ours}", f"convert.out={tmp_path / 'out'}"]
    assert cli.main([*command, "convert.to=eagle"]) == 0
    assert cli.main([*command, "convert.to=eagle"]) == 2
    assert "convert.out" in capsys.readouterr().err
    assert cli.main(["convert", f"drafter.path={ours}", f"convert.out={tmp_path / 'b'}"]) == 2
    assert cli.main(["convert", f"drafter.path={ours}", f"convert.out={tmp_path / 'b'}", "convert.to=zlab"]) == 2
    assert not (tmp_path / "b").exists()
    assert "midlayer.self_attn.q_proj.weight" in tensors(tmp_path / "out")


@pytest.mark.parametrize(
    ("taps", "switch", "fits"), [([2, 16, 29], None, True), ([2, 15, 30], None, False), ([2, 16, 29], "fc_norm", False)]
)
def test_which_drafters_sglang_serves(taps: list[int], switch: str | None, fits: bool):
    """Of a target of 32 layers it reads 2, 16 and 29."""
    layer = {"model_type": "llama", "num_hidden_layers": 1}
    fields = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    fields |= {"eagle_aux_hidden_state_layer_ids": taps, **({switch: True} if switch else {})}
    assert find_method("eagle3").sglang_algorithm(fields) == ("EAGLE3" if fits else "")
    assert find_method("peagle").sglang_algorithm(fields) == find_method("dflash").sglang_algorithm(fields) == ""
    layer |= {"layer_types": ["sliding_attention"], "sliding_window": 9}
    assert find_method("eagle3").sglang_algorithm(fields) == ""
