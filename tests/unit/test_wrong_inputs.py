"""What is read from outside and is wrong: refused before work with one line and exit code 2, never "unexpected", never
by hanging or by allocating.
"""

import json
import os
import shutil
import signal
import sys

import pytest
from tiny import tiny_target

from spectrain import cli
from spectrain.data.responses import ResponseStore
from spectrain.training.trainer import Trainer

LONGEST_S = 60  # until a test that hangs is ended; nothing here takes a second


@pytest.fixture(scope="module")
def sound_target(tmp_path_factory):
    """7 layers, a vocabulary of 304, 512 positions."""
    return tiny_target("llama", tmp_path_factory.mktemp("target") / "tiny", num_hidden_layers=7)


@pytest.fixture(autouse=True)
def _cannot_hang():
    def give_up(number, frame):
        raise KeyboardInterrupt("hangs")  # nothing catches it

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LONGEST_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def workplace(tmp_path, monkeypatch, sound_target):
    """A working directory with prompts and a target of its own, and the arguments of a run that passes every check."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sound_target, tmp_path / "target")
    for name, numbers in (("train", range(8)), ("heldout", range(8, 12))):
        lines = [json.dumps({"turns": [f"Say {number}."]}) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [
        *("data=jsonl", "data.train=train.jsonl", "data.heldout=heldout.jsonl", "target.path=target"),
        *("target.max_length=256", "sampling.max_new_tokens=16", "run.dir=run", "drafter.draft_vocab_size=100"),
    ]


def refused(capsys, arguments, command="run", dry=True):
    """The line with which a command refuses."""
    code = cli.main([command, *arguments, *(["--dry-run"] if dry else [])])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    assert "(unexpected;" not in err
    assert "Traceback" not in err
    return err


def test_the_run_that_every_case_here_spoils_is_right(capsys, workplace):
    code = cli.main(["run", *workplace, "--dry-run"])
    assert code == 0, capsys.readouterr().err


# --- files of a target's folder ------------------------------------------------------------------------------------

DEEP = "[" * 100_000
BROKEN = {
    "empty": "",
    "cut": '{"model_type": "llama", ',
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "not UTF-8": b'{"model_type": "\xff\xfe"}',
    "nested too deep": DEEP,
    "too large": None,
}
JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


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


# --- keys of the configuration -------------------------------------------------------------------------------------

WRONG_KEYS = [
    *("trainer.epochs=1000000000", "trainer.epochs=0", "trainer.packed_length=10000000000000"),
    *("trainer.micro_batch_size=1000000000", "trainer.gradient_accumulation=-1", "trainer.loader_workers=1000000"),
    *("trainer.prefetch_batches=1000000000", "trainer.learning_rate=1e300", "trainer.max_grad_norm=-1"),
    *("drafter.intermediate_size=100000000000000", "drafter.intermediate_size=0", "drafter.num_layers=1000000000"),
    *("drafter.num_attention_heads=1000000000000", "drafter.head_dim=100000000000", "drafter.taps=[1000000000000]"),
    *("drafter.autoregressive.ttt_steps=1000000000", "decoding.num_speculative_tokens=1000000000"),
    *("decoding.ngram_max=1000000000", "decoding.temperature=1e300", "suite.concurrency=1000000000"),
    *("suite.batches=[1,1000000000]", "engine.batch_size=1000000000", "engine.capture_tokens=100000000000"),
    *("engine.replicas=1000000000", "engine.retries=1000000000", "engine.startup_timeout_s=1e300"),
    *("target.max_length=100000000000", "sampling.max_new_tokens=100000000000", "data.max_train=-1"),
    *("hidden_states.shard_bytes=1000000000000000", "drafter.loss.weights.ce=1e300"),
    *(f"{key}={'x' * 300}" for key in ("suite.name", "target.name", "run.name", "logger.project")),
]


@pytest.mark.parametrize("argument", WRONG_KEYS, ids=lambda text: text[:40])
def test_a_value_that_nobody_can_mean(capsys, workplace, argument):
    assert argument.partition("=")[0].removesuffix(".ce") in refused(capsys, [*workplace, argument])


URLS = [
    *("http://", "http://:8000", "http:///v1", "http://host:port", "http://host:99999", "http://[::1", "ftp://host"),
    *("http://a b", "http://host:8000?x=1", "http://host:8000#x", "host:8000", "http://host:0", "http://ho\x1bst"),
]


@pytest.mark.parametrize("url", URLS)
def test_the_address_of_a_server_that_is_none(capsys, workplace, url):
    assert "engine.urls" in refused(capsys, [*workplace, "engine=vllm_server", f"engine.urls=['{url}']"], "generate")


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_attention_that_this_machine_does_not_have(capsys, workplace, name):
    assert "target.attn_implementation" in refused(capsys, [*workplace, f"target.attn_implementation={name}"])


@pytest.mark.parametrize("argument", ["drafter.attention=flex", "drafter.intermediate_size=1048576"])
def test_a_drafter_that_this_machine_cannot_train(capsys, monkeypatch, workplace, argument):
    monkeypatch.setattr("spectrain.stages.target_checks.memory_bytes", lambda device: 1 << 30)
    assert argument.partition("=")[0] in refused(capsys, [*workplace, argument])


# --- recipes, and other files of groups ----------------------------------------------------------------------------

GLOBAL = "# @package _global_\n"
RECIPES = {
    "not UTF-8": (b"# @package _global_\nrun:\n  name: \xff\n", "not UTF-8"),
    "a list": (GLOBAL + "- a\n- b\n", "KEY: VALUE"),
    "a text": ("hello\n", "KEY: VALUE"),
    "a number": ("3\n", "KEY: VALUE"),
    "a key that is no text": (GLOBAL + "1: 2\n", "KEY: VALUE"),
    "broken YAML": (GLOBAL + "run: {name: x\n", "line 3"),
    "includes itself": (GLOBAL + "defaults:\n  - /recipe: mine\n", "includes itself"),
    "includes itself by name": (GLOBAL + "defaults:\n  - mine\n", "includes itself"),
    "defaults of another type": (GLOBAL + "defaults: 3\n", "defaults"),
    "an entry of another type": (GLOBAL + "defaults:\n  - 3\n", "defaults"),
    "an unknown key": (GLOBAL + "trainer:\n  epoch: 3\n", "did you mean trainer.epochs?"),
    "an unknown section": (GLOBAL + "trainr:\n  epochs: 3\n", "trainr"),
    "a wrong type": (GLOBAL + "trainer:\n  epochs: three\n", "trainer.epochs must be a whole number"),
    "a wrong bound": (GLOBAL + "trainer:\n  epochs: 0\n", "trainer.epochs=0"),
    "a section of another type": (GLOBAL + "drafter:\n  loss: 3\n", "drafter.loss is a section"),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_that_is_none(capsys, workplace, tmp_path, kind):
    content, message = RECIPES[kind]
    path = tmp_path / "recipes/recipe/mine.yaml"
    path.parent.mkdir(parents=True)
    write(path, content)
    error = refused(capsys, ["recipe=mine", *workplace])
    assert message in error
    assert "mine.yaml" in error


def test_a_recipe_that_never_ends(capsys, workplace, tmp_path):
    (tmp_path / "recipes/recipe").mkdir(parents=True)
    os.mkfifo(tmp_path / "recipes/recipe/mine.yaml")
    assert "mine.yaml" in refused(capsys, ["recipe=mine", *workplace])


def test_a_wrong_value_of_the_command_line_is_not_blamed_on_a_recipe(capsys, workplace, tmp_path):
    (tmp_path / "recipes/recipe").mkdir(parents=True)
    (tmp_path / "recipes/recipe/mine.yaml").write_text(GLOBAL + "trainer:\n  epochs: 3\n")
    assert "mine.yaml" not in refused(capsys, ["recipe=mine", *workplace, "trainer.epochs=0"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("+trainer.epochs=3", "write trainer.epochs=VALUE, without the +"),
        ("+drafter=eagle3", "write drafter=VALUE, without the +"),
        ("drafter.dspak={markov: none}", "did you mean drafter.dspark?"),
        ("trainr={epochs: 3}", "did you mean trainer?"),
    ],
)
def test_a_slip_of_the_command_line(capsys, workplace, argument, message):
    assert message in refused(capsys, [*workplace, argument])


# --- prompts, sweeps and trackers ----------------------------------------------------------------------------------

PROMPTS = {
    "too long": ({"turns": ["word " * 400]}, "target.max_length=256"),
    "an imported prompt that is too long": (
        {"messages": [{"role": "user", "content": "word " * 400}, {"role": "assistant", "content": "Yes."}]},
        "target.max_length=256",
    ),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_prompt_that_leaves_no_room(capsys, workplace, tmp_path, kind):
    line, message = PROMPTS[kind]
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    error = refused(capsys, workplace)
    assert message in error
    assert "train.jsonl:9" in error


def test_a_prompt_of_the_suite_that_leaves_no_room(capsys, workplace, tmp_path):
    (tmp_path / "suite.jsonl").write_text(json.dumps({"turns": ["word " * 400]}) + "\n")
    assert "suite.jsonl:1" in refused(capsys, [*workplace, "suite=jsonl", "suite.prompts=suite.jsonl"])


def test_a_conversation_that_the_template_rejects(capsys, workplace, tmp_path):
    write(
        tmp_path / "target/chat_template.jinja",
        "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no such words') }}{% endif %}"
        "{{ m.content }}{% endfor %}",
    )
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"turns": ["a bad word"]}) + "\n")
    error = refused(capsys, workplace)
    assert "train.jsonl:9" in error
    assert "no such words" in error


@pytest.mark.parametrize("dry", [True, False])
def test_a_sweep_looks_at_all_jobs_before_the_first(capsys, monkeypatch, workplace, tmp_path, dry):
    """The taps of the second job lie beyond a target that has 7 layers."""
    before = sorted(tmp_path.rglob("*"))
    error = refused(capsys, ["-m", *workplace, "drafter.taps=[1,2,3],[1,2,99]"], "fit", dry)
    assert "99 lies beyond the last layer" in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("mode", [None, "offline"])
def test_wandb_that_does_not_answer_is_noticed_before_any_work(capsys, monkeypatch, workplace, tmp_path, mode):
    """With the client of Weights & Biases as it is without login."""
    package = tmp_path / "packages/wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "class Api:\n    def __init__(self, timeout):\n        raise RuntimeError('api_key not configured')\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setitem(sys.modules, "wandb", sys)  # so that what the test imports is taken away behind it
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    arguments = [*workplace, "logger.trackers=[wandb]"]
    if mode is None:
        assert "api_key not configured" in refused(capsys, arguments)
        return
    monkeypatch.setenv("WANDB_MODE", mode)
    assert cli.main(["run", *arguments, "--dry-run"]) == 0, capsys.readouterr().err


# --- other files that are read -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in BROKEN if kind != "too large"])
def test_a_drafters_configuration_that_is_no_json_object(capsys, workplace, tmp_path, kind):
    (tmp_path / "drafter").mkdir()
    write(tmp_path / "drafter/config.json", BROKEN[kind])
    write(tmp_path / "drafter/model.safetensors", "")
    assert "drafter/config.json" in refused(capsys, [*workplace, "drafter.path=drafter"], "fit")
    code = cli.main(["serve", "drafter.path=drafter", "target.path=target", "--print"])
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    assert "drafter/config.json" in error


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_a_prompt_file_that_never_ends(capsys, workplace, tmp_path, name):
    path = tmp_path / name
    path.unlink()
    os.mkfifo(path)
    assert name in refused(capsys, workplace)


# --- a run directory that goes away --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["renamed", "removed", "replaced"])
@pytest.mark.parametrize(("owner", "name"), [(ResponseStore, "append"), (Trainer, "_step")], ids=["generate", "fit"])
def test_a_run_directory_that_goes_away_is_not_made_anew(capsys, monkeypatch, workplace, tmp_path, how, owner, name):
    original = getattr(owner, name)

    def after_it_went_away(*arguments):
        if (tmp_path / "run").exists() and not (tmp_path / "moved").exists():
            (tmp_path / "run").rename(tmp_path / "moved")
            if how == "removed":
                shutil.rmtree(tmp_path / "moved")
            elif how == "replaced":
                (tmp_path / "run").mkdir()
        return original(*arguments)

    monkeypatch.setattr(owner, name, after_it_went_away)
    code = cli.main(["fit", *workplace, "drafter.init=random"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert (code, error.startswith("error: ")) == (1, True)
    assert f"{tmp_path / 'run'} was removed or renamed" in error
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir()) == []
