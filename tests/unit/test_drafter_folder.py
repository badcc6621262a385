"""The drafter's folder: what is read is bit for bit what was saved, whatever kills the writer, and what does not fit is
named.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_tools import (
    HIDDEN,
    VARIANTS,
    VOCAB,
    Options,
    packed,
    random_document,
    random_drafter,
    save,
    students,
    tensors_of,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain import files
from spectrain.decoding.proposers import Observation
from spectrain.decoding.sampling import GREEDY, SamplingParams
from spectrain.drafters.autoregressive.eagle3 import Eagle3
from spectrain.drafters.drafter_folder import check_vocab, load_drafter, weights_digest
from spectrain.drafters.layers import LayerShape, Rotary
from spectrain.errors import InputError
from spectrain.files import recover_folder, replace_folder


def reload(drafter: Eagle3, folder: Path) -> Eagle3:
    found = load_drafter(save(drafter, folder))
    assert isinstance(found, Eagle3)
    found.attach(drafter.head)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: options.name)
def test_saved_and_loaded_is_the_same_bits(tmp_path: Path, options: Options, dtype: torch.dtype) -> None:
    drafter = random_drafter(options, dtype=dtype)
    found = reload(drafter, tmp_path / "drafter")
    assert (
        found.shape == drafter.shape and found.training_steps == drafter.training_steps and found.taps == options.taps
    )
    assert torch.equal(found.vocab.ids_D, drafter.vocab.ids_D) and found.vocab.target_size == VOCAB
    ours, theirs = tensors_of(found), tensors_of(drafter)
    assert set(ours) == set(theirs)
    assert all(ours[name].dtype == dtype and torch.equal(ours[name], theirs[name]) for name in ours)

    generator = torch.Generator().manual_seed(0)
    ids, taps = (
        torch.randint(0, VOCAB, (2, 7), generator=generator),
        torch.randn(2, 7, len(options.taps), HIDDEN, generator=generator),
    )
    distributions = []
    for one in (drafter, found):
        cache = one.new_cache(2)
        one.observe(cache, Observation(ids, torch.tensor([7, 5]), taps))
        proposal = one.propose(
            cache,
            torch.tensor([1, 2]),
            3,
            SamplingParams(temperature=1.0),
            [torch.Generator().manual_seed(b) for b in range(2)],
        )
        distributions.append((proposal.log_probs, proposal.ids))
    assert torch.equal(distributions[0][0], distributions[1][0]) and torch.equal(
        distributions[0][1], distributions[1][1]
    )


def test_training_goes_on_from_a_loaded_folder_as_from_the_drafter_itself(tmp_path: Path) -> None:
    drafter = random_drafter(Options(reduced=True), dtype=torch.float32)
    batch = packed([random_document("000111111", 3, 0)])
    one, two = students(drafter, batch), students(reload(drafter, tmp_path / "drafter"), batch)
    assert all(torch.equal(hidden, two[key]) for key, hidden in one.items())
    found = reload(drafter, tmp_path / "drafter")
    found.train_losses(batch).loss.backward()
    assert all(parameter.grad is not None for parameter in found.parameters())


def test_the_configuration_writes_out_what_a_server_needs(tmp_path: Path) -> None:
    """Read with the fields that vLLM reads (speculators layout); no switch is left to a default."""
    options = Options(layer_type="qwen3", taps=(1, 4), reduced=True, norm_before_residual=True, num_layers=2)
    folder = save(random_drafter(options), tmp_path / "drafter", coverage=0.5)
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/target",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4]
    assert config["draft_vocab_size"] == 9
    assert [config[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")] == [
        True,
        False,
        False,
        False,
    ]
    layer = config["transformer_layer_config"]
    expected = {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "head_dim": 6,
    }
    assert expected.items() <= layer.items()
    assert layer["num_aux_hidden_states"] == 2
    assert layer["max_position_embeddings"] == 128
    assert layer["rope_parameters"]["rope_theta"] == layer["rope_theta"] == 100.0
    assert config["spectrain"]["coverage"] == 0.5

    tensors = load_file(folder / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert (tensors["d2t"] + torch.arange(9)).tolist() == [0, 2, 3, 7, 8, 11, 15, 16, 22]
    assert tensors["lm_head.weight"].shape == (9, HIDDEN)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (4 * 6, 2 * HIDDEN)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (4 * 6, HIDDEN)
    assert tensors["layers.0.self_attn.q_norm.weight"].shape == (6,)
    assert not any(name.startswith(("model.", "body.", "embed")) for name in tensors)


def test_a_full_vocabulary_shares_the_targets_head(tmp_path: Path) -> None:
    tensors = load_file(save(random_drafter(Options()), tmp_path / "drafter") / "model.safetensors")
    assert "lm_head.weight" not in tensors and "d2t" not in tensors


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_phases_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    shape = LayerShape("llama", 32, 8, 2, 1, 16, 1e-5, rope, 4096)
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, head_dim=16, max_position_embeddings=4096, rope_parameters=rope
    )
    positions = torch.tensor([[0, 1, 63, 64, 1000, 4095]])
    cos, sin = Rotary(shape).cos_sin(positions)
    reference_cos, reference_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    torch.testing.assert_close(cos, reference_cos, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin, reference_sin, rtol=1e-5, atol=1e-5)


def test_heads_need_not_divide_the_width_to_turn_by_scaled_phases() -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    whole = Rotary(LayerShape("qwen3", 64, 8, 4, 2, 16, 1e-5, rope, 128))
    assert torch.equal(Rotary(LayerShape("qwen3", 64, 8, 6, 3, 16, 1e-5, rope, 128)).inv_freq, whole.inv_freq)


def test_serving_in_bfloat16_turns_by_the_same_phases(tmp_path: Path) -> None:
    drafter = random_drafter(Options(), dtype=torch.float32)
    positions = torch.arange(0, 4000, 37)
    before = drafter.rotary.cos_sin(positions)
    frequencies = drafter.rotary.inv_freq.clone()
    for changed in (
        drafter.to(torch.bfloat16),
        drafter.half(),
        drafter.float(),
        reload(drafter.bfloat16(), tmp_path / "drafter"),
    ):
        assert changed.rotary.inv_freq.dtype == torch.float32
        assert torch.equal(changed.rotary.inv_freq, frequencies)
        assert all(torch.equal(one, two) for one, two in zip(changed.rotary.cos_sin(positions), before, strict=True))
    assert not torch.equal(frequencies.bfloat16().float(), frequencies)  # rounding would have shown


def test_rewriting_leaves_nothing_of_the_old_drafter(tmp_path: Path) -> None:
    folder = save(random_drafter(Options(reduced=True, num_layers=2)), tmp_path / "drafter")
    (folder / "leftover.txt").write_text("old")
    digest = weights_digest(folder)
    save(random_drafter(Options()), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert weights_digest(folder) != digest
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
    assert load_drafter(folder).vocab.is_full


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it and tidy up."""


