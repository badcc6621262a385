"""Which rotary parameters target, drafter and server get. That they turn as vLLM does: tests/vllm/test_rotary.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config, tiny_target

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.drafters.drafter_folder import load_drafter, save_drafter
from spectrain.drafters.layers import Rotary, from_layer_config, layer_shape
from spectrain.drafters.registry import find_method
from spectrain.engines.vllm.args import engine_args
from spectrain.errors import ConfigError, InputError
from spectrain.target.model import TargetModel
from spectrain.target.resolve import resolve_target
from spectrain.target.served_rope import original_length, settled
from spectrain.target.spec import TargetSpec

ORIGINAL, MOST = 64, 512
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 3.0, 9.0, 27.0]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": ORIGINAL,
}


def phi3(folder: Path, **rope: Any) -> Path:
    parameters = {**LONGROPE, **rope}
    return tiny_target("phi3", folder, rope_parameters=parameters, original_max_position_embeddings=ORIGINAL)


def spec(family: str = "llama", **rope: Any) -> TargetSpec:
    return TargetSpec.from_config(tiny_config(family, rope_parameters={"rope_theta": 10000.0, **rope}))


# --- one set for the length served ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("served", "chosen"), [(ORIGINAL, SHORT), (ORIGINAL + 1, LONG), (None, SHORT)])
def test_one_list_stands_for_both(served: int | None, chosen: list[float]) -> None:
    found = settled({**LONGROPE, "factor": 9.0, "attention_factor": 3.0}, MOST, served)
    assert found["short_factor"] == found["long_factor"] == chosen
    assert found["attention_factor"] == pytest.approx(math.sqrt(1 + math.log(MOST / ORIGINAL) / math.log(ORIGINAL)))
    assert "factor" not in found
    for later in (1, ORIGINAL, MOST):
        assert settled(found, MOST, later) == found  # settled once and for all


def test_a_size_of_its_own_for_each_list_is_kept() -> None:
    found = settled({**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.3}, MOST, MOST)
    assert found["attention_factor"] == found["short_mscale"] == found["long_mscale"] == 1.3


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3", "dynamic"])
def test_others_are_left_as_they_are(kind: str) -> None:
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    assert settled(parameters, MOST, MOST) == parameters


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"rope_parameters": LONGROPE}, ORIGINAL),
        ({"rope_scaling": {"type": "su", "long_factor": LONG}, "original_max_position_embeddings": 32}, 32),
        ({"rope_scaling": {"type": "longrope"}, "max_position_embeddings": 99}, 99),
        ({"rope_parameters": {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}}, ORIGINAL),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, None),
        ({"rope_scaling": None}, None),
        ({"rope_parameters": "broken"}, None),
    ],
)
def test_configurations_of_any_release_say_where_the_long_factors_begin(config: dict[str, Any], length: int) -> None:
    assert original_length(config) == length


def test_batches_of_mixed_lengths_do_not_change_answers(tmp_path: Path) -> None:
    """The states of a short document beside one that is longer than the original length, and alone."""
    config = TargetConfig(path=str(phi3(tmp_path)), max_length=MOST)
    target = TargetModel.load(resolve_target(config), config)
    ids_BS = torch.randint(3, 300, (2, 80), generator=torch.Generator().manual_seed(0))
    positions_BS = torch.arange(80).expand(2, -1)
    together = target.run(ids_BS, positions_BS).last_hidden_BSH[0, :20]
    alone = target.run(ids_BS[:1, :20], positions_BS[:1, :20]).last_hidden_BSH[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    short = TargetConfig(path=config.path, max_length=ORIGINAL)
    other = TargetModel.load(resolve_target(short), short).run(ids_BS[:1, :20], positions_BS[:1, :20])
    assert not torch.allclose(alone, other.last_hidden_BSH[0], atol=1e-2)  # the lengths make a difference here


# --- what a drafter gets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_length", "chosen"), [(ORIGINAL, SHORT), (100, LONG)])
def test_an_eagle3_drafter_turns_as_its_target_is_served(max_length: int, chosen: list[float], tmp_path: Path) -> None:
    found = TargetSpec.from_folder(phi3(tmp_path)).served_at(max_length)
    shape = layer_shape(DrafterConfig(), found, "llama")
    assert shape.rope_parameters["short_factor"] == shape.rope_parameters["long_factor"] == chosen
    expected_d = 1 / (torch.tensor(chosen) * 10000.0 ** (torch.arange(0, 8, 2) / 8))
    torch.testing.assert_close(Rotary(shape).inv_freq, expected_d)
    assert found.required_server_length(max_length) == max(max_length, ORIGINAL)


PARTIAL = {"partial_rotary_factor": 0.75, "short_factor": SHORT[:3], "long_factor": LONG[:3]}


@pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark"])
@pytest.mark.parametrize(
    ("rope", "drafter"),
    [
        ({**LONGROPE, **PARTIAL}, {}),
        (LONGROPE, {"head_dim": 16}),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, {}),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.25}, {}),
        ({"rope_type": "default", "mrope_section": [2, 1, 1]}, {"head_dim": 16}),
    ],
)
def test_heads_that_cannot_turn_as_the_targets_turn_plainly(
    rope: dict[str, Any], drafter: dict[str, Any], method: str
) -> None:
    config = tiny_config("llama")  # its own validation asks for lists that fit
    config.rope_parameters = {"rope_theta": 10000.0, **rope}
    shape = find_method(method).shape(DrafterConfig(method, **drafter), TargetSpec.from_config(config))
    assert shape.layer.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_block_drafters_turn_plainly_where_vllm_has_no_longrope_for_them(method: str, tmp_path: Path) -> None:
    found = TargetSpec.from_folder(phi3(tmp_path)).served_at(ORIGINAL)
    assert find_method(method).shape(DrafterConfig(method), found).layer.rope_kind == "default"


@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_scaled_kinds_fit_heads_of_any_size(kind: str, head_dim: int) -> None:
    more = {"original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    found = spec(rope_type=kind, factor=4, **(more if kind in ("yarn", "llama3") else {}))
    rope = layer_shape(DrafterConfig(head_dim=head_dim), found, "llama").rope_parameters
    assert rope["rope_type"] == kind
    assert isinstance(rope["factor"], float)  # vLLM takes a whole number for a list


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": None}, {"rope_type": "default", "rope_theta": -1.0}])
def test_parameters_that_give_no_frequencies_are_refused_in_checks(rope: dict[str, Any]) -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_theta": 10000.0, **rope}
    with pytest.raises((ConfigError, InputError), match="rope"):
        layer_shape(DrafterConfig(), TargetSpec.from_config(config), "llama")


def test_a_foreign_drafter_turns_as_the_server_will(tmp_path: Path) -> None:
    """Folders of others have both lists."""
    method, target = find_method("eagle3"), TargetSpec.from_folder(phi3(tmp_path / "target"))
    from spectrain.data.vocab import full_vocab

    drafter = method.build(method.shape(DrafterConfig(), target), full_vocab(target.vocab_size), DrafterConfig())
    drafter.reset(torch.Generator().manual_seed(0))
    folder = tmp_path / "drafter"
    save_drafter(drafter, folder, target="t", target_architectures=("A",), num_speculative_tokens=3)
    assert (
        json.loads((folder / "config.json").read_text())["transformer_layer_config"]["rope_parameters"]["long_factor"]
        == LONG
    )  # as the target's, which was not asked for a length
    for served, factors in ((ORIGINAL, SHORT), (ORIGINAL + 1, LONG), (None, SHORT)):
        rope = load_drafter(folder, served_length=served).shape.layer.rope_parameters
        assert rope["short_factor"] == rope["long_factor"] == factors


@pytest.mark.parametrize("field", ["partial_rotary_factor", "rope_dim"])
def test_a_foreign_drafter_whose_heads_turn_in_part_is_refused(field: str) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, field: 0.5},
    }
    with pytest.raises(ValueError, match=field):
        from_layer_config(config)


# --- what vLLM is told ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_length", "told"), [(ORIGINAL - 20, ORIGINAL - 16), (ORIGINAL, ORIGINAL), (ORIGINAL + 1, ORIGINAL + 5)]
)
@pytest.mark.vllm
def test_room_for_drafts_does_not_change_the_factors(max_length: int, told: int, tmp_path: Path) -> None:
    target = TargetConfig(path="t", max_length=max_length)
    args = engine_args(EngineConfig(), target, phi3(tmp_path), {"speculative_config": {"num_speculative_tokens": 3}})
    assert args["max_model_len"] == told


@pytest.mark.parametrize(("max_length", "given"), [(ORIGINAL, 100), (100, ORIGINAL)])
@pytest.mark.vllm
def test_a_length_with_other_factors_is_refused(max_length: int, given: int, tmp_path: Path) -> None:
    config = EngineConfig(args={"max_model_len": given})
    with pytest.raises(ConfigError, match=r"engine\.args\.max_model_len"):
        engine_args(config, TargetConfig(path="t", max_length=max_length), phi3(tmp_path))
