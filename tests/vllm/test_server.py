"""Real vLLM servers under the pool: the answers are the target's, whichever server gave them, and whatever dies
meanwhile.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import httpx2
import pyarrow.parquet as pq
import pytest
from vllm_tools import vllm_engine, vllm_environment

from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.chat import ChatTemplate
from spectrain.data.prompts import Conversation
from spectrain.data.responses import ResponseStore, Sampling
from spectrain.engines.hf import HFEngine
from spectrain.engines.vllm.engine import VLLMEngine
from spectrain.engines.vllm.open_vllm import open_vllm
from spectrain.target.model import TargetModel
from spectrain.target.resolve import resolve_target

PATIENCE_S = 900.0
MAX_LENGTH = 160


def conversations(count):
    """Every fourth has two turns."""
    turns = [[f"Say {number}, please."] + ["Again?"] * (number % 4 == 0) for number in range(count)]
    return [(Conversation(id=f"c{number}", turns=tuple(said)), "train") for number, said in enumerate(turns)]


@pytest.fixture(scope="module")
def target_config(qwen3_folder):
    return TargetConfig(path=str(qwen3_folder), device="cpu", max_length=MAX_LENGTH)


@pytest.fixture(scope="module")
def hf_engine(target_config):
    """With many end tokens, so that a random target ends some of its answers."""
    resolved = resolve_target(target_config)
    engine = HFEngine(TargetModel.load(resolved, target_config), resolved, EngineConfig(), MAX_LENGTH)
    engine.end_ids = (*engine.end_ids, *range(200, 210))
    engine.template = ChatTemplate(engine.target.tokenizer, engine.end_ids)
    return engine


@pytest.fixture(scope="module")
def pool(target_config, qwen3_folder, tmp_path_factory):
    """Two replicas."""
    config = vllm_engine(name="vllm_server", replicas=2, concurrency=4, max_num_seqs=4)
    with open_vllm(config, target_config, qwen3_folder, tmp_path_factory.mktemp("logs"), "generate", {}) as pool:
        yield pool


@pytest.fixture(scope="module")
def engine(pool, hf_engine):
    hf = hf_engine
    return VLLMEngine(hf.resolved, hf.template, hf.end_ids, MAX_LENGTH, lambda purpose, extra_args: nullcontext(pool))


def answers(responses):
    """{key: everything a response says}; none is there twice."""
    found = list(responses)
    by_key = {
        response.key: (response.input_ids.tolist(), response.loss_mask.tolist(), response.finish_reason)
        for response in found
    }
    assert len(by_key) == len(found)
    return by_key


def test_greedy_answers_are_those_of_transformers(engine, hf_engine, pool):
    sampling = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=16, seed=0)
    asked = conversations(24)
    expected = answers(hf_engine.generate(asked, sampling))
    assert answers(engine.generate(asked, sampling)) == expected
    assert {reason for _, _, reason in expected.values()} == {"stop", "length"}
    assert all(endpoint.answered > 4 for endpoint in pool.endpoints)


def test_every_turn_is_shown_as_the_chat_endpoint_shows_it(engine, pool):
    """The same conversations through vLLM's own chat endpoint, which gets earlier answers back as text."""
    asked = [
        (Conversation(id=f"c{number}", turns=(f"Say {number}.", "Again?", "More?")), "train") for number in range(6)
    ]
    documents = {}
    for response in engine.generate(asked, Sampling(0.0, 1.0, 0, 16, 0)):
        documents.setdefault(response.conversation.id, []).append(response)
    endpoint = pool.endpoints[0]
    transport = httpx2.HTTPTransport(uds=str(endpoint.server.socket))
    further = 0
    with httpx2.Client(transport=transport, base_url="http://server", timeout=PATIENCE_S) as client:

        def post(path, **fields):
            reply = client.post(path, json={"model": endpoint.model, "messages": messages, **fields})
            return reply.raise_for_status().json()

        for conversation, _ in asked:
            messages = []
            spans = {}  # ids before each answer, and its first id
            for response in reversed(documents[conversation.id]):
                ids, mask = response.input_ids.tolist(), response.loss_mask.tolist()
                starts = [at for at, counts in enumerate(mask) if counts and not mask[at - 1]]
                spans |= {len(spans) + number: (ids[:at], ids[at], number) for number, at in enumerate(starts)}
            for turn, (before, first, number) in spans.items():
                messages.append({"role": "user", "content": conversation.turns[turn]})
                shown = post("/tokenize", add_generation_prompt=True)["tokens"]
                if number == 0:  # within a document ids are those that were generated
                    assert before == shown
                    further += turn > 0
                assert engine.template.tokenizer.decode(before) == engine.template.tokenizer.decode(shown)
                limits = {"max_tokens": 16, "temperature": 0, "stop_token_ids": list(engine.end_ids)}
                choice = post("/v1/chat/completions", return_token_ids=True, **limits)["choices"][0]
                assert choice["token_ids"][0] == first
                messages.append({"role": "assistant", "content": choice["message"]["content"]})
    assert further >= 1


