"""Folders that others wrote: the same drafter comes back, layer ids are converted once, and what cannot be read is
named.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_tools import DFLASH2, DSPARK, BlockOptions, random_block_drafter
from drafter_tools import VOCAB, Options, packed, random_document, random_drafter, random_head
from foreign_layouts import Written, deepspec_dspark, eagle3, write, zlab_dflash
from safetensors.torch import load_file, save_file

from spectrain.config.drafter_schema import BlockConfig, DrafterConfig
from spectrain.drafters.block.block_drafter import BlockDrafter
from spectrain.drafters.build import continue_drafter
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.drafter_folder import load_drafter, read_method, read_shape, save_drafter
from spectrain.drafters.foreign_checkpoints import standard_config
from spectrain.drafters.serving_config import read_serving_config
from spectrain.errors import InputError

Layout = Callable[[Drafter], Written]
F32 = torch.float32


def eagle(**options: Any) -> Drafter:
    return random_drafter(Options(**options), dtype=F32)


def block(options: BlockOptions) -> Drafter:
    return random_block_drafter(options, dtype=F32)


# name -> (layout, drafter, drafts a round that it asks for, the most it can draft)
CASES: dict[str, tuple[Layout, Callable[[], Drafter], int, int | None]] = {
    "dflash": (zlab_dflash, lambda: block(BlockOptions(taps=(1, 4))), 4, 4),
    "dflash from the embeddings": (zlab_dflash, lambda: block(BlockOptions(taps=(0, 3), reduced=True)), 4, 4),
    "dflash, sliding": (zlab_dflash, lambda: block(BlockOptions(window=4)), 4, 4),
    "dflash, sliding and causal": (zlab_dflash, lambda: block(BlockOptions(window=3, causal=True, block_size=6)), 5, 5),
    "dflash2": (zlab_dflash, lambda: block(DFLASH2), 4, 4),
    "dspark": (deepspec_dspark, lambda: block(DSPARK), 5, 5),
    "dspark, gated": (deepspec_dspark, lambda: block(BlockOptions("dspark", anchor=True, markov="gated")), 5, 5),
    "eagle3": (eagle3, lambda: eagle(reduced=True), 3, None),
    "eagle3, sliding": (eagle3, lambda: eagle(reduced=True, window=4), 3, None),
    "eagle3, all switches": (
        eagle3,
        lambda: eagle(norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True, taps=(0, 4)),
        3,
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_drafter_comes_back(tmp_path: Path, name: str) -> None:
    layout, make, drafts, most = CASES[name]
    drafter = make()
    folder = write(layout, drafter, tmp_path / "theirs")
    found = load_drafter(folder)
    assert found.shape == drafter.shape == read_shape(folder)
    assert found.method == read_method(folder) == drafter.method
    assert torch.equal(found.vocab.ids_D, drafter.vocab.ids_D)
    ours, theirs = found.body.state_dict(), drafter.body.state_dict()
    assert set(ours) == set(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)
    found.attach(drafter.head)
    assert found.copies is None  # compared, and let go

    served = read_serving_config(str(folder))
    assert (served.num_speculative_tokens, served.most_tokens, served.last_tap) == (drafts, most, max(drafter.taps))
    assert (served.target, served.vocab_size, served.hidden_size) == (None, VOCAB, drafter.shape.layer.hidden_size)
    assert served.speculative_config()["method"] == drafter.method.replace("dflash2", "dflash")


@pytest.mark.parametrize("name", ["dflash, sliding", "dspark", "eagle3"])
def test_training_goes_on_and_writes_our_layout(tmp_path: Path, name: str) -> None:
    layout, make, drafts, _ = CASES[name]
    drafter = make()
    config = DrafterConfig(drafter.method, path=str(write(layout, drafter, tmp_path / "theirs")))
    found = continue_drafter(config, drafter.head)
    batch = packed([random_document("000111111", len(drafter.taps), 0)])
    batch = type(batch)(
        **{
            key: value.float() if torch.is_tensor(value) and value.is_floating_point() else value
            for key, value in vars(batch).items()
        }
    )
    found.train_losses(batch).loss.backward()
    assert all(parameter.grad is not None for parameter in found.body.parameters() if parameter.requires_grad)
    facts = {"target": "org/target", "target_architectures": ("LlamaForCausalLM",), "num_speculative_tokens": drafts}
    save_drafter(found, tmp_path / "ours", **facts)
    again = load_drafter(tmp_path / "ours")
    assert again.shape == drafter.shape
    assert json.loads((tmp_path / "ours/config.json").read_text())["speculators_model_type"] == drafter.method
    assert not {"embed_tokens.weight", "midlayer.norm.weight", "t2d"} & set(
        load_file(tmp_path / "ours/model.safetensors")
    )


# --- layer ids, the one conversion ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "make", "change", "taps"),
    [
        (
            zlab_dflash,
            BlockOptions(),
            {"dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 5}},
            (2, 10, 18, 26, 34),
        ),
        (
            zlab_dflash,
            BlockOptions(),
            {"eagle_aux_hidden_state_layer_ids": [2, 10]},
            (2, 10),
        ),  # vLLM's own field wins, as it is
        (deepspec_dspark, DSPARK, {"target_layer_ids": [1, 9, 17, 25, 33]}, (2, 10, 18, 26, 34)),
        (deepspec_dspark, DSPARK, {"target_layer_ids": None, "dflash_config": {"target_layer_ids": [-1, 0]}}, (0, 1)),
        (eagle3, None, {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, (2, 18, 33)),
        (
            eagle3,
            None,
            {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}},
            (2, 5, 9),
        ),
    ],
)
def test_layer_ids(
    tmp_path: Path, layout: Layout, make: BlockOptions | None, change: dict[str, Any], taps: tuple[int, ...]
) -> None:
    drafter = eagle() if make is None else block(make)
    assert read_shape(write(layout, drafter, tmp_path / "d", **change)).taps == taps


def test_eagle3_without_layer_ids_reads_the_usual_ones(tmp_path: Path) -> None:
    folder = write(eagle3, eagle(taps=(2, 3, 4)), tmp_path / "d", eagle_aux_hidden_state_layer_ids=None)
    assert read_shape(folder, (2, 18, 33)).taps == (2, 18, 33)
    assert load_drafter(folder, (2, 3, 4)).taps == (2, 3, 4)
    assert read_serving_config(str(folder)).last_tap is None  # vLLM knows
    with pytest.raises(InputError, match=r"config\.json: field 'eagle_aux_hidden_state_layer_ids' is missing"):
        load_drafter(folder)


# --- speculators' own exports --------------------------------------------------------------------------------------


def exported(drafter: Drafter, folder: Path, *missing: str) -> Path:
    """Our layout as speculators writes it: fields left out, the target's embedding and t2d in the file."""
    save_drafter(
        drafter, folder, target="org/target", target_architectures=("LlamaForCausalLM",), num_speculative_tokens=4
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key not in ("spectrain", *missing)})
    )
    tensors = load_file(folder / "model.safetensors")
    t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, drafter.vocab.ids_D, True)
    tensors |= {"embed_tokens.weight": drafter.head.embed_weight.clone(), "t2d": t2d}
    save_file(tensors, folder / "model.safetensors")
    return folder


SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (lambda: eagle(norm_before_residual=True, reduced=True), SWITCHES),
        (lambda: block(BlockOptions()), ("sample_from_anchor", "sliding_window_non_causal", "draft_vocab_size")),
        (
            lambda: block(BlockOptions("dspark", markov="vanilla", taps=(2,))),
            ("sample_from_anchor", "sliding_window_non_causal", "markov_head_type", "enable_confidence_head"),
        ),
    ],
)
def test_speculators_exports_that_say_less(
    tmp_path: Path, make: Callable[[], Drafter], missing: tuple[str, ...]
) -> None:
    drafter = make()
    found = load_drafter(exported(drafter, tmp_path / "d", *missing)).attach(drafter.head)
    assert found.shape == drafter.shape
    ours, theirs = found.body.state_dict(), drafter.body.state_dict()
    assert set(ours) == set(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_older_rotary_settings_are_not_lost(tmp_path: Path) -> None:
    """Exports made with transformers 4 have rope_scaling and rope_theta beside each other."""
    folder = exported(eagle(), tmp_path / "d")
    config = json.loads((folder / "config.json").read_text())
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "type": "llama3",
    }
    layer = {key: value for key, value in config["transformer_layer_config"].items() if key != "rope_parameters"}
    config["transformer_layer_config"] = layer | {"rope_scaling": scaling, "rope_theta": 500000.0}
    (folder / "config.json").write_text(json.dumps(config))
    found = read_shape(folder).layer.rope_parameters
    assert found == {key: value for key, value in scaling.items() if key != "type"} | {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
    }


