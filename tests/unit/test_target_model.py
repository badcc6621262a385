"""Taps and logits of the in-process target against transformers' own outputs."""

import json

import pytest
import torch
from tiny import CONFIGS, VOCAB_SIZE, tiny_target, tiny_tokenizer
from transformers import DynamicCache

from spectrain.config.target_schema import TargetConfig
from spectrain.errors import ConfigError, InputError
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel, choose_device, choose_dtype
from spectrain.target.resolve import resolve_target
from spectrain.target.spec import TargetSpec

NUM_LAYERS = 4


def load(folder, **fields):
    config = TargetConfig(name="tiny", path=str(folder), device="cpu", **fields)
    return TargetModel.load(resolve_target(config), config)


def load_tiny(family, folder, **overrides):
    # transformers has no SDPA for gpt_oss (attention sinks).
    return load(
        tiny_target(family, folder, **overrides), attn_implementation="eager" if family == "gpt_oss" else "sdpa"
    )


def random_ids(rows=2, columns=12):
    return torch.randint(3, VOCAB_SIZE, (rows, columns), generator=torch.Generator().manual_seed(1))


def positions(ids_BS, start=0):
    return torch.arange(start, start + ids_BS.shape[1]).expand_as(ids_BS)


@pytest.fixture
def llama(tmp_path):
    return load_tiny("llama", tmp_path)


