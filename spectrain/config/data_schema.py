"""Typed configuration of what the target is asked and how it answers: prompts (group ``data``), sampling, capture."""

from __future__ import annotations

from dataclasses import dataclass

from spectrain.config.keys import ANY_COUNT, HOTTEST, SEEDS, TOP_K, Section, check_temperature, key


@dataclass(frozen=True)
class DataConfig(Section, name="data"):
    """Prompts (group ``data``). Files are JSON lines, a JSON array or Parquet rows, compressed or not, of
    ``{"turns": ["…"]}`` with optional ``id``, ``system``, ``category``; ``{"messages": [{"role": …, "content": …}]}``
    that already hold answers are imported, not generated."""

    train: tuple[str, ...] = key(
        (),
        "files of training prompts, folders of them, or patterns such as data/*.jsonl; a relative name is looked up "
        "beside the working directory, then among the shipped prompts",
        example="[A.jsonl,B.jsonl]",
    )
    heldout: tuple[str, ...] = key(
        (),
        "files of held-out prompts; none: heldout_fraction of the training prompts is set aside",
        example="[C.jsonl]",
    )
    heldout_fraction: float = key(
        0.1, "share of the training prompts that is set aside where data.heldout names no file", above=0, below=1
    )
    max_train: int | None = key(
        None,
        "at most so many training prompts, drawn by data.seed; null: all",
        at_least=1,
        example="1000",
        at_most=ANY_COUNT,
    )
    max_heldout: int | None = key(
        64, "at most so many held-out prompts, drawn by data.seed; null: all", at_least=1, at_most=ANY_COUNT
    )
    system: str | None = key(
        None,
        "system prompt of conversations that have none; null: what the chat template does by itself",
        example='"Be brief."',
    )
    skip_too_long: bool = key(
        False,
        "leave out prompts that leave no room for an answer in target.max_length, and say how many; false: they are an "
        "error",
    )
    seed: int = key(0, "seed of the choice of prompts", at_least=0, below=SEEDS)


@dataclass(frozen=True)
class SamplingConfig(Section, name="sampling"):
    """How the target answers in ``generate``."""

    temperature: float | None = key(
        None,
        "0: greedy; null: as the target's generation_config says",
        at_least=0,
        example="0.6",
        at_most=HOTTEST,
    )
    top_p: float | None = key(
        None,
        "draw from the likeliest tokens that hold this share of the probability; null: as the target's "
        "generation_config says",
        above=0,
        at_most=1,
        example="0.95",
    )
    top_k: int | None = key(
        None,
        "draw from so many of the likeliest tokens, 0: from all; null: as the target's generation_config says",
        example="20",
        at_least=0,
        below=TOP_K,
    )
    max_new_tokens: int = key(512, "tokens that the target generates at most in one turn", at_least=1, at_most=1 << 24)
    seed: int = key(
        0,
        "seed of the answers; hf draws the same tokens again, also after an interruption; vLLM, whose batches may "
        "differ, from the same distribution",
        at_least=0,
        below=SEEDS,
    )

    def _check(self) -> None:
        check_temperature("sampling.temperature", self.temperature)


@dataclass(frozen=True)
class CaptureConfig(Section, name="capture"):
    """How hidden states are captured."""

    during_generation: bool = key(
        False,
        "generate stores the hidden states of what it generates, so that the target runs once (vLLM engines only)",
    )
