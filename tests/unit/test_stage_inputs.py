"""What makes a stage run again: each setting that changes its outputs is an input of it, and no other one is.

Every stage is asked for its inputs under a configuration and under one that differs in one setting; nothing runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_target

from spectrain.config.commands import COMMANDS
from spectrain.config.loading import compose
from spectrain.stages import capture, fit, generate
from spectrain.stages.checks import prepare

STAGES = {"generate": generate, "capture": capture, "fit": fit}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """7 layers; it computes in float32."""
    return tiny_target("llama", tmp_path_factory.mktemp("target") / "tiny", num_hidden_layers=7)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Path) -> list[str]:
    monkeypatch.chdir(tmp_path)
    for name, numbers in (("train", range(8)), ("other", range(1, 9)), ("heldout", range(10, 12))):
        begin = "h" if name == "heldout" else "p"  # other.jsonl has the ids of train.jsonl and other prompts
        lines = [json.dumps({"id": f"{begin}{place}", "turns": [f"Say {n}."]}) for place, n in enumerate(numbers)]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    chosen = ["data=jsonl", "data.train=train.jsonl", "data.heldout=heldout.jsonl", f"target.path={target}"]
    return [*chosen, "target.max_length=256", "sampling.max_new_tokens=16", "sampling.temperature=1", "run.dir=run"]


def inputs(arguments: list[str]) -> dict[str, dict[str, Any]]:
    """Of every stage: name -> value of all that it depends on."""
    context = prepare(compose(arguments), COMMANDS["run"])
    decided = {name: stage.decide(context).inputs.to_json() for name, stage in STAGES.items()}
    return {name: {**entry["fixed"], **entry["growing"]} for name, entry in decided.items()}


EVERYWHERE, ON_STATES, TRAINING = ("generate", "capture", "fit"), ("capture", "fit"), ("fit",)


@pytest.mark.parametrize(
    ("setting", "changed", "stages"),
    [
        ("data.train=other.jsonl", {"training prompts", "responses"}, EVERYWHERE),
        ("data.max_train=7", {"training prompts", "responses"}, EVERYWHERE),
        ("sampling.temperature=0.5", {"sampling.temperature", "responses"}, EVERYWHERE),
        ("sampling.seed=1", {"sampling.seed", "responses"}, EVERYWHERE),
        ("sampling.max_new_tokens=15", {"sampling.max_new_tokens", "responses"}, EVERYWHERE),
        ("target.max_length=255", {"target.max_length"}, EVERYWHERE),
        ("target.dtype=bfloat16", {"target.dtype", "hidden_states.dtype"}, EVERYWHERE),
        ("hidden_states.dtype=bfloat16", {"hidden_states.dtype"}, ON_STATES),
        ("drafter.taps=[1,2,4]", {"drafter.taps"}, ON_STATES),
        ("trainer.seed=1", {"trainer.seed"}, TRAINING),
        ("trainer.learning_rate=0.5", {"trainer.learning_rate"}, TRAINING),
        ("drafter.eagle3.fc_norm=true", {"drafter.eagle3.fc_norm"}, TRAINING),
        ("drafter.autoregressive.ttt_steps=2", {"drafter.autoregressive.ttt_steps"}, TRAINING),
        ("drafter.draft_vocab_size=99", {"drafter.draft_vocab_size"}, TRAINING),
        ("drafter.loss.weights.kl=1", {"drafter.loss.weights"}, TRAINING),
        ("decoding.num_speculative_tokens=2", {"decoding.num_speculative_tokens"}, TRAINING),
        # What another kind of drafter reads, how fast batches come, what is kept, and how it is measured later.
        ("drafter.block.block_size=4", set(), ()),
        ("trainer.loader_workers=1", set(), ()),
        ("trainer.prefetch_batches=3", set(), ()),
        ("trainer.keep_checkpoints=7", set(), ()),
        ("trainer.log_every_steps=3", set(), ()),
        ("trainer.devices=2", set(), ()),
        ("trainer.gradient_checkpointing=true", set(), ()),
        ("trainer.compile=true", set(), ()),
        ("hidden_states.shard_bytes=1048576", set(), ()),
        ("decoding.ngram_max=5", set(), ()),
        ("suite.max_prompts=3", set(), ()),
        ("run.name=other", set(), ()),
    ],
)
@pytest.mark.slow
def test_a_setting_is_an_input_where_it_changes_what_is_made(
    arguments: list[str], setting: str, changed: set[str], stages: tuple[str, ...]
) -> None:
    before, now = inputs(arguments), inputs([*arguments, setting])
    found = {stage: {name for name in before[stage] if before[stage][name] != now[stage][name]} for stage in STAGES}
    assert all(before[stage].keys() == now[stage].keys() for stage in STAGES)
    assert tuple(stage for stage in STAGES if found[stage]) == stages
    assert set().union(*found.values()) == changed


def test_a_prompt_that_is_no_longer_held_out_changes_what_is_trained_on(arguments: list[str]) -> None:
    """The same responses, of which another part is trained on."""
    joined = [
        json.loads(line) for name in ("train", "heldout") for line in Path(f"{name}.jsonl").read_text().split("\n")
    ]
    for name, part in (("more", joined[:-1]), ("fewer", joined[-1:])):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    before = inputs(arguments)
    now = inputs([*arguments, "data.train=more.jsonl", "data.heldout=fewer.jsonl"])
    assert now["capture"]["responses"] != before["capture"]["responses"]
    assert now["fit"]["responses"] != before["fit"]["responses"]
