"""Everything that is refused before work starts: one line, exit code 2, and a run directory that was not touched."""

import importlib.util
import json
import shutil

import pytest
import torch
from foreign_layouts import eagle3, write
from tiny import tiny_target

from spectrain import cli
from spectrain.config.drafter_schema import DrafterConfig
from spectrain.data.vocab import DraftVocab
from spectrain.drafters.autoregressive.eagle3 import Eagle3, Eagle3Shape
from spectrain.drafters.drafter_folder import save_drafter
from spectrain.drafters.layers import LayerShape
from spectrain.stages import plan
from spectrain.stages.target_size import target_parameters


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """7 layers, a vocabulary of 304, 512 positions."""
    return tiny_target("llama", tmp_path_factory.mktemp("target") / "tiny", num_hidden_layers=7)


@pytest.fixture
def workplace(tmp_path, monkeypatch, target):
    """A working directory with prompts, and the arguments of a run that passes every check."""
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path / "train.jsonl", range(8))
    write_prompts(tmp_path / "heldout.jsonl", range(8, 12))
    return [
        *(
            "data=jsonl",
            "data.train=train.jsonl",
            "data.heldout=heldout.jsonl",
            f"target.path={target}",
            "target.max_length=256",
        ),
        *("sampling.max_new_tokens=16", "run.dir=run", "drafter.draft_vocab_size=100"),
    ]


def write_prompts(path, numbers):
    path.write_text("".join(json.dumps({"turns": [f"Say {number}."]}) + "\n" for number in numbers), encoding="utf-8")


