"""Which vLLM is opened, before it is asked for anything: a child process or servers, which servers, and what those
started here are given.
"""

from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_server import FakeServer

from spectrain.config.commands import COMMANDS
from spectrain.config.data_schema import CaptureConfig, DataConfig
from spectrain.config.schema import EngineConfig, SpectrainConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.prompts import Conversation
from spectrain.engines.conversations import Dialogue
from spectrain.engines.vllm import args as vllm_args
from spectrain.engines.vllm import engine as vllm_engine
from spectrain.engines.vllm import open_vllm as opening
from spectrain.engines.vllm.engine import OnePass
from spectrain.engines.vllm.open_vllm import open_vllm
from spectrain.engines.vllm.requests import Request
from spectrain.errors import ConfigError, RunError
from spectrain.stages import answer_suite as answering
from spectrain.stages import eval_vllm as evaluate_served
from spectrain.stages.checks import check_config

TARGET = TargetConfig(path="some/target", max_length=200)


def opened(tmp_path, extra_args=None, **engine):
    config = EngineConfig(**{"name": "vllm_server", **engine})
    return open_vllm(config, TARGET, tmp_path / "folder", tmp_path / "logs", "generate", extra_args or {})


def test_running_servers_of_the_target_are_used_under_their_own_names(tmp_path):
    by_root = [{"id": "renamed", "root": "some/target", "max_model_len": 200}]
    by_name = [{"id": "some/target", "root": "/elsewhere", "max_model_len": 4096}]
    with FakeServer(models=by_root) as one, FakeServer(models=by_name) as other:
        pool = opened(tmp_path, urls=(one.url + "/v1", other.url, other.url + "/"), concurrency=1)
        assert pool.capacity == 2
        for number in range(6):
            pool.submit(Request(str(number), [number], 2))
        found = []
        while len(found) < 6:
            found += pool.collect(10.0)
        pool.close()
        assert {body["model"] for body in one.bodies} == {"renamed"}
        assert {body["model"] for body in other.bodies} == {"some/target"}


def test_a_server_of_something_else_is_refused(tmp_path):
    with FakeServer() as server, pytest.raises(ConfigError, match="serves tiny, not some/target"):
        opened(tmp_path, urls=(server.url,))


def test_running_servers_cannot_be_given_arguments(tmp_path):
    with (
        FakeServer() as server,
        pytest.raises(ConfigError, match=r"what generate needs \(kv_transfer_config, speculative_config\)"),
    ):
        opened(tmp_path, {"speculative_config": {}, "kv_transfer_config": {}}, urls=(server.url,))


@pytest.mark.parametrize(("command", "one_pass"), [("capture", False), ("run", False), ("generate", True)])
def test_running_servers_do_not_capture(command, one_pass):
    config = SpectrainConfig(
        target=TargetConfig(path="some/target"),
        data=DataConfig(train=("prompts.jsonl",)),
        engine=EngineConfig(name="vllm_server", urls=("http://server",)),
        capture=CaptureConfig(during_generation=one_pass),
    )
    with pytest.raises(ConfigError, match="do not hand out hidden states"):
        check_config(config, COMMANDS[command])


@pytest.fixture
def started(monkeypatch):
    """What would be started: [(name, command, environment, log)]; the second server does not come up."""
    servers = []

    class Recorded:
        exit_code = None
        socket = Path("none")

        def __init__(self, name, command, environment, log):
            self.name = name
            self.given = (name, command, environment, log)
            self.events = []
            servers.append(self)

        def start(self):
            self.events.append("start")

        def wait_ready(self, end_s):
            if servers.index(self) == 1:
                raise RunError("did not come up")

        def end(self):
            self.events.append("end")

        def stop(self):
            self.events.append("stop")

    monkeypatch.setattr(opening, "ServerProcess", Recorded)
    monkeypatch.setattr(vllm_args, "vllm_version", lambda: "0.32.0+cpu")
    monkeypatch.setattr(vllm_args, "available_cores", lambda: [0, 1, 2, 3])
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    vllm_args.is_cpu_build.cache_clear()
    yield servers
    vllm_args.is_cpu_build.cache_clear()


def test_replicas_get_their_arguments_devices_cores_and_logs(started, tmp_path):
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(RunError, match="did not come up"):
        opened(
            tmp_path, {"speculative_config": speculation}, replicas=2, devices=("0,1", "2,3"), tensor_parallel_size=2
        )
    (_, command, first, log), (_, _, second, other_log) = (server.given for server in started)
    flags = dict(pairwise(command))
    assert flags["--model"] == str(tmp_path / "folder") and flags["--served-model-name"] == TARGET.name
    assert flags["--generation-config"] == "vllm" and flags["--tensor-parallel-size"] == "2"
    assert flags["--per-request-spec-decode-metrics"] == "detailed"
    assert [first["CUDA_VISIBLE_DEVICES"], second["HIP_VISIBLE_DEVICES"]] == ["0,1", "2,3"]
    assert [first["VLLM_CPU_OMP_THREADS_BIND"], second["VLLM_CPU_OMP_THREADS_BIND"]] == ["0|1", "2|3"]
    assert first["OMP_NUM_THREADS"] == second["OMP_NUM_THREADS"] == "1"
    assert log != other_log and {log.parent, other_log.parent} == {tmp_path / "logs"}
    # One that does not come up takes the others with it: all are told before any is waited for.
    assert [server.events for server in started] == [["start", "end", "stop"]] * 2


