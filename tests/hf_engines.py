"""The embedded engine of a tiny target, prompts for it to answer and answers for it to capture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tiny import tiny_target

from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling
from spectrain.engines.hf import HFEngine
from spectrain.target.model import TargetModel
from spectrain.target.resolve import resolve_target

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=14, seed=0)
SAMPLED = Sampling(temperature=0.8, top_p=0.9, top_k=40, max_new_tokens=14, seed=3)
# A random target hardly ever ends an answer by its one end token; with these it does so after some ten tokens.
END_IDS = [2, *range(5, 304, 12)]
EAGER = {"gpt_oss", "gemma2"}  # attention sinks and soft-capped scores exist in eager attention only


def make_engine(
    folder: Path, family: str, batch_size: int = 3, capture_tokens: int = 64, max_length: int = 400
) -> HFEngine:
    config = TargetConfig(
        path=str(tiny_target(family, folder)), attn_implementation="eager" if family in EAGER else "sdpa"
    )
    resolved = resolve_target(config)
    target = TargetModel.load(resolved, config)
    target.generation_config.eos_token_id = END_IDS
    return HFEngine(target, resolved, EngineConfig(batch_size=batch_size, capture_tokens=capture_tokens), max_length)


def make_conversations(count: int, turns: int = 1) -> list[tuple[Conversation, str]]:
    words = ("sum", "of the capital", "x", "Paris and 42 and more", "say it", "user")
    conversations = []
    for number in range(count):
        texts = tuple(
            " ".join(words[(number * 5 + turn + k) % 6] for k in range(1 + number % 5)) + f" {number}"
            for turn in range(turns)
        )
        conversations.append(
            (Conversation(id=f"c{number}", turns=texts, domain="d"), "heldout" if number % 4 == 3 else "train")
        )
    return conversations


def make_responses(lengths: list[int], seed: int = 0) -> list[Response]:
    random = np.random.default_rng(seed)
    responses = []
    for number, length in enumerate(lengths):
        mask = (np.arange(length) >= length // 3).astype(np.uint8)
        mask[length // 2] = 0  # a second user turn of one token
        ids = random.integers(3, 304, length).astype(np.int32)
        conversation = Conversation(id=f"r{number}", turns=("x",))
        responses.append(
            Response(
                conversation, ids, mask, "stop", GREEDY, None, "heldout" if number % 2 else "train", f"key{number}"
            )
        )
    return responses
