"""A drafter's folder and its target's, as far as ``serve`` looks into them (fixtures), and the command made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafter_tools import HIDDEN, VOCAB, Options, random_drafter
from tiny import tiny_config, tiny_tokenizer

from spectrain import cli
from spectrain.config.loading import compose
from spectrain.drafters.drafter_folder import save_drafter
from spectrain.stages.serve import serve_command

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_target(folder: Path) -> Path:
    """A target's folder as far as `serve` looks into it; of the weights it samples a fingerprint."""
    tiny_config(
        "llama", hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=7, architectures=["LlamaForCausalLM"]
    ).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def write_drafter(folder: Path, target: str, **facts: Any) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_drafter(
        random_drafter(Options()),
        folder,
        target=target,
        target_architectures=("LlamaForCausalLM",),
        num_speculative_tokens=4,
        metadata=facts,
    )
    return folder


@pytest.fixture
def target(tmp_path) -> Path:
    return write_target(tmp_path / "a target")  # the space has to survive shells


@pytest.fixture
def drafter(tmp_path, target) -> Path:
    return write_drafter(tmp_path / "runs" / "mine" / "drafter", str(target))


def rewrite(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def command(*arguments: str) -> list[str]:
    parsed = cli.parse(["serve", *arguments])
    return serve_command(compose(parsed.overrides), parsed.overrides, parsed.flags).arguments


def value_of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def speculation(arguments: list[str]) -> dict[str, Any]:
    return json.loads(value_of(arguments, "--speculative-config"))
