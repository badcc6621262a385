"""The folder of a tuned head: an overlay of its target, whatever the target's shards and quantisation; and what is
refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_tools import MtpTarget, mtp_target
from quantised_targets import quantise
from safetensors.torch import load_file, save_file
from tiny import tiny_target
from transformers import AutoModelForCausalLM

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.data.vocab import full_vocab
from spectrain.drafters.autoregressive.mtp import METHOD, Mtp
from spectrain.drafters.build import build_drafter, continue_drafter
from spectrain.drafters.drafter_folder import load_drafter, save_drafter
from spectrain.drafters.overlay import TUNED_HEAD, check_links, restore_links, stitch
from spectrain.drafters.serving_config import read_serving_config
from spectrain.errors import ConfigError, InputError
from spectrain.target.checkpoint import INDEX_FILE, CheckpointReader
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> MtpTarget:
    return MtpTarget("mimo", mtp_target("mimo", tmp_path_factory.mktemp("target") / "mimo"), torch.float32)


def tuned(target: MtpTarget) -> Mtp:
    drafter = target.drafter()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(1.25)
    return drafter


def saved(drafter: Mtp, folder: Path, target: MtpTarget) -> Path:
    save_drafter(drafter, folder, target="t", target_architectures=target.spec.architectures, num_speculative_tokens=3)
    return folder


def as_vllm_reads(folder: Path) -> dict[str, torch.Tensor]:
    """Whole files that the index names, in the natural order of their names; what comes later wins."""
    files = sorted(set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values()))
    found: dict[str, torch.Tensor] = {}
    for file in files:  # no numbers of different lengths here, so this is the natural order
        found |= load_file(folder / file)
    return found


def resharded(folder: Path, into: Path, groups: dict[str, Any]) -> Path:
    """A copy of a target in several files: ``groups`` says which names go where."""
    shutil.copytree(folder, into)
    tensors, weight_map = load_file(into / "model.safetensors"), {}
    (into / "model.safetensors").unlink()
    for file, belongs in groups.items():
        part = {name: tensor for name, tensor in tensors.items() if belongs(name)}
        save_file(part, into / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (into / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return into


LAYOUTS: dict[str, dict[str, Any]] = {
    "one file": {},
    "a file of the head alone": {
        "model-00001-of-00002.safetensors": lambda name: "mtp" not in name,
        "model-00002-of-00002.safetensors": lambda name: "mtp" in name,
    },
    "the head among others, in a file that sorts late": {
        "model.safetensors-00001-of-00002.safetensors": lambda name: "embed" in name,
        "weights.safetensors": lambda name: "embed" not in name,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tuned_head_wins_and_all_else_is_the_targets(mimo: MtpTarget, tmp_path: Path, layout: str) -> None:
    folder = resharded(mimo.folder, tmp_path / "t", LAYOUTS[layout]) if LAYOUTS[layout] else mimo.folder
    target = MtpTarget("mimo", folder, torch.float32)
    drafter = tuned(target)
    made = saved(drafter, tmp_path / "drafter", target)
    own, expected = load_file(mimo.folder / "model.safetensors"), METHOD.stored_tensors(drafter)
    for found in (as_vllm_reads(made), {name: CheckpointReader(made).get(name) for name in own}):
        assert set(found) == set(own)
        for name, tensor in found.items():
            assert torch.equal(tensor, expected.get(name, own[name])), name
            assert torch.equal(tensor, own[name]) == (name not in expected)
    links = [path for path in made.iterdir() if path.is_symlink()]
    assert {path.resolve().parent for path in links} == {folder.resolve()}
    assert {"tokenizer.json", "generation_config.json"} <= {path.name for path in links}
    assert not [path for path in made.iterdir() if path.suffix == ".safetensors" and not path.is_symlink()][1:]
    # transformers, which knows no heads, loads the target itself.
    again = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in mimo.model.model.state_dict().items())


def test_stitched_it_needs_its_target_no_more(mimo: MtpTarget, tmp_path: Path) -> None:
    drafter = tuned(mimo)
    made = saved(drafter, tmp_path / "drafter", mimo)
    expected = {name: CheckpointReader(made).get(name).clone() for name in CheckpointReader(made).names}
    stitch(made)
    assert not [path for path in made.iterdir() if path.is_symlink()]
    moved = Path(shutil.move(made, tmp_path / "elsewhere"))
    assert all(torch.equal(tensor, CheckpointReader(moved).get(name)) for name, tensor in expected.items())
    files = [load_file(path) for path in moved.glob("*.safetensors")]
    assert sum(map(len, files)) == len(expected)  # nothing is there twice
    check_links(moved)
    load_drafter(moved)


def test_a_target_that_has_changed_or_gone_is_named(mimo: MtpTarget, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(mimo.folder, folder)
    target = MtpTarget("mimo", folder, torch.float32)
    made = saved(target.drafter(), tmp_path / "drafter", target)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    check_links(made)
    with pytest.raises(InputError, match=r"model-00001-of-00001\.safetensors.*not the one that the head was tuned for"):
        check_links(made, digests=True)
    weights.write_bytes(content[:-8])
    with pytest.raises(InputError, match="not the one that the head was tuned for"):
        check_links(made)
    weights.unlink()
    with pytest.raises(InputError, match="is not there"):
        check_links(made)


def test_links_are_found_again_where_the_target_is_now(mimo: MtpTarget, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(mimo.folder, folder)
    target = MtpTarget("mimo", folder, torch.float32)
    made = saved(target.drafter(), tmp_path / "drafter", target)
    moved = Path(shutil.move(folder, tmp_path / "elsewhere" / "target"))
    with pytest.raises(InputError, match=r"is not there.*target\.path"):
        check_links(made)
    restore_links(made, moved)
    check_links(made, digests=True)
    for path in list(made.iterdir()):  # as it comes from the Hub: without what it links
        if path.is_symlink():
            path.unlink()
    restore_links(made, moved)
    check_links(made, digests=True)
    assert {path.resolve().parent for path in made.iterdir() if path.is_symlink()} == {moved.resolve()}


def test_tuning_goes_on_from_a_tuned_head(mimo: MtpTarget, tmp_path: Path) -> None:
    drafter = tuned(mimo)
    first = saved(drafter, tmp_path / "first", mimo)
    again = continue_drafter(DrafterConfig("mtp", path=str(first)), mimo.head)
    assert isinstance(again, Mtp)
    second = saved(again, tmp_path / "second", mimo)
    assert torch.equal(
        *[load_file(folder / TUNED_HEAD)["model.mtp_layers.0.input_proj.weight"] for folder in (first, second)]
    )
    reader = CheckpointReader(second)
    assert reader.names == CheckpointReader(mimo.folder).names
    linked = [path for path in second.iterdir() if path.is_symlink()]
    assert {path.resolve().parent for path in linked} == {mimo.folder.resolve()}  # not the first overlay's links


def test_what_a_server_is_told(mimo: MtpTarget, tmp_path: Path) -> None:
    made = saved(tuned(mimo), tmp_path / "drafter", mimo)
    serving = read_serving_config(str(made))
    speculation = {"method": "mtp", "num_speculative_tokens": 3}
    assert serving.engine_args() == {"model": str(made), "speculative_config": speculation}
    assert (serving.method, serving.target, serving.most_tokens, serving.last_tap) == ("mtp", "t", None, None)
    config = json.loads((made / "config.json").read_text())
    own = json.loads((mimo.folder / "config.json").read_text())
    assert {name: value for name, value in config.items() if name != "spectrain"} == own


@pytest.mark.parametrize("stacked", [True, False])
def test_experts_are_written_in_the_targets_own_layout(tmp_path: Path, stacked: bool) -> None:
    folder = mtp_target("glm4_moe", tmp_path / "t")
    if stacked:
        stack_experts(folder / "model.safetensors")
    target = MtpTarget("glm4_moe", folder, torch.float32)
    made = saved(target.drafter(), tmp_path / "drafter", target)
    own, found = load_file(folder / "model.safetensors"), load_file(made / TUNED_HEAD)
    experts = [name for name in found if ".experts." in name]
    assert len(experts) == (2 if stacked else 3 * 4)
    assert all(torch.equal(tensor, own[name]) for name, tensor in found.items())
    assert set(found) == {name for name in own if name.startswith("model.layers.4.")}


def stack_experts(file: Path) -> None:
    """The head's experts as two tensors, gate and up in one, as transformers holds them and some checkpoints store
    them.
    """
    tensors, start = load_file(file), "model.layers.4.mlp.experts."
    names = sorted({name.split(".")[5] for name in tensors if name.startswith(start)}, key=int)
    parts = {
        part: [tensors.pop(f"{start}{name}.{part}_proj.weight") for name in names] for part in ("gate", "up", "down")
    }
    both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
    tensors |= {f"{start}gate_up_proj": torch.stack(both), f"{start}down_proj": torch.stack(parts["down"])}
    save_file(tensors, file, metadata={"format": "pt"})


# --- quantised targets ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_target("qwen3_5_text", tmp_path_factory.mktemp("target") / "qwen")


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("fp8 block", "modules_to_not_convert"),
        ("compressed-tensors fp8 channel", "ignore"),
        ("compressed-tensors int8", "ignore"),
    ],
)
def test_a_quantised_head_is_tuned_in_full_and_written_in_bf16(
    qwen: Path, tmp_path: Path, name: str, listed: str
) -> None:
    folder = quantise(name, qwen, tmp_path / "q")
    target, twin = MtpTarget("qwen3_5_text", folder, torch.float32), MtpTarget("qwen3_5_text", folder / "twin")
    drafter = target.drafter()
    expected = MtpTarget("qwen3_5_text", twin.folder, torch.float32).drafter().body.state_dict()
    for key, tensor in drafter.body.state_dict().items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=1e-7, msg=key)
    made = saved(drafter, tmp_path / "drafter", target)
    found = as_vllm_reads(made)
    head = {key: tensor for key, tensor in found.items() if key.startswith("mtp.")}
    assert {tensor.dtype for tensor in head.values()} == {torch.bfloat16}
    assert not [key for key in head if "scale" in key]
    own = load_file(folder / "model.safetensors")
    assert all(torch.equal(found[key], tensor) for key, tensor in own.items() if not key.startswith("mtp."))
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    before = json.loads((folder / "config.json").read_text())["quantization_config"]
    matrices = {key.removesuffix(".weight") for key, tensor in head.items() if tensor.ndim == 2}
    assert set(config[listed]) == {*before[listed], *matrices}
    assert "mtp.layers.0.self_attn.q_proj" in config[listed]


@pytest.mark.parametrize("name", ["gptq", "bitsandbytes nf4", "bitsandbytes int8"])
def test_a_scheme_that_is_not_read_is_named(qwen: Path, tmp_path: Path, name: str) -> None:
    folder = quantise(name, qwen, tmp_path / "q")
    with pytest.raises(InputError, match=rf"mtp\.layers\.0\..*is quantised by {name.split()[0]}.*16 bits"):
        MtpTarget("qwen3_5_text", folder, torch.float32).drafter()


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("fp8 block", "modules_to_not_convert"),
        ("mxfp8", "ignored_layers"),
        ("modelopt", "ignore"),
        ("compressed-tensors nvfp4", "ignore"),
        ("awq", "modules_to_not_convert"),
    ],
)
def test_a_head_of_16_bits_is_listed_under_the_name_of_its_scheme(
    qwen: Path, tmp_path: Path, name: str, listed: str
) -> None:
    """vLLM takes every module for quantised that is not listed, whatever is stored."""
    folder = quantise(name, qwen, tmp_path / "q")
    tensors = {key: one for key, one in load_file(folder / "model.safetensors").items() if "mtp." not in key}
    tensors |= {key: one for key, one in load_file(qwen / "model.safetensors").items() if "mtp." in key}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target = MtpTarget("qwen3_5_text", folder, torch.float32)
    made = saved(target.drafter(), tmp_path / "drafter", target)
    ours, own = (json.loads((one / "config.json").read_text())["quantization_config"] for one in (made, folder))
    assert {"mtp.fc", "mtp.layers.0.self_attn.q_proj", *own.pop(listed, ())} <= {*ours.pop(listed)}
    assert ours == own


def test_the_modules_of_a_quantised_mimo_head_are_listed_as_vllm_calls_them(mimo: MtpTarget, tmp_path: Path) -> None:
    tensors = load_file(mimo.folder / "model.safetensors")
    folder = tmp_path / "q"
    shutil.copytree(mimo.folder, folder)
    name = "model.mtp_layers.0.self_attn.q_proj.weight"
    scale = tensors[name].abs().max() / 448
    tensors |= {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    target = MtpTarget("mimo", folder, torch.float32)
    made = saved(target.drafter(), tmp_path / "drafter", target)
    listed = json.loads((made / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert f"model.layers.{target.spec.num_layers}.self_attn.q_proj" in listed and not [n for n in listed if "mtp" in n]
    assert set(load_file(made / TUNED_HEAD)) == {key for key in tensors if "mtp_layers" in key and "scale" not in key}


# --- what is refused -----------------------------------------------------------------------------------------------


def build(folder: Path, **options: Any) -> Any:
    spec = TargetSpec.from_folder(folder)
    head = TargetHead.from_checkpoint(folder)
    return build_drafter(DrafterConfig("mtp", **options), spec, full_vocab(spec.vocab_size), head, folder)


def test_a_target_without_a_head_is_told_how_to_begin(tmp_path: Path) -> None:
    folder = tiny_target("qwen3_5_text", tmp_path / "t")
    with pytest.raises(InputError, match=r"no multi-token-prediction head.*drafter\.init=last_layer"):
        build(folder)
    target = MtpTarget("qwen3_5_text", folder, torch.float32)
    made = saved(build(folder, init="last_layer"), tmp_path / "drafter", target)
    assert json.loads((made / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    assert not METHOD.comes_with(load_drafter(made).shape, folder)


def test_a_family_without_heads_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model type 'llama'.*glm4_moe.*drafter=eagle3"):
        build(tiny_target("llama", tmp_path / "t"))


def test_a_head_with_an_lm_head_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = mtp_target("glm4_moe", tmp_path / "t")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.4.shared_head.head.weight"
    save_file({**tensors, name: tensors["lm_head.weight"].clone()}, folder / "model.safetensors", {"format": "pt"})
    build(folder)
    save_file({**tensors, name: tensors["lm_head.weight"] + 1}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"shared_head\.head\.weight is not the target's lm_head"):
        build(folder)


@pytest.mark.parametrize(
    ("options", "key"),
    [({"num_layers": 2}, "num_layers"), ({"draft_vocab_size": 100}, "draft_vocab_size"), ({"init": "random"}, "init")],
)
def test_what_cannot_be_chosen_is_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"drafter\.{key}"):
        METHOD.check(DrafterConfig("mtp", **options))
