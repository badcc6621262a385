"""What capture with vLLM costs over a plain prefill of the same documents, side by side.

    python tests/bench/bench_vllm_capture.py [--target FOLDER] [--documents 64] [--tokens 256] [--taps 2,15,27]

Both send the same random documents to a vLLM of the same settings (float32, no prefix cache; without --target, with a
random target of SmolLM2-135M's shape) and ask for one token of each; the capturing one writes their states into shards.
Times are from the first request to the last answer, and for capture also until all shards are on disk; loading and four
documents of warm-up are left out. The log-normalizer, which is filled in when shards are adopted, is timed apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny import smollm2_sized

from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.hidden_states import StoredHiddenStates, StoreMeta
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling
from spectrain.engines.vllm.capture_plan import Document
from spectrain.engines.vllm.capture_states import VLLMCapture, await_arrival
from spectrain.engines.vllm.open_vllm import open_vllm
from spectrain.engines.vllm.requests import VLLMClient, completions
from spectrain.target.resolve import resolve_target
from spectrain.target.spec import TargetSpec

WARM_UP = 4


def make_responses(count: int, tokens: int, vocab_size: int) -> list[Response]:
    random = np.random.default_rng(0)
    mask = (np.arange(tokens) >= tokens // 2).astype(np.uint8)
    sampling = Sampling(0.0, 1.0, 0, tokens, 0)
    return [
        Response(
            Conversation(f"{n}", ("",)),
            random.integers(0, vocab_size, tokens).astype(np.int32),
            mask,
            "stop",
            sampling,
            None,
            "train",
            f"{n:05d}",
        )
        for n in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--taps", default="2,15,27")
    options = parser.parse_args()
    taps = tuple(int(tap) for tap in options.taps.split(","))
    engine = EngineConfig(name="vllm", self_check="off", args={"enable_prefix_caching": False})
    tokens = options.documents * options.tokens
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = options.target or str(smollm2_sized(folder / "target"))
        target = TargetConfig(path=path, dtype="float32", max_length=options.tokens + 1)
        resolved = resolve_target(target)
        spec = TargetSpec.from_folder(resolved.folder, False)
        responses = make_responses(options.documents + WARM_UP, options.tokens, spec.vocab_size)

        def opened(purpose: str, extra: Mapping[str, Any]) -> VLLMClient:
            return open_vllm(engine, target, resolved.folder, folder / "logs", purpose, extra)

        def send(client: VLLMClient, part: list[Response], states: bool) -> float:
            requests = [Document.of(response).request() for response in part]
            start_s = time.monotonic()
            if not states:
                requests = [dataclasses.replace(request, states=None) for request in requests]
            for _ in completions(client, requests):
                pass
            return time.monotonic() - start_s

        client = opened("plain", {})
        send(client, responses[:WARM_UP], states=False)
        plain_s = send(client, responses[WARM_UP:], states=False)
        client.close()
        print(f"plain prefill     {tokens / plain_s:8,.0f} tokens/s")

        meta = StoreMeta(resolved.id, resolved.revision, "", "", "", taps, spec.hidden_size, spec.num_layers, "float32")
        capturing = VLLMCapture(opened, engine, target, resolved, spec)
        with HiddenStatesWriter(folder / "hidden_states", meta) as writer:
            with capturing.running(capturing.plan(meta, 1 << 28), folder / "hidden_states", "capture", []) as (
                client,
                session,
            ):
                send(client, responses[:WARM_UP], states=True)
                start_s = time.monotonic()
                capture_s = send(client, responses[WARM_UP:], states=True)
                missing = await_arrival(session, {response.key for response in responses})
                written_s = time.monotonic() - start_s
            print(
                f"capture           {tokens / capture_s:8,.0f} tokens/s, {capture_s / plain_s - 1:+.1%}; "
                f"{len(missing)} documents lost"
            )
            print(f"  and on disk     {tokens / written_s:8,.0f} tokens/s, {written_s / plain_s - 1:+.1%}")
            start_s = time.monotonic()
            capturing.adopt_leftovers(writer, responses)
            print(f"log-normalizer and adoption took {time.monotonic() - start_s:.1f} s")
        assert len(StoredHiddenStates(folder / "hidden_states")) == len(responses)


if __name__ == "__main__":
    main()
