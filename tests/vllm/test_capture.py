"""Hidden states captured by the real vLLM: those of transformers, in one pass or two, whoever is killed in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_tools import vllm_engine

from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.hidden_states import StoredHiddenStates, StoreMeta
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling
from spectrain.engines.hf import HFEngine
from spectrain.engines.vllm.adopt_states import has_leftovers
from spectrain.engines.vllm.capture_plan import CapturePlan
from spectrain.engines.vllm.capture_states import VLLMCapture
from spectrain.engines.vllm.engine import OnePass, VLLMEngine
from spectrain.engines.vllm.open_vllm import open_vllm
from spectrain.engines.vllm.process import VLLMProcess
from spectrain.engines.vllm.requests import VLLMClient
from spectrain.errors import RunError
from spectrain.target.model import TargetModel
from spectrain.target.resolve import resolve_target

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=24, seed=0)
# A random target hardly ever ends an answer by its one end token; with these it does so after some ten tokens.
END_IDS = [2, *range(5, 304, 12)]
MAX_LENGTH = 230
# Few tokens a step, so that long prompts are prefilled in chunks.
CHUNKED = {"max_num_batched_tokens": 64}
SHARD_BYTES = 1 << 18


@dataclass
class Bench:
    """A tiny target with everything that captures it."""

    folder: Path
    work: Path
    taps: tuple[int, ...]
    engine: EngineConfig

    def __post_init__(self) -> None:
        self.config = TargetConfig(path=str(self.folder), max_length=MAX_LENGTH)
        self.resolved = resolve_target(self.config)
        self.target = TargetModel.load(self.resolved, self.config)
        self.target.generation_config.eos_token_id = END_IDS
        self.embedded = HFEngine(self.target, self.resolved, EngineConfig(batch_size=8), MAX_LENGTH)
        self.clients: list[VLLMClient] = []

    def open(self, purpose: str, extra_args: Mapping[str, Any]) -> VLLMClient:
        client = open_vllm(self.engine, self.config, self.resolved.folder, self.work / "logs", purpose, extra_args)
        self.clients.append(client)
        return client

    @property
    def capturing(self) -> VLLMCapture:
        return VLLMCapture(self.open, self.engine, self.config, self.resolved, self.target.spec)

    def meta(self, dtype: str = "float32") -> StoreMeta:
        spec = self.target.spec
        return StoreMeta(
            self.resolved.id, self.resolved.revision, "c", "t", "p", self.taps, spec.hidden_size, spec.num_layers, dtype
        )

    def captured(self, responses: list[Response], name: str, dtype: str = "float32") -> StoredHiddenStates:
        counted: list[int] = []
        with HiddenStatesWriter(self.work / name, self.meta(dtype)) as writer:
            self.capturing.shards(writer, responses, SHARD_BYTES, counted.append)
        assert sum(counted) == sum(len(response.input_ids) for response in responses)
        return StoredHiddenStates(self.work / name)


def conversations(count: int) -> list[tuple[Conversation, str]]:
    """Some share long beginnings (so the cache is hit), some have two turns, one has an answer already."""
    asked = []
    for number in range(count):
        text = "the capital of France " * (number % 4 * 3) + f"is {number}"
        turns = (text, "and then?") if number % 3 == 1 else (text,)
        asked.append((Conversation(id=f"c{number}", turns=turns), "heldout" if number % 4 == 3 else "train"))
    answered = Conversation(id="answered", turns=("What is 17 and 25?",), answers=("The sum is 42.",))
    return [*asked, (answered, "train")]


def responses_of(bench: Bench, count: int = 12) -> list[Response]:
    return list(bench.embedded.generate(conversations(count), GREEDY))


def assert_as_transformers(
    bench: Bench, store: StoredHiddenStates, responses: list[Response], rtol: float = 1e-3
) -> None:
    """Every tap, last hidden state and log-normalizer within ``rtol`` of its scale; zeros in the last row."""
    store.verify_checksums()
    assert store.keys == sorted(response.key for response in responses)
    expected = {states.key: states for states in bench.embedded.capture(responses, bench.taps, "float32")}
    for number, key in enumerate(store.keys):
        found, wanted = store[number], expected[key]
        assert found.split == wanted.split
        assert found.input_ids.equal(wanted.input_ids) and found.loss_mask.equal(wanted.loss_mask)
        for slot in range(len(bench.taps)):
            ours_SH, theirs_SH = found.taps[:-1, slot].float(), wanted.taps[:-1, slot]
            assert (ours_SH - theirs_SH).abs().max() <= rtol * theirs_SH.abs().max(), (key, bench.taps[slot])
        assert (
            found.last_hidden[:-1].float() - wanted.last_hidden[:-1]
        ).abs().max() <= rtol * wanted.last_hidden.abs().max()
        assert not found.taps[-1].any() and not found.last_hidden[-1].any()
        np.testing.assert_allclose(found.log_normalizer, wanted.log_normalizer, rtol=max(rtol, 1e-4))


@pytest.fixture(scope="module")
def llama(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(llama_folder, tmp_path_factory.mktemp("llama"), (0, 2, 5), vllm_engine(CHUNKED))


@pytest.fixture(scope="module")
def one_pass(llama: Bench) -> list[Response]:
    """Responses whose states vLLM left in ``llama.work / "one"`` while it generated them."""
    one = OnePass(llama.capturing, llama.meta(), SHARD_BYTES, llama.work / "one", [("a prompt", [5, 6, 7, 8])])
    engine = VLLMEngine(llama.resolved, llama.embedded.template, END_IDS, MAX_LENGTH, one.open_vllm)
    return list(engine.generate(conversations(12), GREEDY, states_for=one.states_for))


def test_one_pass_gives_what_a_separate_capture_gives(llama: Bench, one_pass: list[Response]) -> None:
    embedded = {response.key: response for response in responses_of(llama)}
    assert {response.key for response in one_pass} == embedded.keys()
    assert len({key.partition("-")[0] for key in embedded}) == 13  # conversations; a turn may be a document of its own
    for response in one_pass:
        assert response.input_ids.tolist() == embedded[response.key].input_ids.tolist()

    with HiddenStatesWriter(llama.work / "one", llama.meta()) as writer:
        llama.capturing.adopt_leftovers(writer, one_pass)
        passed = [response for response in one_pass if response.key in writer.done_keys()]
    assert not has_leftovers(llama.work / "one")
    # Documents with the last turn of a conversation: not the one with an answer, nor those whose first answer was cut.
    counts = {len(passed), len({response.key.partition("-")[0] for response in passed})}
    assert len(counts) == 1 and 8 <= len(passed) <= 12
    assert any(len(response.conversation.turns) == 2 for response in passed)
    assert {response.finish_reason for response in passed} == {"stop", "length"}
    assert_as_transformers(llama, StoredHiddenStates(llama.work / "one"), passed)

    separate = llama.captured(one_pass, "separate")
    assert_as_transformers(llama, separate, one_pass)
    together = StoredHiddenStates(llama.work / "one")
    number = {key: index for index, key in enumerate(separate.keys)}
    for index, key in enumerate(together.keys):
        ours, theirs = together[index], separate[number[key]]
        torch.testing.assert_close(ours.taps, theirs.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.last_hidden, theirs.last_hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.log_normalizer, theirs.log_normalizer, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert len(list((llama.work / "separate").glob("shard-*"))) > 1


def test_qwen3_states_in_8_bits(qwen3_folder: Path, tmp_path: Path) -> None:
    bench = Bench(qwen3_folder, tmp_path, (3,), vllm_engine(CHUNKED, self_check="greedy"))
    responses = responses_of(bench)
    assert_as_transformers(bench, bench.captured(responses, "states", "int8"), responses, rtol=1e-2)


def test_vllms_own_connector_through_the_engine_interface(qwen3_folder: Path, tmp_path: Path) -> None:
    bench = Bench(qwen3_folder, tmp_path, (1, 4), vllm_engine(CHUNKED, connector="stock"))
    engine = VLLMEngine(bench.resolved, bench.embedded.template, END_IDS, MAX_LENGTH, bench.open, bench.capturing)
    responses = responses_of(bench, 6)
    with HiddenStatesWriter(tmp_path / "hidden_states", bench.meta("bfloat16")) as writer:
        for states in engine.capture(responses, bench.taps, "bfloat16"):
            writer.add(states)
    assert_as_transformers(bench, StoredHiddenStates(tmp_path / "hidden_states"), responses, rtol=1e-2)


def test_wrong_layers_are_found_before_anything_is_stored(llama: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturePlan, "layers", property(lambda plan: [1, 2, 5]))  # instead of 0, 2, 5
    with pytest.raises(
        RunError, match=r"as tap 0 is not the residual stream after 0 layers \(it is the one after 1 layers\)"
    ):
        llama.captured(responses_of(llama, 2), "wrong")
    assert StoredHiddenStates(llama.work / "wrong").keys == []


CAPTURE_AND_DIE = """
import os, signal, sys
sys.path[:0] = [{tests!r}, {here!r}]
from pathlib import Path
from test_capture import SHARD_BYTES, Bench, responses_of
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from vllm_tools import vllm_engine

