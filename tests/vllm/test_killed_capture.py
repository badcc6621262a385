"""Kills while states are being captured, beyond those of ``test_capture.py``: the run in one pass, and one server of
two.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from test_capture import MAX_LENGTH, Bench, assert_as_transformers, responses_of
from vllm_tools import vllm_engine, vllm_environment

from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.responses import ResponseStore
from spectrain.engines.vllm import capture_states
from spectrain.engines.vllm.servers import ServerPool

TAPS = (1, 3)
# The command line with small parts of responses, so that some are there soon.
SMALL_PARTS = """
import sys
import spectrain.stages.generate as stage
from spectrain.cli import main
stage._PART_RESPONSES = 2
sys.exit(main(sys.argv[1:]))
"""


def wait_for(condition: Callable[[], object], seconds: float = 900.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def keys_of(shard: Path) -> set[str]:
    with safe_open(shard, framework="pt") as file:
        return set(json.loads(file.metadata()["keys"]))


def test_a_run_in_one_pass_that_is_killed_goes_on(llama_folder: Path, tmp_path: Path) -> None:
    """States of the killed run are used, those of responses that it did not store are not there twice, and nothing is
    missing.
    """
    for name, numbers in (("train", range(30)), ("heldout", range(30, 34))):
        turns = [[f"Say {number}."] * (1 + (number % 5 == 0)) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"turns": turn}) + "\n" for turn in turns))
    run = tmp_path / "run"
    arguments = [
        *("data=jsonl", f"data.train={tmp_path / 'train.jsonl'}", f"data.heldout={tmp_path / 'heldout.jsonl'}"),
        *(
            f"target.path={llama_folder}",
            f"target.max_length={MAX_LENGTH}",
            "sampling.temperature=0",
            "sampling.max_new_tokens=60",
        ),
        *(
            "hidden_states.shard_bytes=65536",
            f"drafter.taps={list(TAPS)}",
            f"run.dir={run}",
            "capture.during_generation=true",
            "engine=vllm",
        ),
        *(
            "engine.max_num_seqs=2",
            *(f"engine.environment.{key}='{value}'" for key, value in vllm_environment().items()),
        ),
    ]
    command = [sys.executable, "-P", "-c", SMALL_PARTS]
    parts, incoming = run / "responses", run / "hidden_states" / ".incoming"

    def a_shard_holds_stored_responses_alone() -> bool:
        """Such a shard is used as it is; of one that holds others, too, a part may be captured once more."""
        stored = ResponseStore(parts).keys()
        return bool(stored) and any(keys_of(path) <= stored for path in incoming.glob("*/*.safetensors"))

    process = subprocess.Popen([*command, "generate", *arguments])
    try:
        wait_for(lambda: process.poll() is not None or a_shard_holds_stored_responses_alone())
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL, "it was done before it could be killed"
    left = {path.stat().st_ino for path in incoming.glob("*/*.safetensors")}
    before = ResponseStore(parts).keys()
    assert left and 0 < len(before) < 34

    subprocess.run([*command, "capture", *arguments], check=True, timeout=900)
    responses = ResponseStore(parts).load()
    assert len(responses) == 34 and before < {response.key for response in responses}
    store = StoredHiddenStates(run / "hidden_states")
    assert len(set(store.keys)) == len(store.keys) == 34
    bench = Bench(llama_folder, tmp_path, TAPS, vllm_engine())
    assert_as_transformers(bench, store, responses)
    assert left & {path.stat().st_ino for path in (run / "hidden_states").glob("*.safetensors")}  # the very files
    assert not incoming.exists()


def test_states_that_die_with_one_of_two_servers_are_captured_by_the_other(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = vllm_engine(name="vllm_server", replicas=2, concurrency=2, max_num_seqs=2, self_check="off")
    bench = Bench(llama_folder, tmp_path, TAPS, engine)
    responses = responses_of(bench)
    monkeypatch.setattr(capture_states, "_PATIENCE_S", 4.0)
    heard: list[int] = []
    killed: list[int] = []

    def on_tokens(count: int) -> None:
        heard.append(count)
        pool = bench.clients[0]
        assert isinstance(pool, ServerPool)
        # Once both have computed something: it is in their memory alone, for no shard is full.
        if not killed and all(endpoint.answered for endpoint in pool.endpoints):
            server = pool.endpoints[0].server
            assert server is not None and server._guard is not None
            children = Path(f"/proc/{server._guard.pid}/task/{server._guard.pid}/children").read_text().split()
            killed.append(int(children[0]))
            os.kill(killed[0], signal.SIGKILL)

    with HiddenStatesWriter(tmp_path / "hidden_states", bench.meta()) as writer:
        bench.capturing.shards(writer, responses, 1 << 24, on_tokens)
    assert killed, "both servers were never at work together"
    assert sorted(heard) == sorted(
        len(response.input_ids) for response in responses
    )  # progress counts no document twice
    assert_as_transformers(bench, StoredHiddenStates(tmp_path / "hidden_states"), responses)
    assert not (tmp_path / "hidden_states" / ".incoming").exists()
