"""Targets of a model type that nothing is known of: what is found of them, what is refused, and who lies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import CONFIGS, tiny_config, tiny_tokenizer
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from spectrain.config.target_schema import TargetConfig
from spectrain.errors import InputError
from spectrain.target import families
from spectrain.target.families import FAMILIES, head_math
from spectrain.target.generic_family import find_family
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel
from spectrain.target.resolve import resolve_target
from spectrain.target.tiny_targets import write_target

# Their logits are made of more than the normed states: shared keys are handed out with them.
NOT_FOUND = ("gemma4", "gemma4_text")
SIZES = {
    "vocab_size": 304,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MULTIPLIERS = {
    "embedding_multiplier": 5.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 16,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
# Model type -> (what it needs besides SIZES, factor on embeddings, factor on logits, soft-cap), by its own code.
FOUND = {
    "helium": ({}, 1.0, 1.0, None),
    "glm4": ({}, 1.0, 1.0, None),
    "olmo3": ({"sliding_window": 8}, 1.0, 1.0, None),
    "exaone4": ({"sliding_window": 8, "sliding_window_pattern": 2}, 1.0, 1.0, None),
    "granitemoeshared": (MULTIPLIERS, 5.0, 1 / 3, None),
    "minicpm3": ({**LATENT, "num_key_value_heads": 4, "scale_emb": 7, "dim_model_base": 8}, 7.0, 0.25, None),
    "vaultgemma": ({"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}, 32**0.5, 1.0, 3.0),
}


def config_of(kind, **fields):
    return CONFIG_MAPPING[kind](**{**SIZES, **fields})


def loaded(folder, dtype="float32"):
    config = TargetConfig(path=str(folder), dtype=dtype)
    return TargetModel.load(resolve_target(config), config)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in NOT_FOUND])
def test_what_is_found_of_a_known_family_is_what_the_table_says(name, monkeypatch):
    config = tiny_config(name)
    kind = config.get_text_config(decoder=True).model_type
    known, found = FAMILIES[kind], find_family(config)
    asked = head_math(config)
    monkeypatch.setitem(families.FAMILIES, kind, found)
    assert replace(head_math(config), family=known) == asked
    for fact in ("norm", "one_plus", "embeddings", "layers", "final_norm"):
        assert getattr(found, fact) == getattr(known, fact)


@pytest.mark.parametrize("kind", FOUND)
def test_an_unknown_type_is_loaded_with_what_its_own_code_does(kind, tmp_path):
    fields, *numbers = FOUND[kind]
    write_target(config_of(kind, **fields), tmp_path)
    target = loaded(tmp_path)
    head = TargetHead.from_checkpoint(tmp_path)
    assert head.math.family.found
    assert [head.math.embed_scale, head.math.logit_scale, head.math.soft_cap] == [
        number if number is None else pytest.approx(number, rel=1e-6) for number in numbers
    ]
    ids_BS = torch.arange(3, 33)[None]
    own = target.model(input_ids=ids_BS, output_hidden_states=True, use_cache=False)
    states = target.run(ids_BS, torch.arange(30)[None], tap_ids=(0, 3))
    torch.testing.assert_close(states.taps_BSAH[:, :, 1], own.hidden_states[3])
    torch.testing.assert_close(head.embed(ids_BS), own.hidden_states[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(head.hidden_to_logits(states.last_hidden_BSH), own.logits, rtol=1e-4, atol=1e-4)


def test_rounding_to_16_bits_is_no_lie(tmp_path):
    fields, *_ = FOUND["granitemoeshared"]
    write_target(config_of("granitemoeshared", **fields), tmp_path)
    assert loaded(tmp_path, "bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("stablelm", {}, r"final norm model\.norm \(LayerNorm\) has a bias"),
        ("phi", {}, r"output embedding has a bias"),
        ("olmo", {}, r"no norm with a gain"),
        ("gpt2", {}, r"final norm transformer\.ln_f \(LayerNorm\) has a bias"),
    ],
)
def test_what_no_family_can_say_is_refused_by_name(kind, fields, reason):
    with pytest.raises(InputError, match=rf"model type '{kind}'.*{reason}.*add an entry to FAMILIES"):
        head_math(config_of(kind, **fields))


def test_recurrent_layers_that_no_cache_of_ours_crops_are_refused(tmp_path):
    """Griffin's: its configuration calls them attention to everything outside."""
    write_target(config_of("recurrent_gemma", lru_width=32, attention_window_size=16), tmp_path)
    with pytest.raises(InputError, match=r"'recurrent_gemma'.*a text that a cache takes in pieces: .* by 0\.\d+ of"):
        loaded(tmp_path)


