"""A tiny target with prompts, and the command line of a run that takes a second or two."""

from __future__ import annotations

import json
from pathlib import Path

from tiny import tiny_target

WORDS = ("cat", "dog", "sun", "tree", "river", "stone", "blue", "red", "fast", "slow")


def write_prompts(path: Path, numbers: range) -> None:
    """Every fifth conversation has two turns, every seventh a system prompt; languages take turns (so it is said)."""
    with path.open("w", encoding="utf-8") as file:
        for number in numbers:
            conversation: dict[str, object] = {"turns": [f"Tell me about {WORDS[number % 10]} number {number}."]}
            if number % 5 == 0:
                conversation["turns"] = [f"Tell me about {WORDS[number % 10]} number {number}.", "And then?"]
            if number % 7 == 0:
                conversation["system"] = "Be brief."
            conversation["language"] = ("en", "de")[number % 2]
            file.write(json.dumps(conversation) + "\n")


def make(folder: Path, **shape: int) -> list[str]:
    """Target (``shape``: fields of its configuration) and prompts in ``folder``; returns the arguments that make a run
    of them (``run.dir`` is the caller's).
    """
    target = tiny_target("llama", folder / "target", num_hidden_layers=7, **shape)
    write_prompts(folder / "train.jsonl", range(16))
    write_prompts(folder / "heldout.jsonl", range(16, 22))
    return [
        *("data=jsonl", f"data.train={folder / 'train.jsonl'}", f"data.heldout={folder / 'heldout.jsonl'}"),
        *(
            f"target.path={target}",
            "target.name=tiny",
            "target.max_length=256",
            "sampling.temperature=0",
            "sampling.max_new_tokens=12",
        ),
        *(
            "engine.batch_size=4",
            "engine.capture_tokens=256",
            "hidden_states.shard_bytes=65536",
            "drafter.draft_vocab_size=100",
        ),
        *(
            "trainer.packed_length=256",
            "trainer.epochs=2",
            "trainer.eval_every_steps=2",
            "trainer.learning_rate=0.01",
            "suite.max_prompts=3",
        ),
    ]
