"""Targets small enough to train in a test, and what they compute: a llama that has learned a periodic corpus, captured
states, a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoders import float64_target, prompts_of
from tiny import tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM

from spectrain.data.hidden_states import TargetStates
from spectrain.decoding.loop import DecodingSettings, GenerationResult, speculative_generate
from spectrain.decoding.sampling import SamplingParams
from spectrain.target.families import head_math
from spectrain.target.model import TargetModel
from spectrain.target.spec import TargetSpec

# Five motifs over tokens 3 … 23; tokens recur inside and across motifs, so that what comes next is not a function of
# the last token.
MOTIFS = (
    (3, 4, 5, 3, 6, 7),
    (8, 9, 8, 10, 11),
    (12, 4, 13, 14, 12, 15, 16),
    (17, 18, 17, 17, 19),
    (20, 5, 21, 22, 9, 23, 20, 6),
)
PERIODIC_VOCAB = 24


def periodic_text(motif: int, phase: int, length: int) -> list[int]:
    tokens = MOTIFS[motif]
    return [tokens[(phase + i) % len(tokens)] for i in range(length)]


def periodic_target(folder: Path, steps: int = 120, family: str = "llama", **overrides: Any) -> TargetModel:
    """A target of 4 layers, trained for some seconds until it continues every motif; saved in ``folder``."""
    torch.manual_seed(0)
    config = tiny_config(family, **{"vocab_size": PERIODIC_VOCAB, "max_position_embeddings": 128, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    texts = torch.tensor([periodic_text(m, phase, 40) for m, motif in enumerate(MOTIFS) for phase in range(len(motif))])
    for _ in range(steps):
        model(input_ids=texts, labels=texts).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return TargetModel(model, tiny_tokenizer(), TargetSpec.from_config(config), head_math(config))


def random_target(folder: Path, vocab: int) -> TargetModel:
    """A random llama in float64 with a small vocabulary; saved in ``folder``."""
    return float64_target("llama", folder, vocab_size=vocab, hidden_size=16, intermediate_size=24)


def capture(
    target: TargetModel, prompt: Sequence[int], answer: Sequence[int], taps: Sequence[int], key: str, split: str
) -> TargetStates:
    """One document as the target sees it in one pass without a cache."""
    ids = torch.tensor([*prompt, *answer])
    output = target.run(ids[None], torch.arange(len(ids))[None], tap_ids=taps)
    taps_BSAH = output.taps_BSAH
    if taps_BSAH is None:  # none was asked for
        taps_BSAH = output.last_hidden_BSH.new_empty(1, len(ids), 0, output.last_hidden_BSH.shape[-1])
    return TargetStates(
        input_ids=ids.int(),
        loss_mask=torch.tensor([0] * len(prompt) + [1] * len(answer), dtype=torch.uint8),
        taps=taps_BSAH[0],
        last_hidden=output.last_hidden_BSH[0],
        log_normalizer=target.logits(output.last_hidden_BSH[0]).logsumexp(-1),
        key=key,
        split=split,
    )


def random_prompts(vocab: int, count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, size=rng.integers(2, 7)).tolist() for _ in range(count)]


def plain_answers(
    eos: int, target: TargetModel, texts: list[list[int]], length: int, sampling: SamplingParams, seed: int = 0
) -> list[GenerationResult]:
    """What the target answers without speculation."""
    settings = DecodingSettings(sampling=sampling, eos_ids=(eos,), seed=seed)
    return speculative_generate(target, None, prompts_of(texts, length), settings).results


def captured(
    taps: Sequence[int], target: TargetModel, texts: list[list[int]], results: list[GenerationResult]
) -> list[TargetStates]:
    pairs = zip(texts, results, strict=True)
    return [capture(target, text, result.ids, taps, f"{i:04d}", "train") for i, (text, result) in enumerate(pairs)]
