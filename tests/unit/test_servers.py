"""The pool of servers against servers that misbehave: everything is answered, nothing twice, and what cannot go on
says why.
"""

import re
import sys
import time
from pathlib import Path

import fake_server
import pytest
from fake_server import DROP, HANG, OK, FakeServer, completion

from spectrain.engines.vllm.openai_api import check_server_model
from spectrain.engines.vllm.requests import ReportedRound, Request
from spectrain.engines.vllm.server_process import ServerProcess
from spectrain.engines.vllm.servers import Endpoint, ServerPool
from spectrain.errors import ConfigError, RunError

PATIENCE_S = 30.0


@pytest.fixture
def open_pool():
    """Pools that are closed at the end; waits of a millisecond."""
    pools = []

    def opened(*servers, concurrency=4, retries=2, timeout_s=10.0, restart_timeout_s=20.0):
        endpoints = [
            Endpoint(server.name, "tiny", concurrency, server)
            if isinstance(server, ServerProcess)
            else Endpoint(server.url, "tiny", concurrency)
            for server in servers
        ]
        pools.append(ServerPool(endpoints, retries, timeout_s, restart_timeout_s, backoff_s=0.001))
        return pools[-1]

    yield opened
    for pool in pools:
        pool.close()


def ask(pool, numbers):
    for number in numbers:
        pool.submit(Request(str(number), [1, number], 3))


def answers_of(pool, count):
    """``count`` answers, then no more: {id: ids}."""
    found = []
    while len(found) < count:
        new = pool.collect(PATIENCE_S)
        assert new, "no answer in time"
        found += new
    found += pool.collect(0.05)
    assert len(found) == count
    return {answer.id: answer.ids for answer in found}


def collect_into(found, pool, count):
    while len(found) < count:
        found |= {answer.id: answer.ids for answer in pool.collect(PATIENCE_S)}


def expected(numbers):
    return {str(number): [number + 1, number + 2, number + 3] for number in numbers}


def test_a_request_says_all_that_changes_the_distribution_and_the_reply_is_read_whole(open_pool):
    speculation = {"per_step_drafted": [3, 3, 1], "per_step_accepted": [2, 0, 1]}

    def behave(body, count):
        reply = completion(body, finish_reason="stop", token_ids=[7, 8, 2])
        return 200, {
            **reply,
            "kv_transfer_params": {"hidden_states_path": "/x"},
            "metrics": {"speculative_decoding": speculation},
        }

    with FakeServer(behave) as server:
        pool = open_pool(server)
        pool.submit(
            Request(
                "a", [1, 2, 3], 9, temperature=0.5, top_p=0.9, top_k=20, seed=11, stop_ids=(2, 5), states={"k": [1]}
            )
        )
        pool.submit(Request("b", [4], 1))
        by_id = {}
        while len(by_id) < 2:
            by_id |= {answer.id: answer for answer in pool.collect(PATIENCE_S)}
    bodies = {len(body["prompt"]): body for body in server.bodies}
    assert bodies[3] == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "seed": 11,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [2, 5],
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": {"k": [1]},
    }
    assert "seed" not in bodies[1] and "kv_transfer_params" not in bodies[1] and bodies[1]["temperature"] == 0
    answer = by_id["a"]
    assert (answer.ids, answer.finish_reason, answer.states_path) == ([7, 8, 2], "stop", "/x") and answer.seconds > 0
    assert answer.rounds == [ReportedRound(3, 2), ReportedRound(3, 0), ReportedRound(1, 1)]


def test_a_server_never_has_more_requests_than_its_places(open_pool):
    with FakeServer() as server:
        pool = open_pool(server, concurrency=3)
        assert pool.capacity == 3
        server.delay_s = 0.01
        ask(pool, range(20))
        assert answers_of(pool, 20) == expected(range(20))
        assert server.peak == 3


def test_servers_share_the_work_evenly(open_pool):
    with FakeServer() as one, FakeServer() as other:
        one.held.set()
        other.held.set()
        pool = open_pool(one, other)
        assert pool.capacity == 8
        ask(pool, range(10))
        while one.now + other.now < 8:
            assert pool.collect(0.01) == []
        assert (one.now, other.now) == (4, 4)
        one.held.clear()
        other.held.clear()
        assert answers_of(pool, 10) == expected(range(10))


