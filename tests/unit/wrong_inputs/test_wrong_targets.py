"""What is read from outside and is wrong is refused before work with one line and exit code 2, never "unexpected",
never by hanging or by allocating. Here: the target's folder and its chat template.
"""

import json
import os

import pytest
from refusals import BROKEN, refused, write

from spectrain import cli

pytestmark = pytest.mark.slow  # many, and each a whole start


def test_the_run_that_every_case_here_spoils_is_right(capsys, workplace):
    code = cli.main(["run", *workplace, "--dry-run"])
    assert code == 0, capsys.readouterr().err


# --- files of a target's folder ------------------------------------------------------------------------------------

JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("file", JSON_FILES)
def test_a_file_of_the_target_that_is_no_json_object(capsys, workplace, tmp_path, file, kind):
    path = tmp_path / "target" / file
    if BROKEN[kind] is None:
        os.truncate(path, 1 << 40)  # no byte of it is on disk
    else:
        write(path, BROKEN[kind])
    assert file in refused(capsys, workplace)


@pytest.mark.parametrize("file", ["special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"])
def test_a_file_that_the_target_need_not_have(capsys, workplace, tmp_path, file):
    write(tmp_path / "target" / file, b"\xff\xfe{")
    assert file in refused(capsys, workplace)


@pytest.mark.parametrize("file", [*JSON_FILES, "chat_template.jinja"])
def test_a_file_that_never_ends(capsys, workplace, tmp_path, file):
    path = tmp_path / "target" / file
    path.unlink()
    os.mkfifo(path)
    assert file in refused(capsys, workplace)


WRONG_FIELDS = [
    ("config.json", "num_attention_heads", 0),
    ("config.json", "num_attention_heads", -4),
    ("config.json", "num_key_value_heads", 0),
    ("config.json", "num_hidden_layers", 0),
    ("config.json", "num_hidden_layers", 10**9),
    ("config.json", "num_hidden_layers", "seven"),
    ("config.json", "num_hidden_layers", 7.5),
    ("config.json", "num_hidden_layers", True),
    ("config.json", "hidden_size", 0),
    ("config.json", "hidden_size", 10**14),
    ("config.json", "vocab_size", -5),
    ("config.json", "vocab_size", 10**14),
    ("config.json", "intermediate_size", 10**14),
    ("config.json", "intermediate_size", [48]),
    ("config.json", "head_dim", 0),
    ("config.json", "rms_norm_eps", "small"),
    ("config.json", "rms_norm_eps", -1e-5),
    ("config.json", "max_position_embeddings", 0),
    ("config.json", "rope_parameters", "default"),
    ("config.json", "rope_parameters", {"rope_type": "default", "rope_theta": 0}),
    ("config.json", "rope_parameters", {"rope_type": "default", "rope_theta": "big"}),
    ("config.json", "rope_parameters", {"rope_type": "default", "rope_theta": None}),
    ("config.json", "rope_parameters", {"rope_type": "spiral", "rope_theta": 1e4}),
    ("config.json", "dtype", "float12"),
    ("config.json", "dtype", 7),
    ("config.json", "layer_types", 3),
    ("config.json", "layer_types", ["full_attention"]),
    ("config.json", "text_config", 3),
    ("config.json", "model_type", 7),
    ("config.json", "model_type", "nonesuch"),
    ("config.json", "tie_word_embeddings", "maybe"),
    ("config.json", "architectures", 3),
    ("tokenizer.json", "model", 3),
    ("tokenizer.json", "added_tokens", "x"),
    ("tokenizer.json", "decoder", {"type": "Nothing"}),
    ("tokenizer_config.json", "eos_token", 3),
    ("tokenizer_config.json", "eos_token", ["a"]),
    ("tokenizer_config.json", "tokenizer_class", 7),
    ("tokenizer_config.json", "added_tokens_decoder", [1]),
    ("tokenizer_config.json", "model_max_length", "long"),
    ("generation_config.json", "eos_token_id", "x"),
    ("generation_config.json", "eos_token_id", [2, "x"]),
    ("generation_config.json", "eos_token_id", 10**12),
    ("generation_config.json", "eos_token_id", -1),
    ("generation_config.json", "eos_token_id", True),
    ("generation_config.json", "temperature", "hot"),
    ("generation_config.json", "temperature", -1),
    ("generation_config.json", "top_p", 7),
    ("generation_config.json", "top_k", "many"),
    ("generation_config.json", "do_sample", "yes"),
]


@pytest.mark.parametrize(("file", "field", "value"), WRONG_FIELDS, ids=lambda value: str(value)[:40])
def test_a_field_of_the_target_that_makes_no_sense(capsys, workplace, tmp_path, file, field, value):
    path = tmp_path / "target" / file
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, field: value}))
    assert file in refused(capsys, workplace)


def test_a_size_inside_a_wrappers_configuration(capsys, workplace, tmp_path):
    path = tmp_path / "target/config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}))
    assert "text_config.num_hidden_layers is 1e+09" in refused(capsys, workplace)


def test_a_family_that_nothing_is_known_of(capsys, workplace, tmp_path):
    path = tmp_path / "target/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "opt"}))
    assert "'opt'" in refused(capsys, workplace)


# --- the chat template ---------------------------------------------------------------------------------------------

LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
TEMPLATES = {
    "not UTF-8": (b"{{ messages }}\xff", "not UTF-8"),
    "cut": ("{% for message in messages", "rejects"),
    "divides by zero": ("{{ 1 // 0 }}", "division"),
    "divides what a prompt says by zero": ("{{ messages | length // (messages | length - 1) }}", "zero"),
    "never ends": (LOOPS, "did not end"),
    "computes for ever": ("{{ 10 ** 30000000 }}", "did not end"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "takes all memory": ("{{ 'a' * 10 ** 13 }}", "MemoryError"),
    "gives a text without end": ("{% for a in range(4) %}{{ 'a' * 10000000 }}{% endfor %}", "characters"),
    "too large": ("{# " + " " * (1 << 20) + " #}", "MB"),
    "rejects every conversation": ("{{ raise_exception('no chat') }}", "no chat"),
    "needs what there is not": ("{{ messages[7].content.strip() }}", "rejects"),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_that_cannot_be_rendered(capsys, monkeypatch, workplace, tmp_path, kind):
    content, message = TEMPLATES[kind]
    if message == "did not end":
        monkeypatch.setattr("spectrain.data.bounded.RENDER_S", 0.5)
    write(tmp_path / "target/chat_template.jinja", content)
    assert message in refused(capsys, workplace)


def test_a_template_cannot_write_to_the_terminal(capsys, workplace, tmp_path):
    write(tmp_path / "target/chat_template.jinja", "{{ raise_exception('\x1b[31mred\x07 \x9b2J') }}")
    error = refused(capsys, workplace)
    assert r"\x1b[31mred\x07 \x9b2J" in error
    assert not set("\x1b\x07\x9b") & set(error)


def test_a_template_in_the_tokenizers_configuration_of_another_type(capsys, workplace, tmp_path):
    (tmp_path / "target/chat_template.jinja").unlink()
    path = tmp_path / "target/tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": 5}))
    assert "chat_template" in refused(capsys, workplace)


def test_a_tokenizer_with_code_of_its_own(capsys, workplace, tmp_path):
    path = tmp_path / "target/tokenizer_config.json"
    fields = {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": [None, "my_tokenizer.MyTokenizer"]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    config = tmp_path / "target/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "smollm3"}))
    assert "target.trust_remote_code=true" in refused(capsys, workplace)