def dry_run(capsys, *arguments, command="run"):
    code = cli.main([command, *arguments, "--dry-run"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_dry_run_prints_the_plan_and_touches_nothing(capsys, workplace, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    code, out, err = dry_run(capsys, *workplace)
    assert code == 0, err
    for text in (
        "7 layers, hidden size 32",
        "taps [2, 3, 4]",
        "8 training, 4 held out",
        "generate: start",
        "capture: start",
        "fit: start",
        " free",
    ):
        assert text in out
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", ["generate", "capture", "fit", "run"])
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("drafter.draft_vocab_size=305", "drafter.draft_vocab_size=305 is larger than the target's vocabulary of 304"),
        (
            "drafter.taps=[2,8]",
            "drafter.taps=[2, 8]: 8 lies beyond the last layer; the target has 7 layers, so taps run from 0 to 7",
        ),
    ],
)
def test_a_drafter_that_does_not_fit_the_target(capsys, workplace, command, argument, message):
    code, _, err = dry_run(capsys, *workplace, argument, command=command)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "drafter.num_attention_heads=3",
            "drafter.num_attention_heads=3 must be a multiple of drafter.num_key_value_heads=2",
        ),
        ("drafter.head_dim=7", "drafter.head_dim=7 must be even"),
        ("drafter.num_key_value_heads=0", "drafter.num_key_value_heads=0 must be at least 1"),
        ("target.max_length=513", "target.max_length=513 exceeds the target's 512 positions"),
        (
            "sampling.max_new_tokens=256",
            "sampling.max_new_tokens=256 leaves no room for a prompt in target.max_length=256",
        ),
        (
            ("trainer.optimizer=muon", "trainer.strategy=zero1"),
            "trainer.strategy=zero1 leaves no rank a whole matrix, which trainer.optimizer=muon levels",
        ),
        ("trainer.strategy=zero4", "trainer.strategy"),
        ("trainer.packed_length=16", "trainer.packed_length=16 cannot hold a prompt and an answer"),
        (
            "decoding.num_speculative_tokens=17",
            "decoding.num_speculative_tokens=17 is more than an answer may have (16 tokens)",
        ),
        ("drafter.loss.weights.mse=1", "loss name mse is unknown"),
        ("logger.trackers=[pencil]", "logger.trackers: pencil is unknown"),
        ("logger.trackers=[swanlab]", "logger.trackers: swanlab is not installed: pip install swanlab"),
        ("target.path=nowhere/at/all", "target.path=nowhere/at/all is not a folder"),
        (
            "drafter.path=nowhere",
            "drafter.path=nowhere is no folder here, and no Hub id",
        ),
        ("suite.prompts=nowhere.jsonl", "suite.prompts: no prompt file nowhere.jsonl"),
        ("suite=jsonl", "suite.prompts is empty"),
        ("data.heldout=train.jsonl", "8 of its 8 prompts are training prompts too"),
        ("data.train=empty.jsonl", "empty.jsonl holds no prompts"),
        ("data.train=broken.jsonl", "broken.jsonl:2:"),
        ("data.train=missing.jsonl", "data.train: no prompt file missing.jsonl"),
        ("target.device=cuda:99", "target.device=cuda:99"),
        ("suite.name=../../outside", "suite.name=../../outside names files"),
        ("suite.name=.hidden", "suite.name=.hidden names files"),
        ("suite.name=" + 101 * "x", "has 101 bytes, it may have 100"),
        ("logger.project=../outside", "logger.project=../outside would lie outside the run directory"),
        ("logger.project=/tmp/outside", "logger.project=/tmp/outside would lie outside the run directory"),
        ("target.path=--trust-remote-code", "target.path=--trust-remote-code: a dash in front would be read as an"),
        ("target.revision=-x", "target.revision=-x: a dash in front"),
        ("target.name=--x", "target.name=--x: a dash in front"),
        ("engine.quantization=--x", "engine.quantization=--x: a dash in front"),
        ("engine.args.tokenizer_mode=--x", "engine.args.tokenizer_mode=--x: a dash in front"),
        ("engine.args={load_format: [a,--x]}", "engine.args.load_format=--x: a dash in front"),
        ("engine.environment={A;B: 1}", "engine.environment"),
    ],
)
def test_refused_before_work_starts(capsys, workplace, tmp_path, argument, message):
    arguments = (argument,) if isinstance(argument, str) else argument
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text('{"turns": ["a"]}\n{"turns": [}\n')
    for code, _, err in (
        dry_run(capsys, *workplace, *arguments),
        (cli.main(["run", *workplace, *arguments]), *capsys.readouterr()),
    ):
        assert (code, err.count("\n")) == (2, 1), err
        assert message in err
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_zero_without_deepspeed(capsys, workplace, tmp_path, monkeypatch, strategy):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "deepspeed" else found(name, *rest)
    )
    code, err = cli.main(["fit", *workplace, f"trainer.strategy={strategy}"]), capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1), err
    assert f"trainer.strategy={strategy}" in err and "pip install 'spectrain[deepspeed]'" in err
    assert not (tmp_path / "run").exists()


def test_a_run_directory_of_another_target(capsys, workplace, tmp_path):
    manifest = {"schema_version": 1, "target": {"id": "other", "revision": "1"}, "stages": {}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    code, _, err = dry_run(capsys, *workplace)
    assert code == 2
    assert "run.dir=run belongs to another target (id other, this configuration has tiny)" in err


def test_eval_needs_a_drafter_of_this_target(capsys, workplace, tmp_path):
    code, _, err = dry_run(capsys, *workplace, command="eval")
    assert code == 2
    assert "run.dir: run/drafter holds no drafter (config.json is missing): run spectrain fit first" in err
    for wrong, message in (
        (
            {"hidden_size": 64, "target_hidden_size": 64},
            "drafter was trained for another target: its target_hidden_size is 64, this target's 32",
        ),
        ({"vocab_size": 101}, "drafter was trained for another target: its vocab_size is 101, this target's 304"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 9]},
            "drafter was trained for another target: it reads tap 9 of 7 layers",
        ),
        ({"model_type": 3}, "drafter/config.json describes no drafter"),
        (
            {"intermediate_size": 49},
            "drafter/model.safetensors: tensor 'layers.0.mlp.gate_proj.weight' has shape (48, 32)",
        ),
        ({"speculators_model_type": "medusa"}, "drafter/config.json: speculators_model_type is 'medusa'"),
    ):
        write_drafter(tmp_path / "drafter", **wrong)
        for command in ("eval", "fit"):
            code, _, err = dry_run(capsys, *workplace, "drafter.path=drafter", command=command)
            assert (code, err.count("\n")) == (2, 1)
            assert message in err


