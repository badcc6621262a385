"""Generation by the real vLLM: the answers are those of the embedded engine, whatever is killed in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from vllm_tools import vllm_engine, vllm_environment

from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, ResponseStore, Sampling
from spectrain.engines.hf import HFEngine
from spectrain.engines.vllm.args import engine_args
from spectrain.engines.vllm.engine import VLLMEngine
from spectrain.engines.vllm.process import VLLMProcess
from spectrain.engines.vllm.requests import Request, VLLMClient, completions
from spectrain.errors import RunError
from spectrain.target.model import TargetModel
from spectrain.target.resolve import resolve_target

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=14, seed=0)
SAMPLED = Sampling(temperature=0.8, top_p=0.9, top_k=40, max_new_tokens=14, seed=3)
# A random target hardly ever ends an answer by its one end token; with these it does so after some ten tokens.
END_IDS = [2, *range(5, 304, 12)]
MAX_LENGTH = 200


@dataclass
class Engines:
    """The embedded engine and vLLM in a child process, on the same target."""

    embedded: HFEngine
    client: VLLMProcess
    vllm: VLLMEngine


@pytest.fixture(scope="module")
def engines(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """One start for all tests: it takes longer than they do. (Another family of targets: ``test_server.py``.)"""
    config = TargetConfig(path=str(llama_folder), max_length=MAX_LENGTH)
    resolved = resolve_target(config)
    target = TargetModel.load(resolved, config)
    target.generation_config.eos_token_id = END_IDS
    embedded = HFEngine(target, resolved, EngineConfig(batch_size=4), MAX_LENGTH)
    engine, log = vllm_engine(), tmp_path_factory.mktemp("logs") / "vllm.log"
    with VLLMProcess(engine, engine_args(engine, config, resolved.folder), log) as client:
        lasting = VLLMEngine(
            resolved, embedded.template, embedded.end_ids, MAX_LENGTH, lambda purpose, extra_args: nullcontext(client)
        )
        yield Engines(embedded, client, lasting)


def conversations(count: int, turns: int = 1) -> list[tuple[Conversation, str]]:
    words = ("sum", "of the capital", "x", "Paris and 42 and more", "say it", "user")
    asked = []
    for number in range(count):
        texts = tuple(
            " ".join(words[(number * 5 + turn + k) % 6] for k in range(1 + number % 5)) + f" {number}"
            for turn in range(turns)
        )
        asked.append((Conversation(id=f"c{number}", turns=texts), "heldout" if number % 4 == 3 else "train"))
    return asked


def by_key(responses: Iterator[Response]) -> dict[str, Response]:
    found = list(responses)
    keyed = {response.key: response for response in found}
    assert len(keyed) == len(found)
    return keyed


def content(response: Response) -> tuple[object, ...]:
    tokens = response.input_ids.tolist(), response.loss_mask.tolist()
    return *tokens, response.finish_reason, response.split, response.conversation, response.sampling


def same(one: Response, other: Response) -> bool:
    return content(one) == content(other)


def collect_until_error(client: VLLMClient) -> None:
    for _ in range(20):
        client.collect(1.0)


def test_greedy_answers_are_those_of_the_embedded_engine(engines: Engines) -> None:
    asked = [*conversations(24), *((replace(c, id=f"m{c.id}"), s) for c, s in conversations(8, turns=3))]
    tokens: list[int] = []
    found = by_key(engines.vllm.generate(asked, GREEDY, tokens.append))
    expected = by_key(engines.embedded.generate(asked, GREEDY))
    assert found.keys() == expected.keys()
    assert [key for key, response in found.items() if not same(response, expected[key])] == []
    assert sum(tokens) == sum(int(response.loss_mask.sum()) for response in found.values())
    # Nothing above is empty: answers end both ways, and some conversations went on after their first answer.
    assert {response.finish_reason for response in found.values()} == {"stop", "length"}
    further = [key for key in found if "-" in key]  # a turn that is a document of its own
    spans = [int((response.loss_mask[1:] > response.loss_mask[:-1]).sum()) for response in found.values()]
    assert sum(number > 1 for number in spans) + len(further) >= 3


def test_an_answer_ends_with_the_document(engines: Engines) -> None:
    embedded, vllm = engines.embedded, engines.vllm
    asked = conversations(6)
    longest = max(len(embedded.template.first_prompt_ids(conversation)) for conversation, _ in asked)
    cut = VLLMEngine(vllm.resolved, vllm.template, vllm.end_ids, longest + 3, vllm.open_vllm)
    reference = HFEngine(embedded.target, embedded.resolved, EngineConfig(), longest + 3)
    found, expected = by_key(cut.generate(asked, GREEDY)), by_key(reference.generate(asked, GREEDY))
    assert all(same(found[key], expected[key]) for key in expected)
    assert max(len(response.input_ids) for response in found.values()) == longest + 3


def test_sampled_answers_do_not_depend_on_company_and_follow_the_seed(
    engines: Engines,
) -> None:
    asked = conversations(10, turns=2)
    whole = by_key(engines.vllm.generate(asked, SAMPLED))
    part = by_key(engines.vllm.generate(asked[3:5], SAMPLED))
    assert all(same(response, whole[key]) for key, response in part.items())
    other = by_key(engines.vllm.generate(asked, replace(SAMPLED, seed=4)))
    texts = [{tuple(response.input_ids.tolist()) for response in found.values()} for found in (whole, other)]
    assert len(texts[0] & texts[1]) <= 2


def test_sampled_answers_follow_the_truncated_distribution(engines: Engines) -> None:
    """First tokens of one prompt under many seeds, against the distribution computed from the unmodified model's logits
    (chi-squared).
    """
    embedded = engines.embedded
    prompt = embedded.template.first_prompt_ids(conversations(1)[0][0])
    logits_V = embedded.target.model(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    scaled_V = logits_V / SAMPLED.temperature
    kept = sorted(range(len(scaled_V)), key=lambda token: -float(scaled_V[token]))[: SAMPLED.top_k]
    weights = torch.softmax(scaled_V[kept], 0).tolist()
    sampling, mass = {}, 0.0
    for token, weight in zip(kept, weights, strict=True):
        if mass < SAMPLED.top_p:
            sampling[token] = weight
        mass += weight
    total = sum(sampling.values())
    draws = 600
    counts = dict.fromkeys(sampling, 0)
    pending = [
        Request(f"{n}", prompt, 1, SAMPLED.temperature, SAMPLED.top_p, SAMPLED.top_k, seed=n * 7919 + 1)
        for n in range(draws)
    ]
    for completion in completions(engines.client, pending):
        counts[completion.ids[0]] += 1  # KeyError: a token outside the distribution
    expected = {token: draws * weight / total for token, weight in sampling.items()}
    statistic = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in sampling)
    freedom = len(sampling) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_what_vllm_refuses_is_said(engines: Engines) -> None:
    engines.client.submit(Request("long", [1] * (MAX_LENGTH + 50), 5))
    with pytest.raises(RunError, match=r"vLLM refused request long: .*"):
        collect_until_error(engines.client)


def test_a_killed_engine_ends_the_stage_and_its_log_is_quoted(engines: Engines) -> None:
    """The last test of this client."""
    client = engines.client
    client.submit(Request("long", [1, 2, 3], 190))
    os.kill(client._process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"(?s)vLLM ended while it was at work \(killed by SIGKILL\).*vllm\.log"):
        collect_until_error(client)
    with pytest.raises(RunError, match="cannot be reached"):
        client.submit(Request("more", [1] * 100_000, 5))  # more than a pipe holds
    client.close()
    client.close()


def test_an_engine_that_cannot_start_quotes_its_log(tmp_path: Path, llama_folder: Path) -> None:
    engine = vllm_engine({"max_model_len": 100_000})
    args = engine_args(engine, TargetConfig(max_length=MAX_LENGTH), llama_folder)
    with pytest.raises(RunError, match=r"(?s)vLLM did not start .*vllm\.log.*max_model_len \(100000\) is greater"):
        VLLMProcess(engine, args, tmp_path / "vllm.log")


def test_generate_goes_on_after_a_kill_and_leaves_nothing_running(tmp_path: Path, llama_folder: Path) -> None:
    """The whole command line; killed outright after its first part is on disk, then run again."""
    for name, numbers in (("train", range(40)), ("heldout", range(40, 44))):
        lines = [json.dumps({"turns": [f"Say {number}."] * (1 + (number % 5 == 0))}) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    run = tmp_path / "run"
    variables = vllm_environment()
    arguments = [
        *(
            "generate",
            "data=jsonl",
            f"data.train={tmp_path / 'train.jsonl'}",
            f"data.heldout={tmp_path / 'heldout.jsonl'}",
        ),
        *(
            f"target.path={llama_folder}",
            "target.max_length=256",
            "sampling.temperature=0",
            "sampling.max_new_tokens=60",
        ),
        *(
            f"run.dir={run}",
            "engine=vllm",
            "engine.max_num_seqs=2",
            *(f"engine.environment.{k}='{v}'" for k, v in variables.items()),
        ),
    ]
    small_parts = "import sys, spectrain.stages.generate as g; g._PART_RESPONSES = 2; from spectrain.cli import main; sys.exit(main(sys.argv[1:]))"  # noqa: E501
    command = [sys.executable, "-P", "-c", small_parts, *arguments]
    process = subprocess.Popen(command)
    try:
        wait_for(lambda: process.poll() is not None or any((run / "responses").glob("*.parquet")), 900)
        assert process.poll() is None
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    finally:
        process.kill()
        process.wait()
    assert len(children) == 1
    wait_for(lambda: not any(alive(group) for group in children), 30)
    before = ResponseStore(run / "responses").keys()
    assert 0 < len(before) < 44
    subprocess.run(command, check=True, timeout=900)
    rows = sum(pq.ParquetFile(part).metadata.num_rows for part in (run / "responses").glob("*.parquet"))
    found = ResponseStore(run / "responses").load()
    assert rows == len(found) == 44
    assert before < {response.key for response in found}

    config = TargetConfig(path=str(llama_folder), max_length=256)
    resolved = resolve_target(config)
    embedded = HFEngine(TargetModel.load(resolved, config), resolved, EngineConfig(), 256)
    expected = by_key(
        embedded.generate([(response.conversation, response.split) for response in found], found[0].sampling)
    )
    assert [response.key for response in found if not same(response, expected[response.key])] == []


def alive(group: int) -> bool:
    """Whether the process group has a member that is not merely waiting to be reaped."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, member = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(member) == group and state != "Z":
                return True
    return False


def wait_for(condition: object, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.1)