# --- models that lie -----------------------------------------------------------------------------------------------


class Lying(LlamaModel):
    """A decoder that does what ``config.lie`` says and nothing in its configuration that anybody reads."""

    def __init__(self, config):
        super().__init__(config)
        self.positions = nn.Embedding(64, config.hidden_size)
        self.gain = nn.Parameter(torch.ones(1))
        self.post_init()

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        lie, rows = self.config.lie, self.embed_tokens(input_ids)
        if lie == "embedding times three":
            rows = rows * 3.0
        elif lie == "positions":
            rows = rows + self.positions(torch.arange(rows.shape[1]))
        elif lie == "learned gain":
            rows = rows * self.gain
        elif lie == "squared":
            rows = rows * rows.abs()
        output = super().forward(inputs_embeds=rows, **kwargs)
        if lie == "norm once more":
            output.last_hidden_state = self.norm(output.last_hidden_state)
        elif lie == "scaled behind the norm":
            output.last_hidden_state = 1.5 * output.last_hidden_state
        return output


class LyingConfig(LlamaConfig):
    model_type = "lying"
    lie: str = ""


class LyingForCausalLM(LlamaForCausalLM):
    config_class = LyingConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Lying(config)
        self.post_init()

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if self.config.lie == "logits times two":
            output.logits = 2.0 * output.logits
        elif self.config.lie == "tokens apart":
            output.logits = output.logits * torch.linspace(0.9, 1.1, output.logits.shape[-1])
        elif self.config.lie == "capped":
            output.logits = 5.0 * torch.tanh(output.logits / 5.0)
        return output


AutoConfig.register("lying", LyingConfig)
AutoModelForCausalLM.register(LyingConfig, LyingForCausalLM)


def liar(folder, lie):
    fields = {"eos_token_id": tiny_tokenizer().eos_token_id}
    write_target(LyingConfig(**{**SIZES, **fields}, lie=lie), folder)
    return folder


@pytest.mark.parametrize(
    ("lie", "part"),
    [
        ("positions", "between its input embedding and its first layer cannot be run without more of its weights"),
        ("learned gain", "between its input embedding and its first layer cannot be run without more of its weights"),
        ("squared", r"what enters the first layer .* is off by 0\.\d+ of"),
        ("tokens apart", r"its logits .* is off by 0\.\d+ of"),
        ("capped", r"its logits .* is off by \d+ of"),
        ("norm once more", r"self-check failed at the final norm of the last hidden state: .* by 0\.\d+ of"),
        ("scaled behind the norm", r"self-check failed at the logits, made by norm and head: .* by 0\.\d+ of"),
    ],
)
def test_a_lie_is_caught(lie, part, tmp_path):
    with pytest.raises(InputError, match=part):
        loaded(liar(tmp_path, lie))


@pytest.mark.parametrize(
    ("lie", "embed_scale", "logit_scale"),
    [("", 1.0, 1.0), ("embedding times three", 3.0, 1.0), ("logits times two", 1.0, 2.0)],
)
def test_a_factor_that_no_field_names_is_measured(lie, embed_scale, logit_scale, tmp_path):
    loaded(liar(tmp_path, lie))
    math = TargetHead.from_checkpoint(tmp_path).math
    assert math.embed_scale == pytest.approx(embed_scale, rel=1e-6)
    assert math.logit_scale == pytest.approx(logit_scale, rel=1e-6)


def test_weights_that_are_not_what_was_found_are_caught_as_they_are_loaded(tmp_path, monkeypatch):
    """Facts that are wrong of the model beside them, as code would give that reads its weights."""
    write_target(config_of("helium"), tmp_path)
    right = find_family(config_of("helium"))
    for wrong, part in (
        ({"embed_scale": 1.01}, "the embedding"),
        ({"one_plus": True}, "the final norm"),
        ({"logit_multiplier": 0.99}, "the logits"),
    ):
        monkeypatch.setattr("spectrain.target.generic_family.find_family", lambda _, w=wrong: replace(right, **w))
        with pytest.raises(InputError, match=f"self-check failed at {part}"):
            loaded(tmp_path)
