"""``engine=vllm_server`` before any server is asked for an answer: which servers are taken, and what those started here
are given.
"""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_server import FakeServer

from spectrain.config.commands import COMMANDS
from spectrain.config.schema import CaptureConfig, DataConfig, EngineConfig, SpectrainConfig, TargetConfig
from spectrain.data.prompts import Conversation
from spectrain.engines.vllm import args as vllm_options
from spectrain.engines.vllm import open_servers as server_pool
from spectrain.engines.vllm.generate_and_capture import _CapturingClient
from spectrain.engines.vllm.open_vllm import open_vllm
from spectrain.engines.vllm.requests import Request
from spectrain.errors import ConfigError, RunError
from spectrain.stages import answer_suite as answering
from spectrain.stages import eval_vllm as evaluate_served
from spectrain.stages.checks import check_config

TARGET = TargetConfig(path="some/target", max_length=200)


def opened(tmp_path, extra_args=None, **engine):
    config = EngineConfig(name="vllm_server", **engine)
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
        engine=EngineConfig(name="vllm_server", urls=("http://host",)),
        capture=CaptureConfig(during_generation=one_pass),
    )
    with pytest.raises(ConfigError, match="do not hand out hidden states"):
        check_config(config, COMMANDS[command])


@pytest.fixture
def started(monkeypatch):
    """What would be started: [(name, command, environment, log)]; the second server does not come up."""
    servers = []

    class Recorded:
        def __init__(self, name, command, environment, log):
            self.name = name
            self.given = (name, command, environment, log)
            self.events = []
            servers.append(self)

        def start(self):
            self.events.append("start")

        def wait_ready(self, end_s):
            if self is servers[1]:
                raise RunError("did not come up")

        def end(self):
            self.events.append("end")

        def stop(self):
            self.events.append("stop")

    monkeypatch.setattr(server_pool, "ServerProcess", Recorded)
    monkeypatch.setattr(vllm_options, "vllm_version", lambda: "0.32.0+cpu")
    monkeypatch.setattr(vllm_options, "_cores", lambda: [0, 1, 2, 3])
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    vllm_options.is_cpu_build.cache_clear()
    yield servers
    vllm_options.is_cpu_build.cache_clear()


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


def test_one_pass_is_given_no_more_than_the_servers_that_are_left_take():
    pool = SimpleNamespace(capacity=8)
    client = object.__new__(_CapturingClient)
    client._client = pool
    assert client.capacity == 8
    pool.capacity = 4
    assert client.capacity == 4


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
        config=SpectrainConfig(engine=engine), template=SimpleNamespace(first_prompt_ids=lambda conversation: [1, 2])
    )

    def decode(prompts, limits, streams, on_tokens):
        assert len(prompts) == len(limits) == len(streams)
        asked.append(len(prompts))

    answering.answer_all(
        context, [Conversation(id="c", turns=("a",))], decode, 1, "none", evaluate_served._servers(engine)
    )
    assert asked == [servers, "measured"]
