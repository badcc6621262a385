"""What is read from outside and is wrong is refused before work with one line and exit code 2, never "unexpected",
never by hanging or by allocating. Here: the configuration, prompts and drafters.
"""

import json
import os
import shutil
import sys

import pytest
from refusals import BROKEN, refused, write

from spectrain import cli
from spectrain.data.responses import ResponseStore
from spectrain.training.trainer import Trainer

pytestmark = pytest.mark.slow  # many, and each a whole start

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