bench = Bench(Path({folder!r}), Path({work!r}), (1, 3), vllm_engine({{"max_num_seqs": 2}}, self_check="off"))
heard = 0

def on_tokens(count):
    global heard
    heard += 1
    if heard == 8:
        print(bench.clients[0]._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

with HiddenStatesWriter(bench.work / "hidden_states", bench.meta()) as writer:
    bench.capturing.shards(writer, responses_of(bench), 20000, on_tokens)
"""


def group_members(group: int) -> list[int]:
    """Processes of a group that still run; one that has ended but was not waited for does not."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, process_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(process_group) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


def test_a_capture_that_is_killed_goes_on_and_repeats_nothing(llama_folder: Path, tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = CAPTURE_AND_DIE.format(tests=str(here.parent), here=str(here), folder=str(llama_folder), work=str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    group = int(killed.stdout)
    until = time.monotonic() + 30
    while group_members(group) and time.monotonic() < until:
        time.sleep(0.1)
    assert group_members(group) == []  # vLLM ended with us

    # Then vLLM is killed.
    bench = Bench(llama_folder, tmp_path, (1, 3), vllm_engine({"max_num_seqs": 2}, self_check="off"))
    responses = responses_of(bench)
    meta = bench.meta()
    heard = 0

    def on_tokens(count: int) -> None:
        nonlocal heard
        heard += 1
        if heard == 2:
            client = bench.clients[0]
            assert isinstance(client, VLLMProcess)
            os.killpg(client._process.pid, signal.SIGKILL)

    with HiddenStatesWriter(tmp_path / "hidden_states", meta) as writer:
        bench.capturing.adopt_leftovers(writer, responses)
        kept = writer.done_keys()
        missing = [response for response in responses if response.key not in kept]
        with pytest.raises(RunError, match="vLLM"):
            bench.capturing.shards(writer, missing, 20000, on_tokens)
    assert 0 < len(kept) < len(responses)  # whole shards of the first process

    asked: list[int] = []
    with HiddenStatesWriter(tmp_path / "hidden_states", meta) as writer:
        bench.capturing.adopt_leftovers(writer, responses)
        done = writer.done_keys()
        assert kept <= done
        bench.capturing.shards(writer, [r for r in responses if r.key not in done], 20000, asked.append)
    assert len(asked) == len(responses) - len(done)
    assert_as_transformers(bench, StoredHiddenStates(tmp_path / "hidden_states"), responses)
    assert not (tmp_path / "hidden_states" / ".incoming").exists()