def test_our_own_configuration_passes_unchanged(tmp_path: Path) -> None:
    for number, drafter in enumerate(
        (eagle(), block(BlockOptions(window=4, causal=True)), block(DSPARK), block(DFLASH2))
    ):
        save_drafter(drafter, tmp_path / str(number), target="t", target_architectures=(), num_speculative_tokens=2)
        config = json.loads((tmp_path / str(number) / "config.json").read_text())
        assert {key: value for key, value in config.items() if value is not None} == standard_config(config, "here")


# --- copies of the target's matrices -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_copies_must_be_the_targets(tmp_path: Path, name: str) -> None:
    drafter = block(DSPARK)
    folder = write(deepspec_dspark, drafter, tmp_path / "d")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: tensors[name].bfloat16()}, folder / "model.safetensors")
    load_drafter(folder).attach(drafter.head)  # rounded is the same
    changed = tensors[name].clone()
    changed[3] += changed.norm() * 0.1
    for other in (changed, tensors[name][:-1].clone()):
        save_file({**tensors, name: other}, folder / "model.safetensors")
        with pytest.raises(InputError, match=rf"model\.safetensors: tensor '{name}' is not the target's"):
            load_drafter(folder).attach(drafter.head)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match="is not the target's"):
        load_drafter(folder).attach(random_head(seed=7, dtype=F32))


# --- what cannot be read -------------------------------------------------------------------------------------------

