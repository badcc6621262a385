"""How vLLM is started, and what its log says when it ends; without vLLM running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain.config.commands import COMMANDS
from spectrain.config.loading import compose
from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.engines.vllm import args as vllm_args
from spectrain.engines.vllm.args import argument_names, check_args, cli_flags, dtype_argument, engine_args, environment
from spectrain.engines.vllm.guard import guarded
from spectrain.engines.vllm.logs import last_errors
from spectrain.engines.vllm.process import VLLMProcess
from spectrain.engines.vllm.server_process import ServerProcess, server_command
from spectrain.errors import ConfigError, RunError
from spectrain.stages.checks import check_config

pytestmark = pytest.mark.vllm


def write_config(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def cpu_build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(vllm_args, "is_cpu_build", lambda: request.param)
    return bool(request.param)


def test_arguments_of_a_plain_engine(tmp_path: Path, cpu_build: bool) -> None:
    folder = write_config(tmp_path, max_position_embeddings=4096, dtype="bfloat16")
    args = engine_args(EngineConfig(tensor_parallel_size=2, quantization=None), TargetConfig(max_length=1000), folder)
    assert args["model"] == str(folder)
    assert args["max_model_len"] == 1001
    assert args["tensor_parallel_size"] == 2
    assert args["generation_config"] == "vllm"
    assert args["dtype"] == ("float32" if cpu_build else "bfloat16")
    assert args["enforce_eager"] is cpu_build
    assert "quantization" not in args and "max_num_seqs" not in args and "revision" not in args


def test_what_is_said_later_wins(tmp_path: Path, cpu_build: bool) -> None:
    config = EngineConfig(max_num_seqs=4, enforce_eager=False, args={"max_num_seqs": 5, "seed": 9, "block_size": 32})
    args = engine_args(config, TargetConfig(), write_config(tmp_path), {"seed": 11})
    assert (args["max_num_seqs"], args["seed"], args["block_size"], args["enforce_eager"]) == (5, 11, 32, False)


@pytest.mark.parametrize(
    ("positions", "expected"), [(4096, 1004), (1004, 1004), (1002, 1002), (1000, 1000), (None, 1004)]
)
def test_drafts_have_room_up_to_the_targets_own_limit(tmp_path: Path, positions: int | None, expected: int) -> None:
    folder = write_config(tmp_path, text_config={"max_position_embeddings": positions} if positions else {})
    extra = {"speculative_config": {"num_speculative_tokens": 3}}
    assert engine_args(EngineConfig(), TargetConfig(max_length=1000), folder, extra)["max_model_len"] == expected


def test_a_target_of_the_hub_keeps_its_revision() -> None:
    args = engine_args(EngineConfig(), TargetConfig(revision="abc"), "owner/name")
    assert (args["model"], args["revision"]) == ("owner/name", "abc")


def test_dtype_is_that_of_the_embedded_engine(tmp_path: Path, cpu_build: bool) -> None:
    folder = write_config(tmp_path, text_config={"torch_dtype": "float32"})
    assert dtype_argument("auto", folder) == "float32"  # vLLM's own "auto" would round
    assert dtype_argument("float16", folder) == "float16"
    assert dtype_argument("auto", folder, quantization="awq") == "auto"
    assert dtype_argument("auto", write_config(tmp_path, dtype="bfloat16", quantization_config={"bits": 4})) == "auto"
    assert dtype_argument("auto", Path("owner/name")) == ("float32" if cpu_build else "auto")


def test_names_are_vllms_own_and_a_slip_is_named() -> None:
    assert {
        "model",
        "max_model_len",
        "speculative_config",
        "kv_transfer_config",
        "tensor_parallel_size",
    } <= argument_names()
    check_args({"max_num_batched_tokens": 1, "speculative_config": {"anything": 1}})
    with pytest.raises(
        ConfigError, match=r"engine\.args\.max_modle_len: vLLM .* did you mean engine\.args\.max_model_len\?"
    ):
        check_args({"max_modle_len": 1})
    with pytest.raises(ConfigError, match="no engine argument zzz"):
        check_args({"zzz": 1})


def test_names_are_those_of_the_class_itself() -> None:
    """The source is read, not imported; so it must be shown that this finds all of them."""
    # In another process, because vLLM's import leaves traces.
    ask = "import json; from vllm.engine.arg_utils import EngineArgs; print(json.dumps(sorted(EngineArgs.__dataclass_fields__)))"  # noqa: E501
    shown = subprocess.run([sys.executable, "-P", "-c", ask], capture_output=True, text=True, check=True).stdout
    assert json.loads(shown.splitlines()[-1]) == sorted(argument_names())


def test_flags_of_the_command_line() -> None:
    args = {
        "model": "a b",
        "enforce_eager": True,
        "trust_remote_code": False,
        "max_model_len": None,
        "seed": 0,
        "served_model_name": ["x", "y"],
        "speculative_config": {"model": "/m", "n": 3},
    }
    assert cli_flags(args) == [
        *(
            "--model",
            "a b",
            "--enforce-eager",
            "--no-trust-remote-code",
            "--seed",
            "0",
            "--served-model-name",
            "x",
            "y",
        ),
        *("--speculative-config", '{"model": "/m", "n": 3}'),
    ]


def test_variables_on_a_cpu_spread_the_cores_over_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_args, "is_cpu_build", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 8, 9})
    monkeypatch.setattr(vllm_args.sys, "prefix", str(tmp_path))
    for name in ("OMP_NUM_THREADS", "LD_PRELOAD", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    variables = environment(EngineConfig(tensor_parallel_size=2, environment={"X": "1", "VLLM_CPU_KVCACHE_SPACE": "7"}))
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "2,3|5,8"
    assert variables["OMP_NUM_THREADS"] == "2"
    assert (variables["X"], variables["VLLM_CPU_KVCACHE_SPACE"]) == ("1", "7")
    assert "LD_PRELOAD" not in variables
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    monkeypatch.setenv("LD_PRELOAD", "/other.so")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    variables = environment(EngineConfig())
    assert variables["LD_PRELOAD"] == f"{tmp_path}/lib/libiomp5.so:/other.so"
    assert "OMP_NUM_THREADS" not in variables  # the user's
    # Two OpenMPs: vLLM's processes end at once. Where vLLM was looked at before, it has added torch's.
    monkeypatch.setenv("LD_PRELOAD", f"/torch.libs/libgomp-a34b3233.so.1 /libtcmalloc.so:{tmp_path}/lib/libiomp5.so")
    assert environment(EngineConfig())["LD_PRELOAD"] == f"{tmp_path}/lib/libiomp5.so:/libtcmalloc.so"


def test_nothing_of_a_cpu_is_set_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_args, "is_cpu_build", lambda: False)
    assert environment(EngineConfig(environment={"A": "b"})) == {"VLLM_NO_USAGE_STATS": "1", "A": "b"}


def test_any_argument_and_variable_can_be_given_on_the_command_line() -> None:
    config = compose(
        [
            *(
                "target.path=x",
                "engine=vllm",
                "engine.args.max_num_seqs=3",
                "engine.args={speculative_config: {n: [1, 2]}, a: 0.5}",
            ),
            *(
                "engine.args.kv_cache_dtype=fp8",
                "engine.environment.CUDA_VISIBLE_DEVICES=3",
                "engine.environment.B=x/y",
            ),
        ]
    )
    assert config.engine.args == {
        "max_num_seqs": 3,
        "speculative_config": {"n": [1, 2]},
        "a": 0.5,
        "kv_cache_dtype": "fp8",
    }
    assert config.engine.environment == {"CUDA_VISIBLE_DEVICES": "3", "B": "x/y"}
    with pytest.raises(ConfigError, match=r"engine\.args must be a mapping"):
        compose(["target.path=x", "engine.args=3"])


LOG = """\
(EngineCore pid=7) INFO 11-29 18:05:36 [kv_cache_utils.py:2327] error rate: none
(EngineCore pid=7) ERROR 11-29 18:05:37 [core.py:1086] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-29 18:05:37 [core.py:1086]   File "x.py", line 3, in f
(EngineCore pid=7) ERROR 11-29 18:05:37 [core.py:1086] ValueError: head size 8 is not supported
Traceback (most recent call last):
  File "y.py", line 4
