"""Asking a vLLM while training: bounded, file by file, each removed once it is read. The vLLM is a stand-in whose files
the connector's own thread writes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from drafter_tools import head_reference
from safetensors.torch import save_file
from test_adopt_states import HEAD, captured, make_meta, make_response

from spectrain.config.schema import EngineConfig
from spectrain.data.computed_states import ComputedHiddenStates, KeptInMemory
from spectrain.data.hidden_states import StoreMeta, TargetStates
from spectrain.data.responses import Response
from spectrain.engines.vllm import document_files
from spectrain.engines.vllm.adopt_states import PARAMS
from spectrain.engines.vllm.capture_plan import CapturePlan
from spectrain.engines.vllm.online_states import OnlineStates
from spectrain.engines.vllm.open_vllm import as_server
from spectrain.engines.vllm.requests import Completion, Request, VLLMClient
from spectrain.engines.vllm.servers import Endpoint
from spectrain.engines.vllm.shard_thread import CopiedDocument, ShardWriter
from spectrain.errors import RunError

RESPONSES = [make_response(number, 5 + number) for number in range(8)]


class FakeVLLM(VLLMClient):
    """Answers in the order of the requests, when it is collected from; ``silent``: documents that it never answers,
    ``refuses``: says nothing of their hidden states, ``confuses``: gives those of another document.
    """

    capacity = 4

    def __init__(self, folder: Path, meta: StoreMeta) -> None:
        self.folder = folder
        self.writer = ShardWriter(folder, meta, 1 << 20)
        self.requests: list[Request] = []
        self.waiting: list[Request] = []
        self.silent: set[str] = set()
        self.refuses: set[str] = set()
        self.confuses: set[str] = set()
        self.by_key = {response.key: response for response in RESPONSES}

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self.waiting.append(request)

    def collect(self, timeout_s: float) -> list[Completion]:
        answers, self.waiting = [self.answer(request) for request in self.waiting], []
        return [answer for answer in answers if answer is not None]

    def answer(self, request: Request) -> Completion | None:
        assert request.states is not None
        described = request.states[PARAMS]
        key, file = described["key"], described["file"]
        if key in self.silent:
            return None
        path = None if key in self.refuses else str(self.folder / f"{file}.safetensors")
        response = self.by_key[key if key not in self.confuses else "key-0"]
        assert request.prompt_ids == self.by_key[key].input_ids[:-1].tolist() and request.max_tokens == 1
        ids, mask = torch.from_numpy(response.input_ids), torch.from_numpy(response.loss_mask)
        self.writer.put(CopiedDocument(response.key, response.split, ids, mask, captured(response), None, file))
        return Completion(request.id, [7], "length", 0.1, states_path=path)

    def close(self) -> None:
        self.writer.close()

    def keys(self) -> list[str]:
        return [request.states[PARAMS]["key"] for request in self.requests if request.states is not None]


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[FakeVLLM]:
    with FakeVLLM(tmp_path, make_meta()) as client:
        yield client


def asker(client: VLLMClient, ahead: int = 3, timeout_s: float = 5.0, meta: StoreMeta | None = None) -> OnlineStates:
    meta = meta or make_meta()
    return OnlineStates(client, CapturePlan(meta, 5, 0, apart=True), HEAD, ahead, timeout_s)


def files(folder: Path) -> list[str]:
    """Those that are whole."""
    return sorted(path.name for path in folder.glob("[!.]*.safetensors*"))


def assert_right(states: TargetStates, response: Response) -> None:
    expected = captured(response)
    assert (states.key, states.split) == (response.key, response.split)
    assert states.taps.equal(expected[:, :2]) and states.last_hidden.equal(expected[:, 2])
    assert states.input_ids.equal(torch.from_numpy(response.input_ids))
    assert states.loss_mask.equal(torch.from_numpy(response.loss_mask))
    assert states.log_normalizer is not None
    for position, value in enumerate(states.log_normalizer):
        if position + 1 < len(response.loss_mask) and response.loss_mask[position + 1]:
            logits = head_reference(HEAD).logits(states.last_hidden[position].double())
            assert float(value) == pytest.approx(float(torch.logsumexp(logits, 0)), rel=1e-5)
        else:
            assert value.isnan()


def test_each_document_comes_in_a_file_that_is_removed(vllm: FakeVLLM) -> None:
    asked = asker(vllm)
    for response in RESPONSES[:3]:
        (states,) = asked.ask(response)
        assert files(vllm.folder) == []
        assert_right(states, response)


def test_so_many_are_under_way_and_no_more(vllm: FakeVLLM) -> None:
    asked = asker(vllm, ahead=3)
    asked.expect(RESPONSES)
    assert vllm.keys() == ["key-0", "key-1", "key-2"]
    asked.ask(RESPONSES[0])
    assert vllm.keys() == [f"key-{number}" for number in range(4)]
    asked.ask(RESPONSES[7])  # nobody expected it now, but somebody waits for it
    assert vllm.keys()[4:] == ["key-7"]
    for number in range(1, 7):
        assert_right(asked.ask(RESPONSES[number])[0], RESPONSES[number])
    assert sorted(vllm.keys()) == [response.key for response in RESPONSES]  # each once
    assert files(vllm.folder) == []


def test_what_nobody_reads_is_removed_at_the_end(vllm: FakeVLLM) -> None:
    asked = asker(vllm)
    asked.expect(RESPONSES[:3])
    asked.ask(RESPONSES[0])
    end_s = time.monotonic() + 10
    while len(files(vllm.folder)) < 2 and time.monotonic() < end_s:
        time.sleep(0.01)
    asked.close()
    assert files(vllm.folder) == []


@pytest.mark.parametrize("fault", ["silent", "refuses", "confuses"])
def test_a_document_that_fails_is_another_request_the_next_time(vllm: FakeVLLM, fault: str) -> None:
    getattr(vllm, fault).add("key-2")
    asked = asker(vllm, timeout_s=0.05)
    with pytest.raises(RunError):
        asked.ask(RESPONSES[2])
    getattr(vllm, fault).clear()
    assert_right(asked.ask(RESPONSES[2])[0], RESPONSES[2])
    assert vllm.keys() == ["key-2", "key-2"]
    assert len({request.id for request in vllm.requests}) == 2


def test_a_failing_document_ends_the_training_with_its_key(vllm: FakeVLLM) -> None:
    vllm.confuses.add("key-2")
    source = ComputedHiddenStates(RESPONSES, asker(vllm), KeptInMemory(make_meta(), 0), make_meta(), retries=1)
    assert source[1].key == "key-1"
    with pytest.raises(RunError, match=r"document key-2.*2 times.*other tokens"):
        source[2]
    assert vllm.keys() == ["key-1", "key-2", "key-2"]


def test_a_server_that_captures_something_else_is_named(vllm: FakeVLLM) -> None:
    with pytest.raises(RunError, match=r"tap_ids=\(1, 4\), this run needs \(2, 4\)"):
        asker(vllm, meta=make_meta(tap_ids=(2, 4))).ask(RESPONSES[0])


def test_a_writer_that_gives_up_is_heard_of(vllm: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.writer, "put", lambda document: None)
    (vllm.folder / "w.error").write_text("the disk is full")
    with pytest.raises(RunError, match="the disk is full"):
        asker(vllm).ask(RESPONSES[0])


def test_a_file_that_does_not_come_is_not_waited_for_for_ever(vllm: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.writer, "put", lambda document: None)
    monkeypatch.setattr(document_files, "_PATIENCE_S", 0.05)
    with pytest.raises(RunError, match="key-0 did not arrive"):
        asker(vllm).ask(RESPONSES[0])


def test_files_of_vllms_own_connector_are_read_and_removed_with_their_locks(tmp_path: Path) -> None:
    """It writes all captured layers of all tokens but the last."""

    class Stock(FakeVLLM):
        def answer(self, request: Request) -> Completion:
            assert request.states is not None
            response = self.by_key[request.states[PARAMS]["key"]]
            path = self.folder / f"{request.id}.safetensors"
            save_file(
                {
                    "hidden_states": captured(response)[:-1].contiguous(),
                    "token_ids": torch.from_numpy(response.input_ids[:-1]).long(),
                },
                path,
            )
            path.with_name(f"{path.name}.lock").touch()
            return Completion(request.id, [7], "length", 0.1, states_path=str(path))

    with Stock(tmp_path, make_meta()) as client:
        plan = CapturePlan(make_meta(), 5, 0, stock=True, apart=True)
        (states,) = OnlineStates(client, plan, HEAD, 3, 5.0).ask(RESPONSES[3])
        assert files(tmp_path) == []
    assert_right(states, RESPONSES[3])


def test_a_document_alone_is_a_shard_of_one(tmp_path: Path) -> None:
    """Beside shards of several, which wait until they are full."""
    writer = ShardWriter(tmp_path, make_meta(), 1 << 20)
    for response, file in zip(RESPONSES[:3], (None, "alone", None), strict=True):
        ids, mask = torch.from_numpy(response.input_ids), torch.from_numpy(response.loss_mask)
        writer.put(CopiedDocument(response.key, response.split, ids, mask, captured(response), None, file))
    end_s = time.monotonic() + 10
    while not files(tmp_path) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert files(tmp_path) == ["alone.safetensors"]
    writer.close()
    assert len(files(tmp_path)) == 2


def test_a_vllm_that_ranks_share_is_a_server_with_as_many_places() -> None:
    alone = EngineConfig(name="vllm", max_num_seqs=8, tensor_parallel_size=2)
    shared = as_server(alone)
    assert (shared.name, shared.replicas, shared.urls, shared.concurrency) == ("vllm_server", 1, (), 11)
    assert {**asdict(shared), **dict.fromkeys(("name", "concurrency"))} == {
        **asdict(alone),
        **dict.fromkeys(("name", "concurrency")),
    }
    servers = EngineConfig(name="vllm_server", urls=("http://a:1", "http://b:1"))
    assert as_server(servers) is servers
    endpoint = Endpoint("a server", "tiny", 11, socket="/run/vllm.sock").elsewhere()
    assert (endpoint.name, endpoint.model, endpoint.concurrency, endpoint.socket) == (
        *("a server", "tiny", 11),
        "/run/vllm.sock",
    )
    assert endpoint.server is None
