"""Real servers with a drafter: started by ``spectrain serve``, and by vLLM alone from the folder that training
wrote.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import torch
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM
from vllm_tools import vllm_environment, vllm_target

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.data.vocab import build_vocab, full_vocab
from spectrain.drafters.build import build_drafter
from spectrain.drafters.drafter_folder import save_drafter
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec

START_S, TOKENS, DRAFTS = 600.0, 24, 3
PROMPT = [5, 6, 7, 8, 9, 10, 200, 201]


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    target: Path
    drafter: Path
    socket: Path
    log: Path

    def ask(self, method: str, path: str, **body: Any) -> Any:
        transport = httpx2.HTTPTransport(uds=str(self.socket))
        with httpx2.Client(transport=transport, base_url="http://server", timeout=60.0) as client:
            answer = client.request(method, path, json=body or None)
        assert answer.status_code == 200, answer.text
        return answer

    def wait_ready(self) -> None:
        end_s = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-30000:]
            assert time.monotonic() < end_s, "not ready in time"
            try:
                self.ask("GET", "/health")
                return
            except (httpx2.TransportError, OSError):
                time.sleep(0.2)

    def counters(self) -> dict[str, float]:
        lines = self.ask("GET", "/metrics").text.splitlines()
        pairs = [
            line.rpartition(" ") for line in lines if line.startswith("vllm:spec_decode_num_") and "_total{" in line
        ]
        totals: dict[str, float] = {}
        for name, _, value in pairs:
            key = name.partition("{")[0].removeprefix("vllm:spec_decode_num_").removesuffix("_total")
            totals[key] = totals.get(key, 0.0) + float(value)
        return totals


def make_drafter(folder: Path, target: Path, draft_vocab_size: int | None) -> Path:
    spec, head = TargetSpec.from_folder(target), TargetHead.from_checkpoint(target)
    vocab = build_vocab([], draft_vocab_size, spec.vocab_size) if draft_vocab_size else full_vocab(spec.vocab_size)
    drafter = build_drafter(DrafterConfig(init="target", draft_vocab_size=draft_vocab_size), spec, vocab, head, target)
    save_drafter(
        drafter, folder, target=str(target), target_architectures=spec.architectures, num_speculative_tokens=DRAFTS
    )
    return folder


# How it is started, the target's family, the size of the draft vocabulary.
WAYS = {
    "spectrain serve": ("llama", None),
    "vLLM, the folder alone": ("qwen3", 100),
}


@contextmanager
def running(way: str, place: Path) -> Iterator[Server]:
    family, draft_vocab_size = WAYS[way]
    target = vllm_target(family, place / "target")
    drafter = make_drafter(place / "drafter", target, draft_vocab_size)
    socket, log = place / "s", place / "log"
    flags = ["--uds", str(socket), "--max-model-len", "256", "--max-num-batched-tokens", "512"]
    if way == "spectrain serve":
        command = [sys.executable, "-m", "spectrain", "serve", f"drafter.path={drafter}", "--", *flags]
    else:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(drafter), *flags]
        command += ["--dtype", "float32", "--enforce-eager"]
    environment = {**os.environ, **vllm_environment(), "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0)))}
    if way != "spectrain serve":
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one import of vLLM less
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=place)
    server = Server(process, target, drafter, socket, log)
    try:
        server.wait_ready()
        yield server
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        process.wait()
        for child in children:
            if child.is_running():
                child.kill()


@torch.no_grad()
def greedy(target: Path, prompt: list[int], tokens: int) -> list[int]:
    """The target's own continuation, by transformers, without a cache."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# One test for each server: it takes half a minute to start, and test runners that share tests out would start it again.
@pytest.mark.parametrize("way", WAYS)
def test_a_server_with_a_drafter(way: str, tmp_path: Path) -> None:
    with running(way, tmp_path) as server:
        name = server.ask("GET", "/v1/models").json()["data"][0]["id"]
        check_that_it_answers_as_the_target_and_speculates(server, name)
        check_that_it_chats_with_the_targets_tokenizer_and_template(server, name)
        check_that_it_runs_what_it_was_told(server)
        if way == "spectrain serve":
            check_that_a_signal_ends_it_and_all_its_processes(server)


def check_that_it_answers_as_the_target_and_speculates(server: Server, name: str) -> None:
    options = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    answer = server.ask("POST", "/v1/completions", model=name, prompt=PROMPT, **options).json()
    assert answer["choices"][0]["token_ids"] == greedy(server.target, PROMPT, TOKENS)
    counters = server.counters()
    assert counters["drafts"] > 0
    assert counters["draft_tokens"] == DRAFTS * counters["drafts"]


def check_that_it_chats_with_the_targets_tokenizer_and_template(server: Server, name: str) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    answer = server.ask("POST", "/v1/chat/completions", model=name, messages=chat, max_tokens=4, temperature=0).json()
    wrapped = tiny_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert answer["usage"]["prompt_tokens"] == len(wrapped)
    assert 1 <= answer["usage"]["completion_tokens"] <= 4


def check_that_it_runs_what_it_was_told(server: Server) -> None:
    log = server.log.read_text(errors="replace")
    assert f"method='eagle3', model='{server.drafter}', num_spec_tokens={DRAFTS}" in log
    assert f"model='{server.target}'" in log
    assert f"tokenizer='{server.target}'" in log


def check_that_a_signal_ends_it_and_all_its_processes(server: Server) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 143
    assert b"stopped by SIGTERM: the server has ended" in server.log.read_bytes()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