@pytest.mark.parametrize("rename", [0, 1], ids=["before the old one moved", "between the two renames"])
def test_a_kill_while_replacing_leaves_a_drafter_that_loads(
    tmp_path: Path, rename: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = random_drafter(Options(), seed=1)
    folder = save(old, tmp_path / "drafter")
    digest = weights_digest(folder)
    calls = []

    def replace(source: Path, target: Path) -> None:
        if len(calls) == rename:
            raise Killed
        calls.append(target)
        Path(source).rename(target)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(Killed):
        save(random_drafter(Options(), seed=2), folder)
    monkeypatch.undo()
    load_drafter(folder)
    assert weights_digest(folder) == digest
    save(random_drafter(Options(), seed=2), folder)  # and the next write goes through
    assert weights_digest(folder) != digest
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_kill_while_filling_changes_nothing(tmp_path: Path) -> None:
    def fill(path: Path) -> None:
        (path / "half").write_text("x")
        raise Killed

    for existing in (False, True):
        folder = tmp_path / f"folder-{existing}"
        if existing:
            replace_folder(folder, lambda path: (path / "whole").write_text("y"))
        with pytest.raises(Killed):
            replace_folder(folder, fill)
        assert folder.exists() == existing
        recover_folder(folder)
        assert [path.name for path in folder.iterdir()] == ["whole"] if existing else not folder.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder-True"]


def test_reading_does_not_disturb_a_writer_at_work(tmp_path: Path) -> None:
    folder = save(random_drafter(Options(), seed=1), tmp_path / "drafter")

    def fill(path: Path) -> None:
        (path / "new").write_text("x")
        load_drafter(folder)
        assert (path / "new").exists()

    replace_folder(folder, fill)
    assert [path.name for path in folder.iterdir()] == ["new"]


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def t2d_but(token: int) -> Tensor:
    """Whether each token can be drafted, wrong for one of them."""
    ids = torch.tensor([0, 2, 3, 7, 8, 11, 15, 16, 22])
    mask_V = torch.zeros(23, dtype=torch.bool).index_fill_(0, ids, True)
    mask_V[token] ^= True
    return mask_V


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no configuration": (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
    "broken configuration": (lambda f: (f / "config.json").write_text("{"), r"config\.json is not valid JSON"),
    "another method": (
        lambda f: edit_config(f, lambda c: c.update(speculators_model_type="medusa")),
        r"config\.json.*'medusa'",
    ),
    "a list": (lambda f: (f / "config.json").write_text("[]"), r"config\.json"),
    "a missing field": (
        lambda f: edit_config(f, lambda c: c.pop("eagle_aux_hidden_state_layer_ids")),
        r"config\.json.*'eagle_aux_hidden_state",
    ),
    "a missing layer field": (
        lambda f: edit_config(f, lambda c: c["transformer_layer_config"].pop("rms_norm_eps")),
        r"'rms_norm_eps'",
    ),
    "layers that no machine holds": (
        lambda f: edit_config(f, lambda c: c["transformer_layer_config"].update(num_hidden_layers=10**9)),
        r"config\.json.*transformer_layer_config\.num_hidden_layers is 1e\+09",
    ),
    "a base that is no number of a machine": (
        lambda f: edit_config(f, lambda c: c["transformer_layer_config"]["rope_parameters"].update(rope_theta=10**400)),
        r"config\.json.*rope_theta",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors is missing"),
    "broken weights": (lambda f: (f / "model.safetensors").write_bytes(b"123"), r"model\.safetensors cannot be read"),
    "a missing tensor": (
        lambda f: edit_tensors(f, lambda t: t.pop("fc.weight")),
        r"model\.safetensors.*'fc\.weight' is missing",
    ),
    "a tensor too many": (
        lambda f: edit_tensors(f, lambda t: t.update(extra=torch.zeros(1))),
        r"model\.safetensors.*'extra'",
    ),
    "a wrong shape": (
        lambda f: edit_tensors(f, lambda t: t.update({"norm.weight": torch.ones(3)})),
        r"'norm\.weight' has shape \(3,\)",
    ),
    "no d2t": (lambda f: edit_tensors(f, lambda t: t.pop("d2t")), r"'d2t' is missing"),
    "a d2t of another size": (
        lambda f: edit_tensors(f, lambda t: t.update(d2t=t["d2t"][:5].clone())),
        r"'d2t' has \(5,\).*9",
    ),
    "a d2t beyond the target": (
        lambda f: edit_tensors(f, lambda t: t.update(d2t=t["d2t"] + 1)),
        r"'d2t'.*vocabulary of 23",
    ),
    "a d2t that falls": (lambda f: edit_tensors(f, lambda t: t.update(d2t=t["d2t"].flip(0))), r"'d2t'.*ascending"),
    "a t2d of another drafter": (
        lambda f: edit_tensors(f, lambda t: t.update(t2d=torch.arange(23) < 9)),
        r"'t2d' and 'd2t' disagree on 8 tokens, first on 1:",  # 0, 2, 3, 7 and 8 are in both
    ),
    "a t2d that is nearly right": (
        lambda f: edit_tensors(f, lambda t: t.update(t2d=t2d_but(22))),
        r"disagree on 1 tokens, first on 22:",
    ),
    "a t2d of another target": (
        lambda f: edit_tensors(f, lambda t: t.update(t2d=torch.ones(24, dtype=torch.bool))),
        r"'t2d' has \(24,\).*23",
    ),
    "another vocabulary size": (
        lambda f: edit_config(f, lambda c: c.update(draft_vocab_size=8)),
        r"'d2t' has \(9,\).*8",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_does_not_fit_is_named(tmp_path: Path, name: str) -> None:
    folder = save(random_drafter(Options(reduced=True)), tmp_path / "drafter")
    damage, message = DAMAGE[name]
    damage(folder)
    if name in ("a t2d of another drafter", "a t2d that is nearly right"):  # a server looks at no other weights
        with pytest.raises(InputError, match=message):
            check_vocab(folder)
    with pytest.raises(InputError, match=message) as error:
        load_drafter(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json is missing"):
        load_drafter(tmp_path / "nothing")


def test_greedy_drafts_survive_the_folder(tmp_path: Path) -> None:
    """With a reduced vocabulary ids are target ids, before and after: d2t is applied once."""
    drafter = random_drafter(Options(reduced=True, taps=(2,)), dtype=torch.float32)
    found = reload(drafter, tmp_path / "drafter")
    proposals = []
    for one in (drafter, found):
        cache = one.new_cache(1)
        one.observe(cache, Observation(torch.tensor([[4, 9]]), torch.tensor([2]), torch.ones(1, 2, 1, HIDDEN)))
        proposals.append(one.propose(cache, torch.tensor([3]), 5, GREEDY).ids[0].tolist())
    assert proposals[0] == proposals[1]
    assert set(proposals[0]) <= set(drafter.vocab.ids_D.tolist())
