"""The whole chain on a task that can be learned to the end: a target that speaks in periods, its states, 300 steps, the
real loop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafter_tools import MemoryStore, fit, trainer_config
from small_targets import MOTIFS, PERIODIC_VOCAB, capture, periodic_target, periodic_text

from spectrain.config.drafter_schema import (
    AutoregressiveConfig,
    BlockConfig,
    DFlash2Config,
    DrafterConfig,
    DSparkConfig,
    Eagle3Config,
    LossConfig,
    PEagleConfig,
)
from spectrain.data.packing import pack_batch
from spectrain.data.vocab import build_vocab
from spectrain.decoding.acceptance import acceptance
from spectrain.decoding.loop import DecodingSettings, Prompt, speculative_generate
from spectrain.drafters.build import build_drafter
from spectrain.drafters.drafter_folder import load_drafter
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel

ANSWER, N = 30, 3
STARTS = [(m, phase) for m, motif in enumerate(MOTIFS) for phase in range(len(motif))]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModel, Path]:
    folder = tmp_path_factory.mktemp("periodic")
    return periodic_target(folder), folder


def answers(target: TargetModel, prompts: list[list[int]]) -> list[list[int]]:
    texts = [Prompt(prompt, ANSWER) for prompt in prompts]
    return [result.ids for result in speculative_generate(target, None, texts, DecodingSettings()).results]


def test_the_target_speaks_in_periods(target: tuple[TargetModel, Path]) -> None:
    prompts = [periodic_text(m, phase, 9) for m, phase in STARTS]
    assert answers(target[0], prompts) == [periodic_text(m, phase + 9, ANSWER) for m, phase in STARTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter_options", "trainer_options"),
    [
        ({"init": "random"}, {"learning_rate": 3e-3}),
        (
            {
                "init": "closed_form",
                "draft_vocab_size": 21,
                "layer_type": "qwen3",
                "eagle3": Eagle3Config(norm_output=True),
            },
            {"optimizer": "muon", "learning_rate": 3e-3, "muon_learning_rate": 3e-3},
        ),
        (
            {"method": "peagle", "num_layers": 2, "peagle": PEagleConfig(mask_token_id=2)},
            {"learning_rate": 3e-3},
        ),
        (
            {
                "method": "dflash",
                "init": "target",
                "num_layers": 2,
                "block": BlockConfig(block_size=N + 1, anchors=160),
                "draft_vocab_size": 21,
                "loss": LossConfig({"ce": 1.0}),
            },
            {"learning_rate": 3e-3},
        ),
        (
            {
                "method": "dspark",
                "init": "target",
                "num_layers": 2,
                "block": BlockConfig(block_size=N, anchors=160, sliding_window=20),
                "dspark": DSparkConfig(markov_rank=8),
            },
            {"learning_rate": 3e-3},
        ),
        (
            {
                "method": "dspark",
                "init": "target",
                "num_layers": 2,
                "block": BlockConfig(block_size=N, anchors=160),
                "dspark": DSparkConfig(markov="gated", markov_rank=8),
            },
            {"learning_rate": 3e-3},
        ),
        (
            {
                "method": "dspark",
                "init": "target",
                "num_layers": 2,
                "block": BlockConfig(block_size=N, anchors=160),
                "dspark": DSparkConfig(markov="rnn", markov_rank=8),
            },
            {"learning_rate": 3e-3},
        ),
        (
            {
                "method": "dflash2",
                "init": "target",
                "block": BlockConfig(block_size=N + 1, anchors=60),
                "dflash2": DFlash2Config(selector_rank=8, selector_top_k=4),
            },
            {"learning_rate": 3e-3},
        ),
    ],
    ids=[
        "llama, full vocabulary, adamw, from nothing",
        "qwen3, reduced vocabulary, muon, closed-form initialisation",
        "peagle, closed-form initialisation",
        "dflash",
        "dspark",
        "dspark, gated",
        "dspark, rnn",
        "dflash2",
    ],
)
def test_a_drafter_learns_it_and_the_loop_accepts_it(
    target: tuple[TargetModel, Path], tmp_path: Path, drafter_options: dict[str, Any], trainer_options: dict[str, Any]
) -> None:
    model, folder = target
    config = DrafterConfig(taps=(1, 2, 3), autoregressive=AutoregressiveConfig(ttt_steps=N), **drafter_options)
    prompts = [periodic_text(m, phase, 8 + phase % 3) for m, phase in STARTS]
    splits = ["heldout" if i % 5 == 4 else "train" for i in range(len(prompts))]
    documents = [
        capture(model, prompt, answer, config.taps or (), f"{i:03d}", split)
        for i, (prompt, answer, split) in enumerate(zip(prompts, answers(model, prompts), splits, strict=True))
    ]
    vocab = build_vocab(
        ((d.input_ids.numpy(), d.loss_mask.numpy()) for d in documents), config.draft_vocab_size, PERIODIC_VOCAB
    )
    assert vocab.coverage == 1.0
    head = TargetHead.from_checkpoint(folder)
    drafter = build_drafter(config, model.spec, vocab, head, folder)
    if config.init == "closed_form":
        assert drafter.closed_form_init(lambda: [pack_batch([d for d in documents if d.split == "train"])]) > 0
    settings = trainer_config(packed_length=160, max_steps=300, epochs=300, eval_every_steps=300, **trainer_options)
    result = fit(tmp_path, drafter, MemoryStore(documents), settings)

    assert result.steps == 300
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "loss" in line][-50:]
    for k in range(N):
        assert sum(line["accuracy_per_step"][k] for line in last) / len(last) >= 0.99
    # P-EAGLE's later slots see the text alone, not what was drafted. On the six held-out texts that takes three times
    # the steps to be as sure: after 300, 600 and 900 steps it is 0.93, 0.93 and 0.97 of the best, with four layers
    # after 300 and 400 0.95 and 0.92. Where the loop goes on from longer texts, below, it is as good as the others.
    share = 0.9 if config.method == "peagle" else 0.95
    assert result.best_acceptance_length > share * (1 + N)
    if config.method == "eagle3":  # the closed form alone gets some way
        assert (lines[0]["simulated_acceptance_length"] > 1.8) == (config.init == "closed_form")

    served = load_drafter(tmp_path / "drafter").attach(head)
    fresh = [periodic_text(m, phase, 12) for m, phase in STARTS]
    generation = speculative_generate(model, served, [Prompt(ids, ANSWER) for ids in fresh], DecodingSettings(N))
    assert acceptance([r.rounds for r in generation.results]).acceptance_rate >= 0.95
    assert [r.ids for r in generation.results] == answers(model, fresh)
