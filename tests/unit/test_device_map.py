"""A target whose layers lie on several devices computes what it computes on one, to the bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_target

from spectrain import cli
from spectrain.config.target_schema import TargetConfig
from spectrain.decoding.loop import DecodingSettings, Prompt, speculative_generate
from spectrain.errors import ConfigError
from spectrain.target.cpu_kernels import cpu_attention, takes_ragged_rows
from spectrain.target.device_map import note_offloaded
from spectrain.target.kv_cache import open_cache
from spectrain.target.model import TargetModel, check_weights
from spectrain.target.resolve import resolve_target

IDS_1S = torch.arange(3, 40)[None]
POSITIONS_1S = torch.arange(IDS_1S.shape[1])[None]


def load(folder: Path, device_map: Any = None) -> TargetModel:
    config = TargetConfig(path=str(folder), device_map=device_map)
    check_weights(folder, config)
    return TargetModel.load(resolve_target(config), config)


def spread(target: TargetModel) -> dict[str, str]:
    """Every other layer, the embeddings and the final norm on the disk, the rest in memory."""
    names = {module: name for name, module in target.model.named_modules()}
    layers, decoder = names[target._layers], names[target._decoder]
    on_disk = {names[target.model.get_input_embeddings()], names[target._final_norm]}
    places = {f"{layers}.{number}": "disk" if number % 2 else "cpu" for number in range(len(target._layers))}

    def place(module: torch.nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}".removeprefix(".")
            if path == layers:
                continue
            if f"{decoder}.".startswith(f"{path}."):
                place(child, path)
            else:
                places[path] = "disk" if path in on_disk else "cpu"

    place(target.model, "")
    return places


# Plain, experts (stacked as they are loaded), recurrent layers, layers that hand out keys and values, latent attention.
@pytest.mark.parametrize(
    ("family", "kv"), [("llama", ()), ("qwen3_moe", ()), ("qwen3_5", ()), ("gemma4", "all"), ("deepseek_v3", ())]
)
def test_taps_states_and_logits_are_those_of_one_device(family: str, kv: Any, tmp_path: Path) -> None:
    folder = tiny_target(family, tmp_path / "target")
    plain = load(folder)
    several = load(folder, spread(plain))
    assert {parameter.device.type for parameter in several.model.parameters()} == {"cpu", "meta"}
    layers = tuple(plain.spec.kv_sources().values()) if kv else ()
    taps = tuple(range(plain.spec.num_layers + 1))
    expected, found = (one.run(IDS_1S, POSITIONS_1S, tap_ids=taps, kv_layers=layers) for one in (plain, several))
    assert torch.equal(found.last_hidden_BSH, expected.last_hidden_BSH)
    assert torch.equal(found.taps_BSAH, expected.taps_BSAH)
    for layer in layers:
        assert all(torch.equal(*pair) for pair in zip(found.target_kv[layer], expected.target_kv[layer], strict=True))
    assert torch.equal(several.logits(found.last_hidden_BSH), plain.logits(expected.last_hidden_BSH))
    assert several.device == plain.device == torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_so_are_answers(family: str, tmp_path: Path) -> None:
    folder = tiny_target(family, tmp_path / "target")
    plain = load(folder)
    prompts = [Prompt(list(range(5, 5 + length)), 12) for length in (3, 9, 4)]
    found, expected = (
        [one.ids for one in speculative_generate(target, None, prompts, DecodingSettings()).results]
        for target in (load(folder, spread(plain)), plain)
    )
    assert found == expected and len(found[0]) == 12


def test_rows_of_different_lengths_too(tmp_path: Path) -> None:
    folder = tiny_target("qwen3", tmp_path / "target")
    plain = load(folder)
    outputs = []
    for target in (plain, load(folder, spread(plain))):
        cache = open_cache(target, 2)
        with cpu_attention(target.model):
            assert takes_ragged_rows(target.model)  # no padding enters
            outputs.append(cache.forward(torch.arange(5, 25).view(2, 10), [10, 4], (1, 2)))
    assert torch.equal(outputs[0].last_hidden_BSH[1, :4], outputs[1].last_hidden_BSH[1, :4])
    assert torch.equal(outputs[0].taps_BSAH[1, :4], outputs[1].taps_BSAH[1, :4])


@pytest.mark.parametrize("layout", ["auto", "balanced_low_0", "sequential"])
def test_accelerate_lays_it_out(layout: str, tmp_path: Path) -> None:
    folder = tiny_target("llama", tmp_path / "target")
    expected, found = (one.run(IDS_1S, POSITIONS_1S) for one in (load(folder), load(folder, layout)))
    assert torch.equal(found.last_hidden_BSH, expected.last_hidden_BSH)


@pytest.mark.parametrize(
    ("places", "asked", "said"),
    [
        ((0, 1), "auto", ""),
        ((0, "cpu", "cpu"), "auto", "2 of 3 parts"),
        (("cpu", "disk"), "balanced", "2 of 2 parts"),
        (("cpu", "cpu"), "auto", ""),
        ((0, "cpu"), {"a": 0, "b": "cpu"}, ""),
    ],
)
def test_what_does_not_fit_the_devices_is_said(places: Any, asked: Any, said: str, capsys: Any) -> None:
    note_offloaded(SimpleNamespace(hf_device_map=dict(enumerate(places))), asked)
    told = capsys.readouterr()
    assert (said in told.out + told.err) if said else not told.out + told.err


def test_a_map_names_what_is_there(tmp_path: Path) -> None:
    folder = tiny_target("llama", tmp_path / "target")
    places = spread(load(folder))
    for change, named in (
        ({"model.layers.2": "cuda:7"}, "model.layers.2 is to lie on cuda:7"),
        ({"model.layers.77": "cpu"}, "no model.layers.77"),
    ):
        with pytest.raises(ConfigError, match=named):
            check_weights(folder, TargetConfig(path=str(folder), device_map={**places, **change}))
    del places["model.layers.1"]
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.\S+ not where it lies"):
        check_weights(folder, TargetConfig(path=str(folder), device_map=places))


@pytest.mark.parametrize("value", ["everywhere", {}, {"model": "tpu"}, {"": "cpu"}, {"model": True}, 3])
def test_what_is_no_map_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"target\.device_map"):
        TargetConfig(device_map=value)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_target("llama", tmp_path / "target")
    line = [
        "fit",
        "data=support",
        f"target.path={folder}",
        "target.max_length=512",
        "sampling.max_new_tokens=32",
        f"run.dir={tmp_path / 'run'}",
    ]
    assert cli.main([*line, "target.device_map={model: cuda:0, lm_head: 0}"]) == 2
    assert "target.device_map: model is to lie on cuda:0" in capsys.readouterr().err
    ranks = ["target.device_map=balanced", "states.source=inprocess", "trainer.devices=2"]
    assert cli.main([*line, *ranks]) == 2
    assert "states.source=inprocess" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