def write_drafter(folder, **wrong):
    """A random drafter that fits the target, but for what its configuration is then made to say."""
    layer = LayerShape("llama", 32, 48, 4, 2, 8, 1e-5, {"rope_type": "default", "rope_theta": 10000.0}, 512)
    shape = Eagle3Shape(layer, num_layers=1, taps=(1, 5), target_vocab_size=304, draft_vocab_size=100)
    drafter = Eagle3(shape, DraftVocab(torch.arange(100), 304, 1.0), DrafterConfig())
    save_drafter(drafter, folder, target="t", target_architectures=("LlamaForCausalLM",), num_speculative_tokens=3)
    config = json.loads((folder / "config.json").read_text())
    for name, value in wrong.items():
        (config["transformer_layer_config"] if name in config["transformer_layer_config"] else config)[name] = value
    (folder / "config.json").write_text(json.dumps(config))


def test_training_goes_on_from_a_folder_with_its_taps_and_never_from_its_own_output(capsys, workplace, tmp_path):
    write_drafter(tmp_path / "old/drafter")
    code, out, err = dry_run(capsys, *workplace, "drafter.path=old/drafter", command="fit")
    assert code == 0, err
    assert "taps [1, 5], from old/drafter" in out
    code, _, err = dry_run(capsys, *workplace, "drafter.path=old/drafter", "drafter.taps=[2,3]", command="fit")
    assert (code, err.count("\n")) == (2, 1)
    assert "drafter.taps=[2, 3], but the drafter in old/drafter reads [1, 5]: set drafter.taps=null" in err
    (tmp_path / "old/manifest.json").write_text('{"schema_version": 1, "target": null, "stages": {}}')
    code, _, err = dry_run(capsys, *workplace, "drafter.path=old/../old/drafter", "run.dir=old", command="fit")
    assert (code, err.count("\n")) == (2, 1)
    assert "is where this run writes its own drafter: use another run.dir" in err


@pytest.mark.parametrize("command", ["fit", "eval"])
def test_a_drafter_in_the_layout_of_others(capsys, workplace, tmp_path, command):
    """EAGLE's layout need not say which layers are read: the target decides."""
    layer = LayerShape("llama", 32, 48, 4, 2, 8, 1e-5, {"rope_type": "default", "rope_theta": 10000.0}, 512)
    shape = Eagle3Shape(layer, num_layers=1, taps=(2, 3, 4), target_vocab_size=304, draft_vocab_size=100)
    drafter = Eagle3(shape, DraftVocab(torch.arange(100), 304, 1.0), DrafterConfig())
    write(eagle3, drafter, tmp_path / "theirs", eagle_aux_hidden_state_layer_ids=None)
    code, out, err = dry_run(capsys, *workplace, "drafter.path=theirs", command=command)
    assert code == 0, err
    assert "eagle3, taps [2, 3, 4], from theirs" in out
    write(eagle3, drafter, tmp_path / "theirs", eagle_aux_hidden_state_layer_ids=[2, 3, 9])
    code, _, err = dry_run(capsys, *workplace, "drafter.path=theirs", command=command)
    assert (code, err.count("\n")) == (2, 1)
    assert "drafter theirs was trained for another target: it reads tap 9 of 7 layers" in err


