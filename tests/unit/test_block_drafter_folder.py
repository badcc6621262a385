"""A block drafter's folder: the same bits come back, and every switch that vLLM reads is written out as it reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from block_tools import BLOCK_VARIANTS, DFLASH2, DSPARK, BlockOptions, block_tensors, random_block_drafter
from drafter_tools import HIDDEN, VOCAB, save
from safetensors.torch import load_file, save_file

from spectrain.decoding.proposers import Observation
from spectrain.decoding.sampling import GREEDY, SamplingParams
from spectrain.drafters.block.block_drafter import BlockDrafter
from spectrain.drafters.drafter_folder import load_drafter, read_method, read_shape
from spectrain.errors import InputError


def config_of(options: BlockOptions, folder: Path) -> dict[str, Any]:
    return json.loads((save(random_block_drafter(options), folder) / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", BLOCK_VARIANTS, ids=lambda options: options.name)
def test_saved_and_loaded_is_the_same_bits(tmp_path: Path, options: BlockOptions, dtype: torch.dtype) -> None:
    drafter = random_block_drafter(options, dtype=dtype)
    found = load_drafter(save(drafter, tmp_path / "drafter"))
    assert isinstance(found, BlockDrafter)
    found.attach(drafter.head)
    assert found.shape == drafter.shape == read_shape(tmp_path / "drafter")
    assert found.method == read_method(tmp_path / "drafter") == options.method and found.taps == options.taps
    ours, theirs = block_tensors(found), block_tensors(drafter)
    assert set(ours) == set(theirs)
    assert all(ours[name].dtype == dtype and torch.equal(ours[name], theirs[name]) for name in ours)
    assert found.rotary.inv_freq.dtype == torch.float32

    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(2, 7, len(options.taps), HIDDEN, generator=generator)
    proposals = []
    for one in (drafter, found):
        cache = one.new_cache(2)
        one.observe(cache, Observation(torch.zeros(2, 7, dtype=torch.long), torch.tensor([7, 5]), taps))
        streams = [torch.Generator().manual_seed(b) for b in range(2)]
        proposals.append(one.propose(cache, torch.tensor([1, 2]), 4, SamplingParams(temperature=1.0), streams))
    assert torch.equal(proposals[0].log_probs, proposals[1].log_probs) and torch.equal(
        proposals[0].ids, proposals[1].ids
    )
    if options.confidence:
        assert torch.equal(proposals[0].confidence, proposals[1].confidence)


def test_calibration_is_kept(tmp_path: Path) -> None:
    drafter = random_block_drafter(DSPARK)
    drafter.temperatures = (1.5, 0.25, 3.0)
    found = load_drafter(save(drafter, tmp_path / "drafter", step=3))
    assert isinstance(found, BlockDrafter) and found.temperatures == (1.5, 0.25, 3.0)


def test_fields_that_vllm_reads(tmp_path: Path) -> None:
    plain = config_of(BlockOptions(taps=(0, 3, 4)), tmp_path / "dflash")
    assert plain["architectures"] == ["DFlashDraftModel"] and plain["speculators_model_type"] == "dflash"
    assert plain["aux_hidden_state_layer_ids"] == [0, 3, 4]  # ours, without the −1 of other layouts
    assert (plain["mask_token_id"], plain["block_size"], plain["sample_from_anchor"]) == (5, 5, False)
    assert plain["sliding_window_non_causal"] is True
    layer = plain["transformer_layer_config"]
    assert (
        layer["model_type"] == "qwen3"
        and layer["layer_types"] == ["full_attention"] * 2
        and layer["vocab_size"] == VOCAB
    )
    assert plain["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4

    window = config_of(BlockOptions(window=7, causal=True), tmp_path / "window")
    assert window["sliding_window_non_causal"] is False
    assert window["transformer_layer_config"]["layer_types"] == ["sliding_attention"] * 2
    assert window["transformer_layer_config"]["sliding_window"] == 7

    spark = config_of(DSPARK, tmp_path / "dspark")
    assert spark["architectures"] == ["Qwen3DSparkModel"] and spark["sample_from_anchor"] is True
    assert (spark["markov_rank"], spark["markov_head_type"]) == (3, "vanilla")
    assert spark["enable_confidence_head"] is True and spark["confidence_head_with_markov"] is True

    second = config_of(DFLASH2, tmp_path / "dflash2")
    assert second["architectures"] == ["DFlash2DraftModel"] and second["speculators_model_type"] == "dflash2"
    assert [second[f"conv_{name}"] for name in ("kernel_size", "group_size")] == [3, 4]
    assert [second[f"selector_{name}"] for name in ("rank", "top_k")] == [3, 6]


def test_tensors_have_the_names_and_shapes_of_the_checkpoint(tmp_path: Path) -> None:
    """As the table of tensors that vLLM loads has them; the target's embedding and a full vocabulary's head are not
    among them.
    """
    spark = load_file(
        save(
            random_block_drafter(BlockOptions(method="dspark", markov="vanilla", reduced=True, confidence=True)),
            tmp_path / "a",
        )
        / "model.safetensors"
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in spark.items() if not name.startswith("layers.1.")}
    layer = {
        "input_layernorm.weight": (16,),
        "post_attention_layernorm.weight": (16,),
        "self_attn.q_proj.weight": (24, 16),
        "self_attn.k_proj.weight": (12, 16),
        "self_attn.v_proj.weight": (12, 16),
        "self_attn.o_proj.weight": (16, 24),
        "self_attn.q_norm.weight": (6,),
        "self_attn.k_norm.weight": (6,),
        "mlp.gate_proj.weight": (20, 16),
        "mlp.up_proj.weight": (20, 16),
        "mlp.down_proj.weight": (16, 20),
    }
    assert shapes == {
        "fc.weight": (16, 48),
        "hidden_norm.weight": (16,),
        "norm.weight": (16,),
        "lm_head.weight": (9, 16),
        "d2t": (9,),
        "markov_head.markov_w1.weight": (VOCAB, 3),
        "markov_head.markov_w2.weight": (9, 3),
        "confidence_head.proj.weight": (1, 16),
        "confidence_head.proj.bias": (1,),
        **{f"layers.0.{name}": shape for name, shape in layer.items()},
    }
    second = load_file(save(random_block_drafter(DFLASH2), tmp_path / "b") / "model.safetensors")
    assert "lm_head.weight" not in second and "d2t" not in second
    for name in ("attention_conv", "mlp_conv"):
        assert tuple(second[f"layers.1.{name}.base_kernel"].shape) == (2, 3, 16)
        assert tuple(second[f"layers.1.{name}.kernel_projection.weight"].shape) == (2 * 3 * 4, 16)
    assert tuple(second["candidate_selector.predecessor_codebook"].shape) == (VOCAB, 3)
    assert tuple(second["candidate_selector.successor_codebook"].shape) == (VOCAB, 3)
    assert tuple(second["candidate_selector.hidden_projection.weight"].shape) == (3, 16)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("mask_token_id", "'mask_token_id' is missing"),
        ("aux_hidden_state_layer_ids", "'aux_hidden_state_layer_ids' is missing"),
    ],
)
def test_a_missing_field_is_named(tmp_path: Path, field: str, message: str) -> None:
    folder = save(random_block_drafter(), tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    del config[field]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        load_drafter(folder)


LAYER = "transformer_layer_config"
# (drafter, field, values that make no sense, what is said of them)
NONSENSE: list[tuple[BlockOptions, str, tuple[Any, ...], str]] = [
    (BlockOptions(), "block_size", (1, 0, "5", 2.5, True), "block_size is .* at least 2"),
    (DSPARK, "block_size", (1, 0), "block_size is .* at least 2"),
    (BlockOptions(), "mask_token_id", (-1, 1.5, VOCAB), "mask_token_id is "),
    (BlockOptions(), "aux_hidden_state_layer_ids", ([], [3, 1, 4], "134"), "layer"),
    (BlockOptions(), "sample_from_anchor", (True, "no"), "sample_from_anchor is "),
    (BlockOptions(), "sliding_window_non_causal", ("no",), "must be true or false"),
    (BlockOptions(), "draft_vocab_size", (-1, "9", VOCAB + 1), "draft_vocab_size is "),
    (BlockOptions(), f"{LAYER}.num_hidden_layers", (0, "2"), "num_hidden_layers is "),
    (BlockOptions(), f"{LAYER}.num_key_value_heads", (0, 3), "num_key_value_heads"),
    (BlockOptions(), f"{LAYER}.head_dim", (7, -6), "head_dim is "),
    (BlockOptions(), f"{LAYER}.rms_norm_eps", (None, -1, "x"), "rms_norm_eps is "),
    (BlockOptions(), f"{LAYER}.max_position_embeddings", (None, 0), "max_position_embeddings is "),
    (BlockOptions(), f"{LAYER}.layer_types", (["chunked"], "full_attention"), "layer_types is "),
    (
        BlockOptions(),
        f"{LAYER}.rope_parameters",
        ({"rope_type": "spiral", "rope_theta": 1.0},),
        "rope_type is 'spiral'",
    ),
    (
        BlockOptions(),
        f"{LAYER}.rope_parameters",
        ({"rope_type": "yarn", "rope_theta": 1.0},),
        "rope_type 'yarn': .*factor",
    ),
    (
        BlockOptions(),
        f"{LAYER}.rope_parameters",
        ({"rope_type": "linear", "rope_theta": 1.0, "factor": 0},),
        "frequencies .* not finite",
    ),
    (
        BlockOptions(),
        f"{LAYER}.rope_parameters",
        ({"rope_type": "linear", "rope_theta": 1.0, "factor": "x"},),
        "rope_type 'linear': ",
    ),
    (BlockOptions(), f"{LAYER}.rope_parameters", ({"rope_type": "default", "rope_theta": "x"},), "rope_theta is 'x'"),
    (BlockOptions(window=4), f"{LAYER}.sliding_window", (0, None, "4"), "sliding_window is "),
    (BlockOptions(), "spectrain", ("x", [1]), "spectrain is "),
    (
        DSPARK,
        "spectrain",
        ({"confidence_temperatures": [1.0, 0]}, {"confidence_temperatures": ["a"]}),
        "confidence_temperatures is ",
    ),
    (DSPARK, "markov_head_type", ("attention", 5), "markov_head_type is "),
    (DSPARK, "markov_rank", (-1, "3"), "markov_rank is "),
    (DSPARK, "enable_confidence_head", ("yes",), "must be true or false"),
    (DFLASH2, "conv_kernel_size", (0, "3"), "conv_kernel_size is "),
    (DFLASH2, "conv_group_size", (0, 3), "conv_group_size is "),
    (DFLASH2, "selector_rank", (-1,), "selector_rank is "),
    (DFLASH2, "selector_top_k", (0, 1.5), "selector_top_k is "),
]


@pytest.mark.parametrize(
    ("options", "field", "values", "message"), NONSENSE, ids=[f"{case[1]}={case[2]}" for case in NONSENSE]
)
def test_a_field_that_makes_no_sense_is_named(
    tmp_path: Path, options: BlockOptions, field: str, values: tuple[Any, ...], message: str
) -> None:
    file = save(random_block_drafter(options), tmp_path / "drafter") / "config.json"
    whole = file.read_text()
    for value in values:
        config = json.loads(whole)
        *section, name = field.split(".")
        (config[section[0]] if section else config)[name] = value
        file.write_text(json.dumps(config))
        with pytest.raises(InputError, match=f"config.json.*{message}"):
            load_drafter(file.parent)


def test_weights_that_cannot_be_computed_with_are_refused(tmp_path: Path) -> None:
    file = (
        save(random_block_drafter(BlockOptions(reduced=True), dtype=torch.float32), tmp_path / "drafter")
        / "model.safetensors"
    )
    tensors = load_file(file)
    for name, broken, message in (
        ("fc.weight", tensors["fc.weight"].int(), "of type torch.int32"),
        ("fc.weight", tensors["fc.weight"].to(torch.float8_e4m3fn), "of type torch.float8_e4m3fn"),
        ("norm.weight", tensors["norm.weight"] * float("nan"), "not finite"),
        ("d2t", tensors["d2t"].float(), "must hold whole numbers"),
    ):
        save_file(tensors | {name: broken}, file)
        with pytest.raises(InputError, match=f"'{name}' .*{message}"):
            load_drafter(file.parent)


def test_mixed_layers_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    folder = save(random_block_drafter(DSPARK), tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"]["layer_types"] = ["full_attention", "sliding_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="in all layers"):
        load_drafter(folder)
    folder = save(random_block_drafter(DSPARK), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["markov_head.markov_w1.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"'markov_head\.markov_w1\.weight' is missing"):
        load_drafter(folder)


def test_greedy_drafts_survive_bfloat16_storage(tmp_path: Path) -> None:
    """A folder loaded in float32 turns by the same rotary phases as one in bfloat16: late positions would differ by
    radians otherwise.
    """
    drafter = random_block_drafter(BlockOptions(), dtype=torch.bfloat16)
    found = load_drafter(save(drafter, tmp_path / "drafter")).float()
    found.attach(drafter.head.float())
    taps = torch.randn(1, 100, 3, HIDDEN, generator=torch.Generator().manual_seed(0))
    cache = found.new_cache(1)
    found.observe(cache, Observation(torch.zeros(1, 100, dtype=torch.long), torch.tensor([100]), taps))
    assert found.propose(cache, torch.tensor([3]), 4, GREEDY).ids.shape == (1, 4)
    positions = torch.tensor([100.0])
    assert torch.equal(found.rotary.cos_sin(positions)[0], drafter.rotary.cos_sin(positions)[0])