@pytest.mark.parametrize("family", CONFIGS)
def test_taps_and_logits_equal_transformers(family, tmp_path):
    target = load_tiny(family, tmp_path)
    ids_BS = random_ids()
    output = target.run(ids_BS, positions(ids_BS), tap_ids=range(NUM_LAYERS + 1))
    with torch.no_grad():
        expected = target.model(input_ids=ids_BS, output_hidden_states=True, use_cache=False)
    for tap in range(NUM_LAYERS):
        assert torch.equal(output.taps_BSAH[:, :, tap], expected.hidden_states[tap]), f"tap {tap}"
    # hidden_states[N] is taken after the final norm; tap N before it.
    assert torch.equal(output.taps_BSAH[:, :, NUM_LAYERS], output.last_hidden_BSH)
    head = TargetHead.from_checkpoint(tmp_path)
    assert torch.allclose(head.post_norm(output.last_hidden_BSH), expected.hidden_states[NUM_LAYERS], atol=2e-5)
    assert torch.allclose(target.logits(output.last_hidden_BSH), expected.logits, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_neighbouring_taps_differ(family, tmp_path):
    """Without this an off-by-one tap could pass the comparison above."""
    target = load_tiny(family, tmp_path)
    ids_BS = random_ids()
    taps_BSAH = target.run(ids_BS, positions(ids_BS), tap_ids=range(NUM_LAYERS + 1)).taps_BSAH
    for tap in range(NUM_LAYERS):
        assert not torch.allclose(taps_BSAH[:, :, tap], taps_BSAH[:, :, tap + 1], atol=0.01)


def test_taps_come_in_the_order_asked_and_only_those(llama):
    ids_BS = random_ids()
    every = llama.run(ids_BS, positions(ids_BS), tap_ids=(0, 1, 2, 3, 4)).taps_BSAH
    some = llama.run(ids_BS, positions(ids_BS), tap_ids=(4, 1)).taps_BSAH
    assert some.shape == (2, 12, 2, 32)
    assert torch.equal(some, every[:, :, [4, 1]])
    assert llama.run(ids_BS, positions(ids_BS)).taps_BSAH is None


@pytest.mark.parametrize("tap", [-1, 5])
def test_a_tap_beyond_the_layers_is_a_configuration_error(llama, tap):
    ids_BS = random_ids()
    with pytest.raises(ConfigError, match=rf"tap {tap} lies outside \[0, 4\]"):
        llama.run(ids_BS, positions(ids_BS), tap_ids=(1, tap))


def count_hooks(model):
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def test_no_hook_outlives_a_run_or_a_failure(llama):
    before = count_hooks(llama.model)
    ids_BS = random_ids()
    llama.run(ids_BS, positions(ids_BS), tap_ids=(1, 4))
    assert count_hooks(llama.model) == before
    with pytest.raises(IndexError):
        llama.run(torch.full((1, 3), VOCAB_SIZE), positions(ids_BS[:1, :3]), tap_ids=(1, 4))
    assert count_hooks(llama.model) == before


def test_a_layer_that_changes_its_input_in_place_does_not_change_the_tap(llama):
    ids_BS = random_ids()
    clean = llama.run(ids_BS, positions(ids_BS), tap_ids=(1,)).taps_BSAH

    def overwrite(module, args, output):
        args[0].zero_()

    llama.model.model.layers[1].register_forward_hook(overwrite)
    assert torch.equal(llama.run(ids_BS, positions(ids_BS), tap_ids=(1,)).taps_BSAH, clean)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4", "qwen3_5"])
def test_with_a_cache_a_text_may_come_in_pieces(family, tmp_path):
    target = load_tiny(family, tmp_path)
    ids_BS = random_ids()
    whole = target.run(ids_BS, positions(ids_BS), tap_ids=(1, 3))
    cache = DynamicCache(config=target.model.config.get_text_config(decoder=True))
    first = target.run(ids_BS[:, :7], positions(ids_BS[:, :7]), past_key_values=cache, tap_ids=(1, 3))
    second = target.run(
        ids_BS[:, 7:], positions(ids_BS[:, 7:], start=7), past_key_values=first.past_key_values, tap_ids=(1, 3)
    )
    assert torch.allclose(torch.cat([first.taps_BSAH, second.taps_BSAH], 1), whole.taps_BSAH, atol=1e-4)
    assert torch.allclose(
        torch.cat([first.last_hidden_BSH, second.last_hidden_BSH], 1), whole.last_hidden_BSH, atol=1e-4
    )


def test_positions_that_restart_separate_documents(llama):
    ids_BS = random_ids(rows=2, columns=6)
    packed = llama.run(ids_BS.reshape(1, 12), torch.arange(6).repeat(1, 2), tap_ids=(3,))
    alone = llama.run(ids_BS, positions(ids_BS), tap_ids=(3,))
    assert torch.allclose(packed.taps_BSAH.reshape(alone.taps_BSAH.shape), alone.taps_BSAH, atol=1e-5)


def test_right_padding_changes_nothing_before_it(llama):
    ids_BS = random_ids()
    mask = torch.ones_like(ids_BS)
    mask[1, 8:] = 0
    padded = llama.run(ids_BS, positions(ids_BS), attention_mask=mask).last_hidden_BSH
    alone = llama.run(ids_BS[1:, :8], positions(ids_BS[1:, :8])).last_hidden_BSH
    assert torch.allclose(padded[1:, :8], alone, atol=1e-5)


def test_states_may_enter_a_training_graph(llama):
    ids_BS = random_ids()
    hidden = llama.run(ids_BS, positions(ids_BS)).last_hidden_BSH
    weight = torch.ones(32, requires_grad=True)
    (hidden * weight).sum().backward()
    assert torch.allclose(weight.grad, hidden.sum((0, 1)), atol=1e-4)
    assert not any(parameter.requires_grad for parameter in llama.model.parameters())


def test_logits_of_some_positions_are_those_rows(tmp_path):
    target = load_tiny("gemma2", tmp_path)
    ids_BS = random_ids()
    hidden = target.run(ids_BS, positions(ids_BS)).last_hidden_BSH
    rows = target.logits(hidden[:, -1])
    assert rows.shape == (2, VOCAB_SIZE)
    assert rows.dtype == torch.float32
    assert torch.allclose(rows, target.logits(hidden)[:, -1], atol=1e-5)


def test_end_tokens_and_tokenizer_are_the_checkpoints(llama):
    tokenizer = tiny_tokenizer()
    assert llama.eos_ids == (tokenizer.eos_token_id,)
    assert llama.tokenizer.encode("Paris") == tokenizer.encode("Paris")
    assert llama.spec == TargetSpec.from_config(llama.model.config)


def test_a_bfloat16_checkpoint_runs_in_float32_on_a_cpu_unless_told_otherwise(tmp_path):
    folder = tiny_target("llama", tmp_path, dtype=torch.bfloat16)
    assert load(folder).dtype == torch.float32
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16
    spec = TargetSpec.from_folder(folder)
    assert choose_dtype("auto", torch.device("cuda"), spec) == torch.bfloat16
    assert choose_dtype("float16", torch.device("cuda"), spec) == torch.float16


def test_devices():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match=r"target\.device=gpu"):
        choose_device("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"target\.device=cuda"):
        choose_device("cuda")


def test_an_attention_the_family_lacks_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"target tiny .* cannot be loaded"):
        load(tiny_target("gpt_oss", tmp_path), attn_implementation="sdpa")


def test_loading_prints_nothing(tmp_path, capfd):
    tiny_target("llama", tmp_path)
    capfd.readouterr()
    load(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_code_in_the_checkpoint_is_not_run_unless_named(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = tiny_target("llama", tmp_path / "target"), tmp_path / "ran"
    (folder / "custom.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import LlamaConfig\nclass CustomConfig(LlamaConfig):\n    model_type = 'custom'\n"
    )
    path = folder / "config.json"
    fields = {**json.loads(path.read_text()), "model_type": "custom", "auto_map": {"AutoConfig": "custom.CustomConfig"}}
    path.write_text(json.dumps(fields))
    with pytest.raises(InputError, match=r"target\.trust_remote_code=true"):
        load(folder)
    assert not marker.exists()
    # Named, the code runs; what it defines is then an unknown family like any other.
    with pytest.raises(InputError, match=r"'custom'.*add an entry to FAMILIES"):
        load(folder, trust_remote_code=True)
    assert marker.exists()
