"""Dimensions read from configurations, and the taps derived from them."""

import json

import pytest
import torch
from tiny import CONFIGS, tiny_config, tiny_target

from spectrain.errors import InputError
from spectrain.target.spec import TargetSpec


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_gives_the_language_models_dimensions(family):
    spec = TargetSpec.from_config(tiny_config(family, num_hidden_layers=4, hidden_size=32))
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (32, 4, 304)
    assert (spec.num_attention_heads, spec.max_position_embeddings) == (4, 512)
    assert len(spec.layer_types) == 4
    assert spec.rope_parameters["rope_theta"] > 0
    assert not spec.tie_word_embeddings


def test_layers_that_keep_more_than_keys_and_values_make_a_target_hybrid():
    hybrids = {family for family in CONFIGS if TargetSpec.from_config(tiny_config(family)).hybrid}
    recurrent = {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
    # Their layers keep more than keys and values (what an indexer chooses by), which is not cropped either.
    indexed = {"deepseek_v32", "minimax_m3_vl", "minimax_m3_vl_text"}
    assert hybrids == recurrent | indexed


def test_wrappers_report_their_language_model():
    spec = TargetSpec.from_config(tiny_config("qwen3_5", tie_word_embeddings=True))
    assert spec.model_type == "qwen3_5_text"
    assert spec.tie_word_embeddings


def test_one_of_two_rope_sets_is_chosen_by_layer_kind():
    config = tiny_config("gemma3_text")
    spec = TargetSpec.from_config(config)
    assert (
        config.rope_parameters["full_attention"]["rope_theta"]
        != config.rope_parameters["sliding_attention"]["rope_theta"]
    )
    assert spec.rope_parameters == config.rope_parameters["full_attention"]


def test_layers_of_different_width_give_those_of_the_first():
    assert TargetSpec.from_config(tiny_config("gemma4", head_dim=8, global_head_dim=16)).head_dim == 8


@pytest.mark.parametrize(("window", "kind"), [(None, "full_attention"), (8, "sliding_attention")])
def test_a_window_without_a_list_of_layer_types_holds_for_all_layers(window, kind):
    spec = TargetSpec.from_config(tiny_config("mistral", sliding_window=window))
    assert spec.sliding_window == window
    assert set(spec.layer_types) == {kind}


def test_a_window_that_no_layer_uses_is_none():
    assert TargetSpec.from_config(tiny_config("gemma2", layer_types=["full_attention"] * 4)).sliding_window is None
    assert TargetSpec.from_config(tiny_config("gemma2")).sliding_window == 8


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (1, (0,)),
        (2, (0, 1)),
        (3, (0, 1, 2)),
        (4, (1, 2, 3)),
        (5, (2, 3, 4)),
        (7, (2, 3, 4)),
        (30, (2, 15, 27)),
        (36, (2, 18, 33)),
    ],
)
def test_default_taps(layers, taps):
    spec = TargetSpec.from_config(tiny_config("llama", num_hidden_layers=layers))
    assert spec.default_taps() == taps


def test_from_folder_reads_dtype_and_architecture(tmp_path):
    spec = TargetSpec.from_folder(tiny_target("llama", tmp_path, dtype=torch.bfloat16))
    assert spec.dtype == torch.bfloat16
    assert spec.architectures == ("LlamaForCausalLM",)


def test_a_folder_without_configuration_is_named(tmp_path):
    with pytest.raises(InputError, match=r"config\.json does not exist"):
        TargetSpec.from_folder(tmp_path)


def test_a_broken_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": ')
    with pytest.raises(InputError, match=r"config\.json is not valid JSON"):
        TargetSpec.from_folder(tmp_path)


def test_an_architecture_transformers_does_not_know_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(InputError, match="nonesuch") as error:
        TargetSpec.from_folder(tmp_path)
    assert "\n" not in str(error.value)


def test_a_model_that_is_no_decoder_names_the_missing_field():
    from transformers import CLIPVisionConfig

    with pytest.raises(InputError, match="lacks vocab_size"):
        TargetSpec.from_config(CLIPVisionConfig())
