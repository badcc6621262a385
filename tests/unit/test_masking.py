"""What is secret, what is shown of it, and that it can be put back."""

from __future__ import annotations

import copy
import pickle
import stat

import pytest

from spectrain import masking
from spectrain.engines.vllm.logs import open_log
from spectrain.files import comparable, plain
from spectrain.masking import (
    MASK,
    MaskedText,
    hide,
    is_secret_key,
    is_secret_name,
    mask,
    mask_override,
    mask_text,
    masked_keys,
    private_values,
    reveal,
)


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch):
    monkeypatch.setattr(masking, "_hidden", set())


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("OPENAI_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("PASSWORD_OF_MINE", True),
        ("api_key", True),
        ("hf_token", True),
        ("--api-key", True),
        ("VLLM_LOGGING_LEVEL", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("max_num_batched_tokens", False),
        ("tokenizer_mode", False),
        ("mask_token_id", False),
        ("num_key_value_heads", False),
    ],
)
def test_secrets_go_by_their_names(name, secret):
    assert is_secret_name(name) is secret


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        ("engine.environment.VLLM_LOGGING_LEVEL", True),
        ("++engine.environment", True),
        ("engine.args.api_key", True),
        ("engine.args.nested.password", True),
        ("drafter.options.token", True),
        ("engine.args.max_num_batched_tokens", False),
        ("engine.urls", False),
        ("drafter.block.mask_token_id", False),
        ("run.token", False),
    ],
)
def test_keys_of_secrets(key, secret):
    assert is_secret_key(key) is secret


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pa:ss@host:8000/v1", "http://***@host:8000/v1"),
        ("https://token@host/x", "https://***@host/x"),
        ("see http://a:b@c, then http://d:e@f", "see http://***@c, then http://***@f"),
        ("me:secret@host:8000", "***@host:8000"),
        ("http://host/v1?api_key=abc&n=3", "http://host/v1?api_key=***&n=3"),
        ("http://h/x?n=3&X-Amz-Signature=abc#top", "http://h/x?n=3&X-Amz-Signature=***#top"),
        ("http://host:8000/a@b", "http://host:8000/a@b"),
        ("a mail to me@example.org, at 12:30", "a mail to me@example.org, at 12:30"),
    ],
)
def test_credentials_of_urls(text, shown):
    assert mask_text(text) == shown


def test_what_was_hidden_is_in_no_line():
    hide("hunter2hunter2")
    hide("2")  # would hide every 2
    assert mask_text("error: 2 of hunter2hunter2!") == f"error: 2 of {MASK}!"


def test_an_override_in_an_error():
    assert mask_override("engine.environment={A: b") == f"engine.environment={MASK}"
    assert mask_override("++engine.args.api_key=b") == f"++engine.args.api_key={MASK}"
    assert mask_override("trainer.seed=x(") == "trainer.seed=x("


# --- masked text ---------------------------------------------------------------------------------------------------


def test_it_works_as_the_text_and_is_written_as_what_it_shows():
    text = MaskedText("abc", "***", "*** (1)")
    assert text == "abc" and f"{text}/x" == "abc/x" and isinstance(text, str)
    for other in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
        assert (other, other.shown, other.compared, other.private) == ("abc", "***", "*** (1)", True)
    assert plain({"a": [text, 1.5]}) == {"a": ["***", 1.5]}
    assert comparable({"a": (text,)}) == {"a": ["*** (1)"]}


def values(token: str = "hf_0123456789", level: str = "DEBUG", url: str = "http://me:pw@h:1") -> dict:
    return {
        "engine": {
            "environment": {"HF_TOKEN": token, "VLLM_LOGGING_LEVEL": level},
            "args": {"api_key": [token, "second-key"], "seed": 3, "trust": True, "hf_token": True},
            "urls": [url, "http://plain:2"],
        },
        "trainer": {"seed": 5},
        "data": {"system": "the token is x"},
    }