@pytest.mark.parametrize("failure", [500, 502, 408, DROP, (200, {"nothing": 1}), "abort", "timeout"])
def test_what_fails_is_asked_again(open_pool, failure):
    def behave(body, count):
        if count == 2 or body["prompt"][1] % 2:
            return OK
        if failure == "abort":
            return 200, completion(body, finish_reason="abort")
        return HANG if failure == "timeout" else failure

    with FakeServer(behave) as server:
        pool = open_pool(server, timeout_s=1.0 if failure == "timeout" else 10.0)
        ask(pool, range(8))
        if failure == (200, {"nothing": 1}):
            with pytest.raises(RunError, match="no token ids"):
                answers_of(pool, 8)
            return
        assert answers_of(pool, 8) == expected(range(8))
        assert sorted(server.seen.values()) == [1] * 4 + [3] * 4


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_waited_for_however_often(open_pool, status):
    with FakeServer(lambda body, count: OK if count == 6 else (status, {"message": "full"})) as server:
        pool = open_pool(server, retries=1)
        ask(pool, range(3))
        assert answers_of(pool, 3) == expected(range(3))


def test_a_server_that_stays_busy_counts_as_dead_in_the_end(open_pool):
    with FakeServer(lambda body, count: 429) as server:
        pool = open_pool(server, retries=1, timeout_s=0.2)
        ask(pool, [1])
        with pytest.raises(RunError, match=r"no server is left: .* is dead \(status 429: told to say 429\)"):
            answers_of(pool, 1)


def test_a_refused_request_ends_the_run_at_once(open_pool):
    with FakeServer(lambda body, count: 400) as server, FakeServer() as idle:
        pool = open_pool(server, idle)
        ask(pool, [5])
        with pytest.raises(RunError, match=r"refuses request 5: status 400: told to say 400"):
            answers_of(pool, 1)
        assert len(server.bodies) + len(idle.bodies) == 1


def test_another_prompt_than_was_sent_is_no_answer(open_pool):
    with FakeServer(lambda body, count: (200, completion(body, prompt_token_ids=[0, *body["prompt"]]))) as server:
        pool = open_pool(server)
        ask(pool, [5])
        with pytest.raises(RunError, match="another prompt"):
            answers_of(pool, 1)


@pytest.mark.parametrize("how", ["drops", "hangs", "error", "unhealthy"])
def test_the_work_of_a_dead_server_goes_to_the_others(open_pool, how, capsys):
    outcome = {"drops": DROP, "hangs": HANG, "error": 500, "unhealthy": 503}[how]
    with (
        FakeServer(lambda body, count: outcome, health=503 if how == "unhealthy" else 200) as dead,
        FakeServer() as well,
    ):
        pool = open_pool(dead, well, timeout_s=0.2)
        ask(pool, range(20))
        assert answers_of(pool, 20) == expected(range(20))
        assert pool.capacity == 4 and len(dead.bodies) >= 4
        asked = len(dead.bodies)
        ask(pool, range(20, 30))
        assert answers_of(pool, 10) == expected(range(20, 30))
        assert len(dead.bodies) == asked
    assert f"{dead.url} is dead" in capsys.readouterr().err.replace("\n", "")


def test_a_server_that_dies_half_way_loses_nothing(open_pool):
    with FakeServer() as mortal, FakeServer() as well:
        pool = open_pool(mortal, well)
        mortal.delay_s = well.delay_s = 0.01
        ask(pool, range(40))
        first = pool.collect(PATIENCE_S)
        mortal.stop()
        found = {answer.id: answer.ids for answer in first}
        rest = answers_of(pool, 40 - len(first))
        assert not found.keys() & rest.keys()
        assert found | rest == expected(range(40))


def test_one_bad_request_kills_no_server(open_pool):
    bad = 7
    with FakeServer(lambda body, count: 500 if body["prompt"][1] == bad else OK) as one:
        one.delay_s = 0.002
        with FakeServer(one.behave) as other:
            other.delay_s = 0.002
            pool = open_pool(one, other, concurrency=2)
            ask(pool, range(60))
            found = {}
            with pytest.raises(
                RunError, match=r"request 7 fails at every server, though others are answered \(status 500"
            ):
                collect_into(found, pool, 60)
            assert pool.capacity == 4
            assert one.seen[1, bad] == other.seen[1, bad] == 3


