"""recipe=gemma4_mtp_smoke from prompts to report, what it writes, and what is refused before work starts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_target
from transformers import Gemma4AssistantForCausalLM

from spectrain import cli
from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.drafters.autoregressive.gemma4_mtp import Gemma4MTP
from spectrain.drafters.drafter_folder import load_drafter
from spectrain.drafters.serving_config import read_serving_config
from spectrain.errors import ConfigError, InputError
from spectrain.evaluation.records import read_records
from spectrain.target.smoke_targets import tiny_folder

FEWER = [
    *("recipe=gemma4_mtp_smoke", "data.max_train=12", "data.max_heldout=3", "sampling.max_new_tokens=12"),
    *("trainer.epochs=3", "suite.max_prompts=2", "suite.baselines=[none]"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("gemma4") / "run"
    assert cli.main(["run", *FEWER, f"run.dir={run}"]) == 0
    return run


def test_it_is_decoded_without_loss_as_was_predicted(finished: Path) -> None:
    records = {record.method: record for record in read_records(finished / "eval")}
    mine = records["gemma4_mtp"]
    assert mine.output_identical and mine.rounds > 10
    assert (mine.simulated_acceptance_length, mine.simulated_rounds) == (mine.acceptance_length, mine.rounds)
    assert "Gemma-4 MTP drafter" in (finished / "report.html").read_text(encoding="utf-8")


def test_the_store_has_keys_and_values_of_the_two_layers_that_others_share(finished: Path) -> None:
    store = StoredHiddenStates(finished / "hidden_states")
    assert store.meta.kv_layers == ((2, 1, 32), (3, 1, 64)) and store.meta.tap_ids == ()
    assert {layer: pair[0].shape[1:] for layer, pair in store[0].target_kv.items()} == {2: (1, 32), 3: (1, 64)}


def test_transformers_loads_what_fit_writes(finished: Path) -> None:
    ours = load_drafter(finished / "drafter")
    assistant, info = Gemma4AssistantForCausalLM.from_pretrained(finished / "drafter", output_loading_info=True)
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
    theirs = assistant.state_dict()
    for name, tensor in ours.body.state_dict().items():
        assert torch.equal(theirs[name], tensor)
    assert torch.equal(theirs["lm_head.weight"], ours.lm_head_DH)


def test_serve_tells_vllm_the_folder_and_the_number(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", f"run.dir={finished}", "decoding.num_speculative_tokens=2", "--print"]) == 0
    told = capsys.readouterr().out.split("--speculative-config ")[1].split("'")[1]
    assert json.loads(told) == {"model": str((finished / "drafter").resolve()), "num_speculative_tokens": 2}


def test_a_path_that_vllm_takes_for_another_kind_is_refused(finished: Path, tmp_path: Path) -> None:
    other = shutil.copytree(finished / "drafter", tmp_path / "no-dflash")
    with pytest.raises(ConfigError, match="vLLM takes a folder with 'dflash' in its path for another kind"):
        read_serving_config(str(other)).speculative_config()


def test_nothing_is_done_twice_and_a_folder_is_trained_further(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "drafter" / "model.safetensors").stat().st_mtime_ns
    assert cli.main(["fit", f"run.dir={finished}"]) == 0
    assert (finished / "drafter" / "model.safetensors").stat().st_mtime_ns == before
    old = shutil.copytree(finished / "drafter", tmp_path / "old")
    run = tmp_path / "run"
    assert cli.main(["fit", *FEWER, f"drafter.path={old}", f"run.dir={run}"]) == 0, capsys.readouterr().err
    new = load_drafter(run / "drafter")
    assert isinstance(new, Gemma4MTP) and new.shape == load_drafter(old).shape


def test_plan_says_what_keys_and_values_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *FEWER, f"run.dir={tmp_path / 'run'}"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "keys and values of the target's layers [2, 3]" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["engine=vllm"], "engine=vllm: gemma4_mtp drafters learn from the target's own keys and values"),
        (["engine=vllm"], "use engine=hf"),
        (["drafter.taps=[1,2]"], "drafter.taps: a gemma4_mtp drafter has none of its own"),
        (["drafter.draft_vocab_size=100"], "drafter.draft_vocab_size: a gemma4_mtp drafter has none"),
        (["drafter.head_dim=32"], "drafter.head_dim: a gemma4_mtp drafter has none"),
        (["drafter.attention=eager"], "drafter.attention=eager: a gemma4_mtp drafter attends"),
        (["drafter.eagle3.fc_norm=true"], "drafter.method=gemma4_mtp does not read drafter.eagle3"),
        (["drafter.gemma4_mtp.centroid_top_k=4"], "drafter.gemma4_mtp.centroid_top_k has no effect"),
        (
            ["drafter.gemma4_mtp.num_centroids=7", "drafter.gemma4_mtp.centroid_top_k=2"],
            "num_centroids=7 does not divide the vocabulary of 304",
        ),
    ],
)
def test_what_is_refused_before_work_starts(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["fit", *FEWER, *options, f"run.dir={tmp_path / 'run'}", "--dry-run"])
    error = capsys.readouterr().err
    assert code == 2 and message in error
    assert error.count("\n") == 1 and not (tmp_path / "run").exists()


def test_another_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny_target("llama", tmp_path / "llama")
    options = [f"target.path={target}", "target.tiny=null", f"run.dir={tmp_path / 'run'}"]
    assert cli.main(["fit", *FEWER, *options, "--dry-run"]) == 2
    assert (
        "drafter=gemma4_mtp drafts for Gemma-4 alone, and the target is of model type 'llama'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sliding_window", 16, "its sliding_window is 16, the target's 32"),
        ("num_key_value_heads", 2, "read 2 key-value heads of 32, the target's have 1 of 32"),
        (
            "rope_parameters",
            {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
            "rope_parameters of its full_attention layers are",
        ),
        ("hidden_activation", "silu", "hidden_activation is 'silu'"),
    ],
)
def test_an_assistant_of_another_target_is_named(
    finished: Path, field: str, value: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = shutil.copytree(finished / "drafter", tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    config["text_config"][field] = value
    (old / "config.json").write_text(json.dumps(config))
    assert cli.main(["fit", *FEWER, f"drafter.path={old}", f"run.dir={tmp_path / 'run'}", "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_a_matrix_that_is_stored_under_both_names(finished: Path, tmp_path: Path) -> None:
    """As writers do that do not know it is one."""
    old = shutil.copytree(finished / "drafter", tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    del config["spectrain"]  # a folder of others: no digests
    (old / "config.json").write_text(json.dumps(config))
    tensors = load_file(old / "model.safetensors")
    matrix = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": matrix.clone()}, old / "model.safetensors")
    assert torch.equal(load_drafter(old).lm_head_DH, matrix)
    save_file({**tensors, "lm_head.weight": matrix + 1}, old / "model.safetensors")
    with pytest.raises(InputError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
        load_drafter(old)


def test_the_target_is_the_same_whoever_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_file(tiny_folder("gemma4") / "model.safetensors")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    again = load_file(tiny_folder("gemma4") / "model.safetensors")
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)


def test_it_is_published_as_the_assistant_that_it_is(finished: Path) -> None:
    asked = [f"run.dir={finished}", "publish.repo=org/assistant", "publish.base_model=org/tiny"]
    assert cli.main(["publish", *asked, "publish.dry_run=true", "publish.unverified=true"]) == 0
    folder = finished / "publish"
    card = (folder / "README.md").read_text(encoding="utf-8")
    speculation = r'{"model": "org/assistant", "num_speculative_tokens": [1-3]}'  # what its evaluations recommend
    assert re.search(f"^vllm serve org/tiny --speculative-config '{speculation}'$", card, re.MULTILINE)
    assert "library_name: transformers" in card and "base_model: org/tiny" in card
    assert not [
        path for path in folder.rglob("*") if path.is_file() and str(finished.parent).encode() in path.read_bytes()
    ]
    assert read_serving_config(str(folder)).target == "org/tiny"
    assistant, info = Gemma4AssistantForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
    assert torch.equal(assistant.state_dict()["lm_head.weight"], load_drafter(finished / "drafter").lm_head_DH)