@pytest.mark.parametrize("key", ["run.dir", "target.path", "drafter.path", "data.train", "suite.prompts"])
def test_names_that_no_file_can_have(capsys, workplace, tmp_path, key):
    before = sorted(tmp_path.rglob("*"))
    code, _, err = dry_run(capsys, *workplace, f"{key}={'x' * 300}")
    assert (code, err.count("\n")) == (2, 1)
    assert "x" * 300 in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_suite_that_was_trained_on_is_refused(capsys, workplace):
    code, _, err = dry_run(capsys, *workplace, "suite=jsonl", "suite.prompts=train.jsonl")
    assert (code, err.count("\n")) == (2, 1)
    assert "suite.prompts: 8 of its prompts are training prompts too, the first at train.jsonl:1" in err


def test_a_target_that_cannot_chat_is_refused_before_anything_is_written(capsys, workplace, target, tmp_path):
    mute = shutil.copytree(target, tmp_path / "mute")
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        if (mute / file).is_file():
            kept = {} if file.endswith("jinja") else json.loads((mute / file).read_text())
            kept.pop("chat_template", None)
            (mute / file).unlink() if file.endswith("jinja") else (mute / file).write_text(json.dumps(kept))
    code, err = cli.main(["run", *workplace, f"target.path={mute}"]), capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert "has no chat template" in err
    assert not (tmp_path / "run").exists()


def test_eval_without_a_run_needs_prompts_of_its_own(capsys, workplace, target):
    code, _, err = dry_run(capsys, f"target.path={target}", "run.dir=run", command="eval")
    assert code == 2
    assert "suite.prompts=heldout needs the run's prompts" in err


def test_how_long_answers_are_generated_does_not_concern_eval_where_the_suite_says_it(capsys, workplace, tmp_path):
    write_drafter(tmp_path / "drafter")
    short = [*workplace, "drafter.path=drafter", "sampling.max_new_tokens=512", "suite.prompts=heldout.jsonl"]
    code, _, err = dry_run(capsys, *short, "suite.name=mine", "suite.max_new_tokens=8", command="eval")
    assert code == 0, err
    code, _, err = dry_run(capsys, *short, "suite.name=mine", command="eval")
    assert (code, "sampling.max_new_tokens=512" in err) == (2, True)


def test_a_disk_that_is_too_small(workplace, monkeypatch, capsys):
    class Usage:
        free = 10_000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    code, _, err = dry_run(capsys, *workplace)
    assert code == 2
    # 12 documents of at most 256 tokens, each (3 taps + 1) × 32 float32 values and 9 bytes
    assert "the hidden states of 12 documents need up to" in err and "kB" in err
    assert "has 10 kB free" in err and "the disk mounted on /" in err
    assert "0.0" not in err


def test_the_estimate_counts_what_the_store_will_hold(capsys, workplace, target):
    from spectrain.config.commands import COMMANDS
    from spectrain.config.loading import compose
    from spectrain.stages.checks import prepare

    context = prepare(compose([*workplace, "hidden_states.dtype=bfloat16"]), COMMANDS["run"])
    numbers = plan.estimate(context)
    # (3 taps + 1) × 32 values of 2 bytes, and 4 + 1 + 4 bytes for id, mask and normalizer.
    assert numbers.states_bytes == numbers.tokens * (4 * 32 * 2 + 9)
    assert numbers.generated_tokens == 12 * 16
    # Counted by hand: fc 3·32·32; q, k, v from 64 to (4 + 2 + 2)·8; o; gate, up, down of 48; head of 100 rows.
    assert numbers.drafter_parameters == 3 * 32 * 32 + 64 * 64 + 32 * 32 + 3 * 32 * 48 + 100 * 32


def test_the_estimate_of_the_target_is_its_size(target, workplace):
    from safetensors import safe_open

    from spectrain.target.spec import TargetSpec

    with safe_open(target / "model.safetensors", "pt") as file:
        matrices = [file.get_tensor(name).numel() for name in file.keys() if "norm" not in name]  # noqa: SIM118 (not a dict)
    assert target_parameters(TargetSpec.from_folder(target)) == sum(matrices)
