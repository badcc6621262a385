"""Typed configuration: strict types, conflicts inside a component, and the errors that name them."""

import dataclasses

import pytest

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.overrides import all_keys, build, flatten
from spectrain.config.schema import SpectrainConfig
from spectrain.errors import ConfigError


def test_defaults_survive_a_round_trip():
    assert build(dataclasses.asdict(SpectrainConfig())) == SpectrainConfig()
    assert build({}) == SpectrainConfig()


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("trainer", "epochs", "abc", "trainer.epochs must be a whole number, got 'abc'"),
        ("trainer", "epochs", 2.0, "trainer.epochs must be a whole number, got 2.0"),
        ("trainer", "epochs", True, "trainer.epochs must be a whole number, got true"),
        ("trainer", "epochs", None, "trainer.epochs must be a whole number, got null"),
        ("trainer", "learning_rate", "1e-3", "trainer.learning_rate must be a number, got '1e-3'"),
        ("trainer", "learning_rate", float("nan"), "trainer.learning_rate must be a finite number, got nan"),
        ("trainer", "learning_rate", float("inf"), "trainer.learning_rate must be a finite number, got inf"),
        ("trainer", "learning_rate", False, "trainer.learning_rate must be a number, got false"),
        ("hidden_states", "verify_checksums", 1, "hidden_states.verify_checksums must be true or false, got 1"),
        ("target", "path", 1.5, "target.path must be text, got 1.5"),
        ("drafter", "taps", [1, "x"], "drafter.taps[1] must be a whole number, got 'x'"),
        ("drafter", "taps", {"a": 1}, "drafter.taps must be a list, got {'a': 1}"),
        ("data", "train", None, "data.train must be a list, got null"),
        ("drafter", "loss", 3, "drafter.loss is a section: set its keys, not the section itself, got 3"),
        ("drafter", "loss", {"weights": {"ce": "much"}}, "drafter.loss.weights.ce must be a number, got 'much'"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(section, key, value, message):
    with pytest.raises(ConfigError) as error:
        build({section: {key: value}})
    assert str(error.value) == message


def test_readings_that_nobody_could_mean_otherwise():
    config = build(
        {"trainer": {"learning_rate": 1}, "data": {"train": "a.jsonl", "heldout": ["b.jsonl"]}, "run": {"name": 7}}
    )
    assert config.trainer.learning_rate == 1.0
    assert isinstance(config.trainer.learning_rate, float)
    assert config.data.train == ("a.jsonl",)
    assert config.data.heldout == ("b.jsonl",)
    assert config.run.name == "7"


def test_null_where_it_is_allowed():
    assert build({"drafter": {"taps": None, "draft_vocab_size": None}}).drafter == DrafterConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trainer": {"learning_rat": 1}}, "unknown key trainer.learning_rat: did you mean trainer.learning_rate?"),
        ({"trainr": {}}, "unknown key trainr: did you mean trainer?"),
        ({"zzz": {}}, "unknown key zzz: the sections are run, target, data"),
        ({"drafter": {"dspak": {"markov": "none"}}}, "unknown key drafter.dspak: did you mean drafter.dspark?"),
        ({"trainer": {"temperature": 1}}, "unknown key trainer.temperature: did you mean sampling.temperature?"),
        (
            {"drafter": {"loss": {"wheights": {}}}},
            "unknown key drafter.loss.wheights: did you mean drafter.loss.weights?",
        ),
        ({"hidden_states": {"zzz": 1}}, "unknown key hidden_states.zzz: the keys of hidden_states are dtype"),
    ],
)
def test_unknown_keys_are_errors_with_a_suggestion(values, message):
    with pytest.raises(ConfigError) as error:
        build(values)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "values",
    [
        {"drafter": {"loss": {"weights": {"ce": 0.0}}}},
        {"drafter": {"loss": {"weights": {"mse": -1.0}}}},
        {"drafter": {"taps": []}},
        {"drafter": {"taps": [1, 1]}},
        {"drafter": {"taps": [-1]}},
        {"drafter": {"taps": [1, -1]}},
        {"sampling": {"temperature": -0.1}},
        {"sampling": {"top_p": 0.0}},
        {"data": {"heldout_fraction": 1.0}},
        {"trainer": {"epochs": 0}},
        {"trainer": {"max_steps": 0}},
        {"trainer": {"optimizer": "sgd"}},
        {"decoding": {"ngram_min": 5}},
        {"engine": {"name": "vllm5"}},
        {"target": {"attn_implementation": "fast"}},
        {"target": {"device": "meta"}},
        {"sampling": {"temperature": 1e-42}},
        {"decoding": {"temperature": 1e-42}},
        {"sampling": {"top_k": 1 << 40}},
        {"sampling": {"seed": 1 << 70}},
        {"data": {"seed": -1}},
        {"decoding": {"seed": -1}},
        {"trainer": {"seed": -1}},
        {"trainer": {"beta1": 1.0}},
        {"trainer": {"beta2": -0.1}},
        {"trainer": {"weight_decay": -1.0}},
        {"suite": {"max_new_tokens": 0}},
    ],
)
def test_conflicts_inside_a_component_are_rejected(values):
    with pytest.raises(ConfigError) as error:
        build(values)
    section = next(iter(values))
    key = next(iter(values[section]))
    assert f"{section}.{key}" in str(error.value)


def test_taps_are_kept_in_the_order_a_server_concatenates_them():
    assert build({"drafter": {"taps": [5, 1, 3]}}).drafter.taps == (1, 3, 5)


def test_flatten_names_every_key_once():
    flat = flatten(SpectrainConfig())
    assert flat["drafter.autoregressive.step_decay"] == 0.8
    assert set(flat) == {key for key, kind in all_keys().items() if not dataclasses.is_dataclass(kind)}