def test_capture_asks_for_no_rounds(started, tmp_path):
    with pytest.raises(RunError):
        opened(tmp_path, {"speculative_config": {"method": "extract_hidden_states"}}, replicas=2)
    assert "--per-request-spec-decode-metrics" not in started[0].given[1]
    assert isinstance(started[0].given[3], Path)


def test_data_parallel_ranks_are_one_server_that_gets_enough_to_do(started, tmp_path):
    pool = opened(tmp_path, name="vllm", data_parallel_size=2, max_num_seqs=8, replicas=3, urls=("http://other",))
    pool.close()
    (server,) = started
    _, command, environment, log = server.given
    assert dict(pairwise(command))["--data-parallel-size"] == "2"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment
    assert log == tmp_path / "logs/vllm-generate-1.log"
    assert pool.capacity >= 2 * 8


@pytest.mark.parametrize("name", ["vllm", "vllm_server"])
def test_the_ids_of_drafts_come_from_a_child_process_with_one_rank(name, started, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "VLLMProcess", lambda *given: given)
    config = EngineConfig(name=name, data_parallel_size=2, replicas=2)
    engine, args, log, record_rounds = open_vllm(
        config, TARGET, tmp_path / "folder", tmp_path, "parity", {}, record_rounds=True
    )
    assert (args["data_parallel_size"], engine.data_parallel_size, record_rounds) == (1, 1, True)
    assert log == tmp_path / "vllm-parity.log"
    assert started == []


@pytest.mark.parametrize("error", [None, RuntimeError("generation failed")])
def test_one_pass_waits_for_hidden_states_unless_generation_fails(error, monkeypatch, tmp_path, capsys):
    events = []
    session = SimpleNamespace(check=lambda: events.append("checked"))

    @contextmanager
    def running(plan, folder, purpose, prompts):
        try:
            yield "client", session
        finally:
            events.append("closed")

    def arrived(waited_for, keys):
        assert waited_for is session
        events.append(sorted(keys))
        return {"late"}

    monkeypatch.setattr(vllm_engine, "await_arrival", arrived)
    capturing = SimpleNamespace(running=running, plan=lambda meta, shard_bytes: (meta, shard_bytes))
    one_pass = OnePass(capturing, "meta", 1000, tmp_path, [])

    def dialogue(key, turns, turn, mask):
        conversation = Conversation(id=key, turns=("a",) * turns)
        return Dialogue(conversation, "train", key, [0] * len(mask), mask, turn)

    def generation():
        with one_pass.open_vllm("generate", {}) as client:
            assert client == "client"
            assert one_pass.states_for(dialogue("two turns", 2, 0, [0, 0])) is None
            described = one_pass.states_for(dialogue("two turns", 2, 1, [0, 0, 1, 1, 0]))
            assert described == {
                "spectrain": {"key": "two turns", "split": "train", "generated": [[2, 4]], "last_id": None}
            }
            one_pass.states_for(dialogue("one turn", 1, 0, [0]))
            if error:
                raise error

    if error:
        with pytest.raises(RuntimeError):
            generation()
        assert events == ["checked"] * 3 + ["closed"]
    else:
        generation()
        assert events == ["checked"] * 3 + [["one turn", "two turns"], "closed"]
        assert "1 documents did not arrive" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("engine", "servers"),
    [
        (EngineConfig(name="vllm", replicas=3), 1),
        (EngineConfig(name="vllm_server", replicas=3), 3),
        (EngineConfig(name="vllm_server", urls=("http://a", "http://b")), 2),
    ],
)
def test_every_server_is_warmed_up_before_the_clock_runs(engine, servers, monkeypatch):
    asked = []
    monkeypatch.setattr(answering, "_answer_group", lambda context, decode, *rest: asked.append("measured") or [])
    context = SimpleNamespace(
        config=SpectrainConfig(engine=engine),
        template=SimpleNamespace(
            first_prompt_ids=lambda conversation: [1, 2], require_embedded=lambda conversation, ids: None
        ),
    )

    def decode(prompts, on_tokens):
        assert all(prompt.ids == [1, 2] for prompt in prompts)
        asked.append(len(prompts))

    answering.answer_all(
        context, [Conversation(id="c", turns=("a",))], decode, 1, "none", evaluate_served._servers(engine)
    )
    assert asked == [servers, "measured"]