NESTED = {"target_layer_ids": [0, 2, 3], "mask_token_id": 5}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        "dflash",
        {"architectures": ["LlamaForCausalLM"]},
        "is no drafter's: .* its architecture LlamaForCausalLM is none of LlamaForCausalLMEagle3, ",
    ),
    ("dflash", {"architectures": None}, "is no drafter's: .* its architecture None"),
    ("dflash", {"dflash_config": None}, "field 'target_layer_ids' is missing"),
    ("dflash", {"dflash_config": [1]}, r"dflash_config is \[1\], it must be an object"),
    ("dflash", {"dflash_config": {"target_layer_ids": [0, 2, 3]}}, "field 'mask_token_id' is missing"),
    (
        "dflash",
        {"dflash_config": NESTED | {"mask_token_id": -1}},
        "mask_token_id is -1, it must be a whole number of at least 0",
    ),
    (
        "dflash",
        {"dflash_config": NESTED | {"target_layer_ids": [3, 1]}},
        r"dflash_config.target_layer_ids is \[3, 1\]: layers must ascend",
    ),
    ("dflash", {"dflash_config": NESTED | {"target_layer_ids": [-2, 1]}}, "layers must ascend and be -1 or more"),
    (
        "dflash",
        {"dflash_config": NESTED | {"target_layer_ids": "all"}},
        "target_layer_ids is 'all', it must be a list of layers",
    ),
    (
        "dflash",
        {"dflash_config": NESTED | {"use_swa": True}},
        "neither dflash_config.swa_window_size nor sliding_window",
    ),
    ("dflash", {"dflash_config": NESTED | {"sample_from_anchor": True}}, "only dspark drafts from the anchor"),
    (
        "dflash",
        {"dflash_config": NESTED | {"attention_sink_bias": True}},
        "attention_sink_bias is True, this version reads",
    ),
    ("dflash", {"num_hidden_layers": 10**9}, r"num_hidden_layers is 1e\+09, it must be from 0 to 10,000"),
    ("dflash", {"rope_theta": 10**400}, "rope_theta is 1000"),
    ("dflash", {"block_size": None}, "field 'block_size' is missing"),
    ("dflash", {"block_size": "8"}, "block_size is '8', it must be a whole number of at least 1"),
    ("dflash", {"hidden_size": None}, "field 'hidden_size' is missing"),
    ("dflash", {"rms_norm_eps": None}, "field 'rms_norm_eps' is missing"),
    ("dflash", {"rope_theta": None}, "field 'rope_theta' is missing"),
    (
        "dflash",
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5",
    ),
    ("dflash", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}, "mixes sliding and full"),
    ("dflash", {"layer_types": 5}, "layer_types is 5, this version reads"),
    ("dflash", {"layer_types": ["chunked"]}, r"layer_types is \['chunked'\], this version reads"),
    ("dflash", {"head_dim": "x"}, "head_dim is 'x', it must be a whole number"),
    ("dflash", {"intermediate_size": 10**12}, r"intermediate_size is 1e\+12"),
    ("dflash", {"head_dim": 10**400}, "head_dim is 1000"),
    ("dflash", {"speculators_model_type": ["dflash"]}, r"speculators_model_type is \['dflash'\]"),
    (
        "dflash",
        {"dflash_config": NESTED | {"use_swa": True, "swa_window_size": "8"}},
        "sliding_window is '8', it must be a whole number",
    ),
    ("dflash", {"target_hidden_size": 99}, "target_hidden_size is 99, hidden_size 16"),
    ("dflash", {"attention_bias": True}, "attention_bias is True, this version reads drafters with False alone"),
    ("dflash2", {"dflash_config": NESTED}, "field 'dflash_config.conv_kernel_size' is missing"),
    ("dspark", {"markov_rank": None}, "field 'markov_rank' is missing"),
    ("dspark", {"target_layer_ids": None}, "field 'target_layer_ids' is missing"),
    ("dspark", {"is_causal": True}, "its attention is causal, but a dspark drafter's is exactly where it slides"),
    ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
    ("eagle3", {"layer_types": ["sliding_attention"]}, "its layers slide, but sliding_window does not say how far"),
    ("eagle3", {"layer_types": ["chunked"]}, r"layer_types is \['chunked'\], this version reads"),
    ("eagle3", {"quantization_config": {"bits": 4}}, "quantization_config is"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, r"is \[1, 1, 2\]: layers must ascend and be 0 or more"),
    ("eagle3", {"draft_vocab_size": None}, "'d2t' moves ids"),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    WRONG,
    ids=[f"{name}-{'-'.join(changes)}-{i}" for i, (name, changes, _) in enumerate(WRONG)],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    layout, make, _, _ = CASES[name]
    folder = write(layout, make(), tmp_path / "d", **changes)
    with pytest.raises(InputError, match=message) as error:
        load_drafter(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_a_mask_embedding_beside_the_weights_is_not_overlooked(tmp_path: Path) -> None:
    folder = write(zlab_dflash, block(BlockOptions()), tmp_path / "d")
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(InputError, match="mask is a token of the target alone"):
        load_drafter(folder)


def test_other_formats_of_weights_are_not_read(tmp_path: Path) -> None:
    folder = write(eagle3, eagle(), tmp_path / "d")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="only safetensors are read"):
        load_drafter(folder)


def test_options_of_training_are_the_configurations(tmp_path: Path) -> None:
    drafter = block(DSPARK)
    folder = write(deepspec_dspark, drafter, tmp_path / "d")
    found = continue_drafter(DrafterConfig("dspark", path=str(folder), block=BlockConfig(anchors=9)), drafter.head)
    assert isinstance(found, BlockDrafter)
    assert (found.config.block.anchors, found.config.block.block_size) == (9, drafter.shape.block_size)
