"""Quantised targets compute what the same weights, dequantised by hand, compute; or they are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantised_targets import FORMATS, READ, quantise, quantise_experts
from safetensors.torch import load_file, save_file
from tiny import tiny_target

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.vocab import full_vocab
from spectrain.drafters.build import build_drafter
from spectrain.errors import InputError
from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel, check_weights
from spectrain.target.quantization import full_precision, quantization_of
from spectrain.target.resolve import resolve_target
from spectrain.target.spec import TargetSpec, load_config

IDS_1S = torch.arange(3, 40)[None]
REFUSED = [name for name in FORMATS if name not in READ]


def load(folder: Path, attention: str = "sdpa") -> TargetModel:
    config = TargetConfig(path=str(folder), attn_implementation=attention)
    check_weights(folder, config)
    return TargetModel.load(resolve_target(config), config)


def states(target: TargetModel) -> torch.Tensor:
    return target.run(IDS_1S, torch.arange(IDS_1S.shape[1])[None]).last_hidden_BSH


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", READ)
@pytest.mark.vllm
def test_it_computes_what_its_dequantised_twin_computes(name: str, llama: Path, tmp_path: Path) -> None:
    source = llama if name != "mxfp8" else tiny_target("llama", tmp_path / "even", intermediate_size=64)
    folder = quantise(name, source, tmp_path / "q")
    found, twin = load(folder), load(folder / "twin")
    assert {parameter.dtype for parameter in found.model.parameters() if parameter.is_floating_point()} == {
        torch.float32
    }
    torch.testing.assert_close(states(found), states(twin), rtol=1e-5, atol=1e-5)


# compressed-tensors dequantises experts into bfloat16 before it stacks them.
@pytest.mark.parametrize(
    ("name", "rounding"), [("fp8 block", 1e-5), ("mxfp8", 1e-5), ("compressed-tensors fp8 channel", 2e-2)]
)
@pytest.mark.vllm
def test_so_does_a_mixture_of_experts(name: str, rounding: float, tmp_path: Path) -> None:
    folder = quantise(name, tiny_target("qwen3_moe", tmp_path / "moe", moe_intermediate_size=32), tmp_path / "q")
    found, twin = states(load(folder)), states(load(folder / "twin"))
    assert float((found - twin).norm() / twin.norm()) < rounding


def test_so_do_experts_in_mxfp4(tmp_path: Path) -> None:
    source = tiny_target("gpt_oss", tmp_path / "oss", intermediate_size=32)
    folder = quantise_experts(source, tmp_path / "q")
    found, twin = load(folder, "eager"), load(folder / "twin", "eager")
    torch.testing.assert_close(states(found), states(twin), rtol=1e-5, atol=1e-5)


def test_microscaling_of_uneven_rows_is_refused(llama: Path, tmp_path: Path) -> None:
    """Transformers would spread two scales over 48 inputs as 24 each, where they are 32 and 16."""
    with pytest.raises(InputError, match=r"down_proj\.weight has 48 inputs.*engine=vllm"):
        load(quantise("mxfp8", llama, tmp_path / "q"))


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name: str, llama: Path, tmp_path: Path) -> None:
    folder = quantise(name, llama, tmp_path / "q")
    config = TargetConfig(path=str(folder))
    method = FORMATS[name][1]["quant_method"]
    with pytest.raises(InputError, match=f"quantised by {method}.*engine=hf cannot read.*engine=vllm"):
        check_weights(folder, config)
    with pytest.raises(InputError, match=f"quantised by {method}"):
        TargetModel.load(resolve_target(config), config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4, "symmetric": False}}}}, "zero points"),
    ],
)
def test_so_is_what_compressed_tensors_has_besides(
    change: dict[str, object], named: str, llama: Path, tmp_path: Path
) -> None:
    folder = quantise("compressed-tensors int4", llama, tmp_path / "q")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=named):
        check_weights(folder, TargetConfig(path=str(folder)))


def test_modelopt_beside_a_config_that_does_not_know_it_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = quantise("modelopt", llama, tmp_path / "q")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(InputError, match=r"quantised by modelopt \(FP8\)"):
        check_weights(folder, TargetConfig(path=str(folder)))


# --- single matrices ------------------------------------------------------------------------------------------

SCALED = [
    name
    for name in FORMATS
    if name.startswith(("fp8", "mxfp8", "compressed-tensors fp8", "compressed-tensors int8", "modelopt"))
]


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_is_dequantised_by_its_scales_or_not_given(name: str, llama: Path, tmp_path: Path) -> None:
    folder = quantise(name, llama, tmp_path / "q")
    reader, twin = CheckpointReader(folder), load_file(folder / "twin" / "model.safetensors")
    quantization = quantization_of(load_config(folder), folder)
    for weight in ("model.layers.1.mlp.down_proj.weight", "model.layers.3.self_attn.k_proj.weight"):
        found = full_precision(reader, weight, quantization) if weight in reader.names else None
        if name in SCALED:
            assert found is not None
            assert torch.equal(found, twin[weight])
        else:
            assert found is None
    embedding = "model.embed_tokens.weight"
    assert torch.equal(full_precision(reader, embedding, quantization), twin[embedding])


def test_blocks_are_those_of_the_configuration(llama: Path, tmp_path: Path) -> None:
    """48 rows in two blocks are 32 and 16, or 24 and 24: shapes do not tell."""
    folder = quantise("fp8 block", llama, tmp_path / "q")
    reader, weight = CheckpointReader(folder), "model.layers.1.mlp.gate_proj.weight"
    quantization = quantization_of(load_config(folder), folder)
    quantization.fields["weight_block_size"][:] = [48, 32]
    assert full_precision(reader, weight, quantization) is None


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
@pytest.mark.parametrize("name", ["fp8 block", "compressed-tensors int8", "modelopt"])
def test_drafters_begin_with_dequantised_weights(name: str, method: str, llama: Path, tmp_path: Path) -> None:
    folder = quantise(name, llama, tmp_path / "q")
    found, twin = built(method, "target", folder), built(method, "target", folder / "twin")
    assert all(torch.equal(tensor, twin[key]) for key, tensor in found.items())
    assert not torch.equal(found[MATRIX], built(method, "random", folder)[MATRIX])


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
@pytest.mark.parametrize("name", ["gptq", "bitsandbytes int8", "bitsandbytes nf4"])
def test_or_the_scheme_is_named(name: str, method: str, llama: Path, tmp_path: Path) -> None:
    folder = quantise(name, llama, tmp_path / "q")
    with pytest.raises(InputError, match=rf"quantised by {name.split()[0]}.*drafter\.init=closed_form"):
        built(method, "target", folder)
    plain, random = built(method, "closed_form", folder), built(method, "random", folder)
    assert torch.equal(plain[MATRIX], random[MATRIX]) and not torch.equal(plain["norm.weight"], random["norm.weight"])


MATRIX = "layers.0.mlp.down_proj.weight"


def built(method: str, init: str, folder: Path) -> dict[str, torch.Tensor]:
    spec, head = TargetSpec.from_folder(folder), TargetHead.from_checkpoint(folder)
    config = DrafterConfig(method, init=init, layer_type=None)
    return build_drafter(config, spec, full_vocab(spec.vocab_size), head, folder).body.state_dict()


@pytest.mark.parametrize("name", ["compressed-tensors fp8 channel", "mxfp8", "modelopt mxfp8"])
def test_a_head_in_eight_bits_is_dequantised(name: str, llama: Path, tmp_path: Path) -> None:
    folder = quantise(name, llama, tmp_path / "q")
    encode, tensors = FORMATS[name][0], load_file(folder / "model.safetensors")
    parts, values = encode(tensors["lm_head.weight"])
    save_file(
        tensors | {f"lm_head.{name}": part.contiguous() for name, part in parts.items()}, folder / "model.safetensors"
    )
    assert torch.equal(TargetHead.from_checkpoint(folder).lm_head_weight, values)