ValueError: head size 8 is not supported
\x1b[31mRuntimeError: Engine core initialization failed\x1b[0m
pydantic.ValidationError: 1 validation error for ModelConfig
  Value error, max_model_len (9) is greater than 8
  File "z.py", line 5
(EngineCore pid=7) INFO 11-29 18:05:38 [x.py:1] bye
"""


def test_the_last_errors_of_a_log_are_quoted_once_each(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("OSError: of an earlier run\n", encoding="utf-8")
    start = log.stat().st_size
    assert last_errors(log, start).endswith("is empty")
    log.write_text(log.read_text(encoding="utf-8") + LOG, encoding="utf-8")
    said = last_errors(log, start)
    assert str(log) in said
    assert said.splitlines()[1:] == [
        "  ValueError: head size 8 is not supported",
        "  RuntimeError: Engine core initialization failed",
        "  pydantic.ValidationError: 1 validation error for ModelConfig; Value error, max_model_len (9) is greater "
        "than 8",
    ]
    assert "OSError" in last_errors(log)


def test_a_log_without_errors_gives_its_last_lines_and_a_missing_one_says_so(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("".join(f"line {number}\n" for number in range(20)), encoding="utf-8")
    assert last_errors(log, lines=2).splitlines()[1:] == ["  line 18", "  line 19"]
    assert "cannot be read" in last_errors(tmp_path / "none.log")


def test_what_cannot_work_is_said_before_anything_starts() -> None:
    given = ["target.path=x", "data=varied"]
    with pytest.raises(ConfigError, match=r"did you mean engine\.args\.block_size"):
        check_config(compose([*given, "engine=vllm", "engine.args.blok_size=3"]), COMMANDS["generate"])
    with pytest.raises(ConfigError, match="needs vLLM"):
        check_config(compose([*given, "capture.during_generation=true"]), COMMANDS["generate"])
    with pytest.raises(ConfigError, match=r"needs engine\.connector=spectrain"):
        check_config(
            compose([*given, "engine=vllm", "capture.during_generation=true", "engine.connector=stock"]),
            COMMANDS["generate"],
        )
    # Servers that run already have the arguments they have.
    check_config(compose([*given, "engine=vllm_server", "engine.urls=[http://a:1]"]), COMMANDS["generate"])


@pytest.mark.parametrize("engine", [("engine=hf",), ("engine=vllm_server", "engine.urls=[http://a:1]")])
def test_how_states_were_captured_is_no_matter_to_eval(engine: tuple[str, ...]) -> None:
    """A run directory remembers it."""
    check_config(compose(["target.path=x", "capture.during_generation=true", *engine]), COMMANDS["eval"])


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("model=/other", r"set target\.path instead"),
        ("dtype=bfloat16", r"set target\.dtype instead"),
        ("quantization=fp8", r"set engine\.quantization instead"),
        ("tensor_parallel_size=2", r"set engine\.tensor_parallel_size instead"),
        ("kv_transfer_config.kv_role=kv_both", "leave it out"),
        ("speculative_config.method=ngram", "leave it out"),
    ],
)
def test_nothing_runs_that_is_not_what_is_written_down(argument: str, advice: str) -> None:
    config = compose(["target.path=x", "data=varied", "engine=vllm", f"engine.args.{argument}"])
    with pytest.raises(ConfigError, match=rf"engine\.args\.{argument.partition('=')[0].partition('.')[0]} .*{advice}"):
        check_config(config, COMMANDS["eval"])


def test_generation_may_speculate() -> None:
    check_config(
        compose(["target.path=x", "data=varied", "engine=vllm", "engine.args.speculative_config.method=ngram"]),
        COMMANDS["generate"],
    )


@pytest.mark.parametrize("blocked", ["logs", "vllm.log"])
def test_logs_that_cannot_be_written_are_named(tmp_path: Path, blocked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By either engine, before anything is started."""
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("something was started"))
    log = tmp_path / "logs" / "vllm.log"
    if blocked == "logs":
        log.parent.write_text("a file")
    else:
        log.mkdir(parents=True)
    with pytest.raises(RunError, match=rf"the log {log} cannot be written .*another run\.dir"):
        VLLMProcess(EngineConfig(name="vllm"), {}, log)
    with pytest.raises(RunError, match=f"the log {log} cannot be written"):
        ServerProcess("server", ["no-such-command"], {}, log).start()


def test_an_interrupted_start_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM, which may be anywhere between import and warm-up, is not asked to end first: that would take its grace."""
    found: list[int | None] = []
    close = VLLMProcess.close

    def interrupted(client: VLLMProcess, timeout_s: float) -> None:
        raise KeyboardInterrupt

    def noted(client: VLLMProcess) -> None:
        found.append(client._process.poll())
        close(client)

    monkeypatch.setattr(VLLMProcess, "_wait_until_ready", interrupted)
    monkeypatch.setattr(VLLMProcess, "close", noted)
    with pytest.raises(KeyboardInterrupt):
        VLLMProcess(EngineConfig(name="vllm"), {}, tmp_path / "vllm.log")
    assert found == [-signal.SIGKILL]


HIDING = "raise SystemExit('a file of the working directory was imported')"


def test_files_of_the_working_directory_hide_no_package(tmp_path: Path) -> None:
    for name in ("argparse", "ctypes", "vllm", "json"):
        (tmp_path / f"{name}.py").write_text(HIDING)
    command = server_command({})
    module = command.index("-m") + 1
    for started in (guarded([sys.executable, "-c", ""], 1.0), [*command[:module], "this", "--help"]):
        done = subprocess.run(
            started, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert "was imported" not in done.stderr
        assert "-P" in started


def test_the_field_of_a_validation_error_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(
        "pydantic.ValidationError: 1 validation error for SchedulerConfig\n"
        "max_num_batched_tokens\n"
        "  Input should be a valid integer [input_value='abc']\n"
        "    For further information visit a page\n"
        "Done.\n",
        encoding="utf-8",
    )
    assert last_errors(log).splitlines()[1:] == [
        "  pydantic.ValidationError: 1 validation error for SchedulerConfig; max_num_batched_tokens; "
        "Input should be a valid integer [input_value='abc']"
    ]