def test_sampled_answers_depend_on_their_seeds_alone(engine):
    asked = conversations(12)
    drawn = [answers(engine.generate(asked, Sampling(1.0, 0.95, 50, 16, seed))) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    again, other = ([ids for ids, _, _ in found.values()] for found in (drawn[0], drawn[2]))
    assert sum(ids in other for ids in again) < len(again) / 2


def test_a_killed_servers_work_goes_to_the_other_and_nothing_is_left(engine, hf_engine, pool):
    sampling = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=100, seed=0)
    asked = conversations(24)
    expected = answers(hf_engine.generate(asked, sampling))
    guards = [endpoint.server._guard.pid for endpoint in pool.endpoints]
    trees = [descendants(guard) for guard in guards]
    assert all(len(tree) >= 3 for tree in trees)  # the server, its engine, the resource tracker
    found = engine.generate(asked, sampling)
    first = next(found)
    os.kill(min(trees[0]), signal.SIGKILL)  # the server was the guard's first
    assert answers([first, *found]) == expected
    wait_for(lambda: not any(map(is_alive, trees[0])))
    pool.close()
    wait_for(lambda: not any(map(is_alive, [*trees[0], *trees[1], *guards])))


def test_a_killed_run_leaves_no_server_and_goes_on(llama_folder, tmp_path):
    prompts = [json.dumps({"turns": conversation.turns}) + "\n" for conversation, _ in conversations(44)]
    (tmp_path / "train.jsonl").write_text("".join(prompts[:40]))
    (tmp_path / "heldout.jsonl").write_text("".join(prompts[40:]))
    environment = [f"engine.environment.{name}={value}" for name, value in vllm_environment().items()]
    arguments = [
        *("generate", f"run.dir={tmp_path / 'run'}", "data=jsonl"),
        *(
            f"data.train={tmp_path / 'train.jsonl'}",
            f"data.heldout={tmp_path / 'heldout.jsonl'}",
            f"target.path={llama_folder}",
        ),
        *(f"target.max_length={MAX_LENGTH}", "sampling.temperature=0", "sampling.max_new_tokens=64"),
        *("engine=vllm_server", "engine.concurrency=2", "engine.max_num_seqs=2", *environment),
    ]
    parts = tmp_path / "run/responses"
    run = start(arguments)
    wait_for(lambda: run.poll() is not None or list(parts.glob("*.parquet")))
    tree = descendants(run.pid)
    os.killpg(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL, "it was done before it could be killed"
    assert len(tree) >= 4  # guard, server, engine, resource tracker
    wait_for(lambda: not any(map(is_alive, tree)))
    before = {response.key: response for response in ResponseStore(parts).load()}
    assert 0 < len(before) < 44

    again = start(arguments)
    assert again.wait(PATIENCE_S) == 0
    after = ResponseStore(parts).load()
    assert len(after) == 44 == len({response.key for response in after})
    assert sum(pq.ParquetFile(part).metadata.num_rows for part in parts.glob("*.parquet")) == 44
    for response in after:
        if response.key in before:
            assert response.input_ids.tolist() == before[response.key].input_ids.tolist()
    assert Counter(response.split for response in after) == {"train": 40, "heldout": 4}
    assert list((tmp_path / "run/logs").glob("*.log"))


def start(arguments):
    """The command line, at the head of a process group, with many small parts of responses."""
    code = (
        "import sys, spectrain.stages.generate as stage\n"
        "from spectrain.cli import main\n"
        "stage._PART_RESPONSES = 2\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.Popen([sys.executable, "-c", code, *arguments], process_group=0)


def wait_for(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.02)


def status(number):
    """(state, parent) of a process; None if there is none."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])


def is_alive(number):
    found = status(number)
    return found is not None and found[0] != "Z"


def descendants(number):
    """All processes under one, however deep."""
    parents = {
        int(path.name): found[1] for path in Path("/proc").glob("[0-9]*") if (found := status(path.name)) is not None
    }
    found = {number}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {number})
