"""``spectrain serve``: the command it makes of a drafter, a run directory and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drafter_tools import HIDDEN, VOCAB, Options, random_drafter
from evaluation_records import halving_record
from foreign_layouts import eagle3, write
from safetensors.torch import save_file
from served_drafters import (
    COMMIT,
    command,
    drafter,
    rewrite,
    speculation,
    target,
    value_of,
    write_drafter,
)
from tiny import tiny_config

from spectrain import cli
from spectrain.config.loading import compose
from spectrain.drafters.serving_config import drafter_digest
from spectrain.engines.vllm import args as vllm_options
from spectrain.errors import ConfigError, InputError, RunError
from spectrain.stages import serve as stage
from spectrain.target.resolve import weights_fingerprint

pytestmark = pytest.mark.vllm  # what is started, and with which arguments, goes by the vLLM that is installed


__all__ = ["drafter", "target"]


# --- the command ---------------------------------------------------------------------------------------------------


def test_a_folder_alone_gives_target_method_and_number(drafter, target):
    arguments = command(f"drafter.path={drafter}")
    assert arguments[0] == sys.executable
    assert str(target) in arguments
    assert speculation(arguments) == {"model": str(drafter), "method": "eagle3", "num_speculative_tokens": 4}
    # Limits and seeds of spectrain's own runs are none of a server's.
    assert not {"--max-model-len", "--generation-config", "--seed", "--revision", "--trust-remote-code"} & set(
        arguments
    )


def test_engine_settings_and_flags_are_handed_on(drafter):
    arguments = command(
        f"drafter.path={drafter}",
        *(
            "engine.tensor_parallel_size=2",
            "engine.quantization=fp8",
            "engine.args.max_model_len=1024",
            "target.dtype=bfloat16",
        ),
        *("--", "--port", "8001", "--api-key", "s p"),
    )
    assert value_of(arguments, "--tensor-parallel-size") == "2"
    assert value_of(arguments, "--quantization") == "fp8"
    assert value_of(arguments, "--max-model-len") == "1024"
    assert value_of(arguments, "--dtype") == "bfloat16"
    assert arguments[-4:] == ["--port", "8001", "--api-key", "s p"]
    with pytest.raises(ConfigError, match="no engine argument max_modellen"):
        command(f"drafter.path={drafter}", "engine.args.max_modellen=5")


def test_on_gpus_it_is_vllm_serve(drafter, target, monkeypatch):
    monkeypatch.setattr(vllm_options, "is_cpu_build", lambda: False)
    arguments = command(f"drafter.path={drafter}")
    assert arguments[1:6] == ["-P", "-m", "vllm.entrypoints.cli.main", "serve", str(target)]
    assert arguments[6] == "--speculative-config"
    assert len(arguments) == 8  # everything else is as vLLM has it


def test_the_runs_own_drafter_not_the_one_it_went_on_from(drafter, target, tmp_path):
    other = write_drafter(tmp_path / "other", str(target))
    run_dir = drafter.parent
    (run_dir / "config.yaml").write_text(f"target: {{path: '{target}'}}\ndrafter: {{path: '{other}'}}\n")
    (run_dir / "manifest.json").write_text(json.dumps({"schema_version": 1, "target": None, "stages": {}}))
    assert speculation(command(f"run.dir={run_dir}"))["model"] == str(drafter)
    assert speculation(command(f"run.dir={run_dir}", f"drafter.path={other}"))["model"] == str(other)


def test_nothing_to_serve(tmp_path):
    with pytest.raises(ConfigError, match="serve what"):
        command("target.path=x")
    with pytest.raises(InputError, match="holds no drafter: run spectrain fit first"):
        command(f"run.dir={tmp_path / 'none'}")


def test_what_serve_cannot_do_is_refused_not_ignored(drafter):
    with pytest.raises(ConfigError, match="vLLM verifies all drafts"):
        command(f"drafter.path={drafter}", "decoding.draft_policy=threshold")
    with pytest.raises(ConfigError, match="speculative_config is set by serve"):
        command(f"drafter.path={drafter}", "engine.args.speculative_config={draft_sample_method: probabilistic}")


# --- the target ----------------------------------------------------------------------------------------------------


def test_a_target_on_the_hub_comes_at_the_commit_it_was_trained_for(tmp_path):
    arguments = command(f"drafter.path={write_drafter(tmp_path / 'd', 'org/target', target_revision=COMMIT)}")
    assert "org/target" in arguments
    assert value_of(arguments, "--revision") == COMMIT
    assert "--revision" not in command(
        f"drafter.path={write_drafter(tmp_path / 'e', 'org/target', target_revision=64 * 'a')}"
    )


def test_the_target_that_is_named_wins(tmp_path, target):
    (target / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    drafter = write_drafter(tmp_path / "d", "org/target")
    assert str(target) in command(f"drafter.path={drafter}", f"target.path={target}")


def test_a_target_that_is_gone_has_to_be_named(tmp_path):
    drafter = write_drafter(tmp_path / "d", str(tmp_path / "gone"))
    with pytest.raises(InputError, match=r"gone, which is not here: name the target with target.path"):
        command(f"drafter.path={drafter}")


def test_a_drafter_in_the_layout_of_others_is_served_as_it_is(tmp_path, target):
    (target / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    drafter = write(eagle3, random_drafter(Options(), dtype=torch.float32), tmp_path / "theirs")
    found = speculation(command(f"drafter.path={drafter}", f"target.path={target}"))
    assert found == {"model": str(drafter), "method": "eagle3", "num_speculative_tokens": 3}
    with pytest.raises(
        InputError, match=r"theirs does not say what it was trained for: name the target with target.path"
    ):
        command(f"drafter.path={drafter}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 2 * HIDDEN}, "its hidden size is 16, that of"),
        ({"vocab_size": VOCAB + 1}, "its vocabulary is 23"),
        ({"num_hidden_layers": 3}, "it reads layer 4, .* has 3"),
    ],
)
def test_a_drafter_for_another_target_is_refused(drafter, target, changes, message):
    fields = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 7, **changes}
    tiny_config("llama", **fields).save_pretrained(target)
    with pytest.raises(InputError, match=message):
        command(f"drafter.path={drafter}")


# --- how many drafts -----------------------------------------------------------------------------------------------


def evaluated(run_dir: Path, digest: str, **speedups: float) -> None:
    """An eval/ as the stage writes it: a record and an entry of the manifest for each number of drafts."""
    stages = {}
    revision = weights_fingerprint(run_dir.parents[1] / "a target")
    for name, speedup in speedups.items():
        n = int(name.removeprefix("n"))
        path = halving_record(n, speedup=speedup, target_revision=revision).write(run_dir / "eval")
        stages[f"eval/s-{name}"] = {
            "status": "done",
            "inputs": {"fixed": {"drafter": digest}, "growing": {}},
            "outputs": {"record": f"eval/{path.name}"},
        }
    (run_dir / "manifest.json").write_text(json.dumps({"schema_version": 1, "target": None, "stages": stages}))


def test_evaluation_recommends_the_number(drafter, capsys):
    run_dir = drafter.parent
    (run_dir / "eval").mkdir()
    evaluated(run_dir, drafter_digest(drafter), n2=1.2, n3=1.6, n5=1.4)
    assert speculation(command(f"run.dir={run_dir}"))["num_speculative_tokens"] == 3
    assert "3 drafts a round: 1.60x measured" in capsys.readouterr().err
    assert (
        speculation(command(f"drafter.path={drafter}"))["num_speculative_tokens"] == 3
    )  # found beside the folder, too
    assert (
        speculation(command(f"run.dir={run_dir}", "decoding.num_speculative_tokens=1"))["num_speculative_tokens"] == 1
    )


def test_what_was_measured_of_other_weights_says_nothing(drafter, target):
    run_dir = drafter.parent
    (run_dir / "eval").mkdir()
    evaluated(run_dir, drafter_digest(drafter), n2=1.2)
    assert speculation(command(f"run.dir={run_dir}"))["num_speculative_tokens"] == 2
    write_drafter(drafter, str(target), step=7)
    assert speculation(command(f"run.dir={run_dir}"))["num_speculative_tokens"] == 4  # the folder's


def test_damaged_weights_are_not_served_and_a_changed_configuration_is_said(drafter, capsys):
    config = json.loads((drafter / "config.json").read_text())
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 5
    (drafter / "config.json").write_text(json.dumps(config))
    assert speculation(command(f"drafter.path={drafter}"))["num_speculative_tokens"] == 5
    assert "config.json has changed since the drafter was written" in capsys.readouterr().err
    content = bytearray((drafter / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (drafter / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors has changed since it was written"):
        command(f"drafter.path={drafter}")


def test_what_was_measured_with_another_target_says_nothing(drafter, target, capsys):
    (drafter.parent / "eval").mkdir()
    evaluated(drafter.parent, drafter_digest(drafter), n2=1.2)
    save_file({"weight": torch.ones(2)}, target / "model.safetensors")  # trained further since
    assert speculation(command(f"drafter.path={drafter}"))["num_speculative_tokens"] == 4  # the folder's
    said = capsys.readouterr().err
    assert "measured with another target" in said and "1.20x" not in said


def test_a_drafter_that_does_not_pay_is_said_to(drafter, capsys):
    (drafter.parent / "eval").mkdir()
    evaluated(drafter.parent, drafter_digest(drafter), n2=0.9)
    command(f"drafter.path={drafter}")
    assert "no speculation at all was faster" in capsys.readouterr().err


def test_a_block_drafter_has_no_more_slots_than_it_was_trained_with(drafter):
    rewrite(drafter, speculators_model_type="dflash", block_size=4, sample_from_anchor=False)
    assert (
        speculation(command(f"drafter.path={drafter}", "decoding.num_speculative_tokens=3"))["num_speculative_tokens"]
        == 3
    )
    with pytest.raises(ConfigError, match="drafts at most 3: lower it"):
        command(f"drafter.path={drafter}", "decoding.num_speculative_tokens=4")


# --- printing and starting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--print", "--dry-run"])
def test_printed_commands_are_what_a_shell_would_run(drafter, target, capsys, option, monkeypatch):
    """What is secret comes from variables of that shell."""
    monkeypatch.setattr(stage, "_run", lambda *arguments: pytest.fail("a server was about to start"))
    given = [f"drafter.path={drafter}", "engine.environment.SOME=hidden one", "engine.args.hf_token=hf_abc"]
    flags = ["--port", "1", "--api-key", "k 1", "k2", "--ssl-key=k3", "--chat-template", "a b"]
    assert cli.main(["serve", *given, option, "--", *flags]) == 0
    line, notes = capsys.readouterr()
    assert line.count("\n") == 1
    for secret in ("hidden one", "hf_abc", "k 1", "k2", "k3"):
        assert secret not in line + notes
    variables = {"SOME": "a b", "HF_TOKEN": "t t", "API_KEY": "k", "SSL_KEY": "s s"}
    assert all(name in notes for name in variables)
    told = subprocess.run(
        ["bash", "-c", f"set -- {line.strip()}; printf '%s\\n' \"$@\""],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    words = told.stdout.splitlines()
    assert {"SOME=a b", "HF_TOKEN=t t", str(target)} <= set(words)
    assert words[-8:] == ["--port", "1", "--api-key", "k", "k", "--ssl-key=s s", "--chat-template", "a b"]


def test_the_server_gets_its_variables_over_ours_and_its_end_is_ours(drafter, monkeypatch, capfd):
    names = ("SOME", "VLLM_API_KEY", "HF_TOKEN", "PATH")
    show = f"import os, sys; print(*(os.environ[name] for name in {names}), *sys.argv[1:]); sys.exit(3)"
    monkeypatch.setattr(stage, "_server", lambda target: [sys.executable, "-c", show])
    secrets = ["engine.environment.SOME=x", "engine.args.api_key=k", "engine.args.hf_token=t"]
    config = compose([f"drafter.path={drafter}", *secrets])
    with pytest.raises(RunError, match="exit code 3"):
        stage.serve(config, [f"drafter.path={drafter}"], ["--port", "1"])
    words = capfd.readouterr().out.split()
    assert words[:4] == ["x", "k", "t", os.environ["PATH"]]
    assert words[-2:] == ["--port", "1"]
    assert not {"k", "t", "x"} & set(words[4:])  # everybody on the machine can read a command line


@pytest.mark.parametrize(
    ("args", "flags", "expected"),
    [
        ({}, [], 0),
        ({"shutdown_timeout": 7}, [], 7),
        ({"shutdown_timeout": 7}, ["--shutdown-timeout=9", "--port", "1"], 9),
    ],
)
def test_requests_are_finished_where_vllm_is_told_to(drafter, args, flags, expected):
    config = compose([f"drafter.path={drafter}", *(f"engine.args.{name}={value}" for name, value in args.items())])
    assert stage._shutdown_s(config, flags) == expected


def test_chat_requests_are_rendered_as_the_drafter_was_trained(drafter, target):
    plain, told = (
        command(f"drafter.path={drafter}", *more) for more in ((), ("target.template_kwargs={enable_thinking: false}",))
    )
    assert [word for word in told if word not in plain] == [
        "--default-chat-template-kwargs",
        '{"enable_thinking": false}',
    ]


def test_options_of_serve_are_no_options_of_others():
    assert cli.parse(["serve", "run.dir=x", "--print", "--", "--print", "-m"]).flags == ("--print", "-m")
    for arguments in (["fit", "--print"], ["fit", "--", "--port"]):
        with pytest.raises(ConfigError, match="unknown option --"):
            cli.parse(arguments)
    assert cli.main(["serve", "run.dir=x", "-m"]) == 2


# --- targets that turn otherwise beyond a length ---------------------------------------------------------------------


@pytest.mark.parametrize(("trained", "told"), [(128, "128"), (300, "305")])
def test_the_length_that_decides_how_the_target_turns_is_passed_on(tmp_path, target, trained, told):
    """Up to the original length the server gets exactly that: with vLLM's own default it would turn by long factors."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128, "rope_theta": 1e4}
    rewrite(target, rope_parameters=rope | {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16})
    folder = write_drafter(tmp_path / "phi" / "drafter", str(target), max_model_len=trained)
    assert value_of(command(f"drafter.path={folder}"), "--max-model-len") == told
    with pytest.raises(ConfigError, match=r"engine\.args\.max_model_len"):
        command(f"drafter.path={folder}", f"+engine.args.max_model_len={300 if trained == 128 else 128}")


def test_others_are_served_with_their_whole_context(drafter):
    assert "--max-model-len" not in command(f"drafter.path={drafter}")