def test_answers_come_before_the_error(open_pool):
    with FakeServer(lambda body, count: 400 if body["prompt"][1] == 1 else OK) as server:
        pool = open_pool(server, concurrency=1)
        ask(pool, range(2))
        while len(server.bodies) < 2:
            pass
        with pool._news:
            assert pool._news.wait_for(lambda: pool._error, PATIENCE_S)
        assert [answer.id for answer in pool.collect(0)] == ["0"]
        with pytest.raises(RunError):
            pool.collect(0)


def test_no_server_at_all(open_pool):
    with FakeServer() as server:
        pass
    pool = open_pool(server)
    ask(pool, range(3))
    with pytest.raises(RunError, match=rf"no server is left: {server.url} is dead \(ConnectError"):
        answers_of(pool, 3)


def test_closing_does_not_wait_for_requests(open_pool):
    with FakeServer(lambda body, count: HANG) as server:
        pool = open_pool(server, timeout_s=3600)
        ask(pool, range(10))
        while len(server.bodies) < 4:
            assert pool.collect(0.01) == []
        pool.close()
        pool.close()


# --- servers that are started here ---------------------------------------------------------------------------------


def started(tmp_path, *options):
    command = [sys.executable, str(Path(fake_server.__file__)), *options]
    server = ServerProcess("server 1", command, {}, tmp_path / "logs/server.log")
    server.start()
    return server


def test_a_started_server_that_dies_is_started_again_once(open_pool, tmp_path, capsys):
    server = started(tmp_path, "--die-after", "10")
    server.wait_ready(time.monotonic() + PATIENCE_S)
    pool = open_pool(server, concurrency=1)
    ask(pool, range(15))
    assert answers_of(pool, 15) == expected(range(15))
    assert re.search(r"server 1 is dead \(.*\) and is started again", capsys.readouterr().err.replace("\n", " "))
    ask(pool, range(15))
    found = {}
    with pytest.raises(RunError, match=r"no server is left: server 1 is dead [\s\S]*RuntimeError: told to die"):
        collect_into(found, pool, 15)
    assert found == expected(range(5))


def test_a_server_that_does_not_come_up_is_quoted(tmp_path):
    server = started(tmp_path, "--no-such-option")
    with pytest.raises(
        RunError,
        match=r"server 1 ended before it was ready \(exit code 2\)[\s\S]*unrecognized arguments: --no-such-option",
    ):
        server.restart(20.0)
    server.stop()


def test_closing_ends_a_restart(open_pool, tmp_path):
    server = ServerProcess(
        "server 1", [sys.executable, "-c", "import time; time.sleep(3600)"], {}, tmp_path / "server.log"
    )
    pool = open_pool(server)
    pool._loop.call_soon_threadsafe(pool._mark_dead, pool.endpoints[0], "said so")
    while server.exit_code is not None or server._guard is None:
        assert pool.collect(0.01) == []
    guard = server._guard
    pool.close()
    assert guard.poll() is not None
    with pytest.raises(RunError, match="being stopped"):
        server.start()


# --- servers that run already --------------------------------------------------------------------------------------


def test_a_server_is_known_by_name_or_by_folder():
    with FakeServer() as server:
        assert check_server_model(server.url, ["tiny"], 256) == "tiny"
        assert check_server_model(server.url + "/v1/", ["other", "/models/tiny"], 256) == "tiny"
        with pytest.raises(ConfigError, match=r"serves tiny, not big: .*--served-model-name big"):
            check_server_model(server.url, ["big"], 256)
        with pytest.raises(ConfigError, match=r"takes 256 tokens, fewer than target.max_length=257"):
            check_server_model(server.url, ["tiny"], 257)
        with pytest.raises(ConfigError, match=r"other rotary factors.*--max-model-len 200"):
            check_server_model(server.url, ["tiny"], 200, original_length=200)
        assert check_server_model(server.url, ["tiny"], 201, original_length=200) == "tiny"
    with pytest.raises(RunError, match=rf"engine.urls: {server.url} does not answer"):
        check_server_model(server.url, ["tiny"], 256)
    with FakeServer(models=[]) as server, pytest.raises(ConfigError, match="is no server of models"):
        check_server_model(server.url, ["tiny"], 256)