def test_a_configuration_is_masked_by_key_and_by_what_it_holds():
    masked = mask(values(), values())
    assert masked == values()  # what works with it gets the values
    assert plain(masked) == {
        "engine": {
            "environment": {"HF_TOKEN": MASK, "VLLM_LOGGING_LEVEL": MASK},
            "args": {"api_key": [MASK, MASK], "seed": 3, "trust": True, "hf_token": True},
            "urls": ["http://***@h:1", "http://plain:2"],
        },
        "trainer": {"seed": 5},
        "data": {"system": "the token is x"},
    }
    assert mask_text("no hf_0123456789, no second-key; DEBUG stays") == f"no {MASK}, no {MASK}; DEBUG stays"


def test_private_values_are_all_that_is_missing():
    stored, private = plain(mask(values(), values())), private_values(mask(values(), values()))
    assert len(masked_keys(stored)) == 5
    reveal(stored, private)
    assert stored == values()
    assert masked_keys(stored) == []


def test_what_a_person_wrote_over_a_mask_stays():
    stored = plain(mask(values(), values()))
    stored["engine"]["environment"]["HF_TOKEN"] = "new"
    reveal(stored, private_values(mask(values(), values())))
    assert stored["engine"]["environment"]["HF_TOKEN"] == "new"


def test_a_rotated_secret_is_no_change_and_another_setting_is_one():
    def compared(*arguments):
        return comparable(mask(values(*arguments), values(*arguments)))

    assert compared() == compared("hf_another_one", "DEBUG", "http://me:new@h:1")
    assert compared() != compared("hf_0123456789", "INFO")
    assert compared() != compared("hf_0123456789", "DEBUG", "http://me:pw@other:1")
    assert "hf_0123456789" not in str(compared()) and "DEBUG" not in str(compared())


def test_what_comes_from_the_environment_is_shown_as_the_reference(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "opensesame")
    monkeypatch.setenv("WHERE", "/a/long/path")
    real = {"logger": {"project": "p-opensesame"}, "target": {"path": "/a/long/path/x"}}
    written = {"logger": {"project": "p-${oc.env:MY_PASSWORD}"}, "target": {"path": "${oc.env:WHERE}/x"}}
    masked = mask(real, written)
    assert masked == real and plain(masked) == written
    assert private_values(masked) is None  # the environment has them
    # A place is compared as what it is, so that another way to say it is no change.
    assert comparable(masked["target"]) == real["target"] and "opensesame" not in str(comparable(masked["logger"]))
    assert mask_text("p-opensesame in /a/long/path/x") == f"p-{MASK} in /a/long/path/x"


def test_a_url_with_a_password_from_the_environment_is_kept_apart():
    real, written = {"engine": {"urls": ["http://u:pw@h"]}}, {"engine": {"urls": ["http://u:${oc.env:P}@h"]}}
    masked = mask(real, written)
    assert plain(masked) == {"engine": {"urls": ["http://***@h"]}}
    assert private_values(masked) == {"engine": {"urls": {0: "http://u:pw@h"}}}


def test_numbers_on_a_command_line_may_be_secrets():
    real = {"engine": {"environment": {"PIN": 123456}, "args": {"api_key": 123456, "mask_token": 7, "password": 5.5}}}
    assert plain(mask(real, real)) == {
        "engine": {"environment": {"PIN": MASK}, "args": {"api_key": MASK, "mask_token": 7, "password": MASK}}
    }


def test_logs_of_other_programs_are_for_their_owner_alone(tmp_path):
    log = tmp_path / "logs" / "vllm.log"
    with open_log(log) as file:
        file.write(b"a")
    log.chmod(0o644)  # of an earlier version
    with open_log(log) as file:
        file.write(b"b")
    assert (log.read_bytes(), stat.S_IMODE(log.stat().st_mode)) == (b"ab", 0o600)
