"""Typed configuration of what the target is asked and how it answers: prompts (group ``data``), sampling, capture."""

from __future__ import annotations

from dataclasses import dataclass

from spectrain.config.keys import (
    ANY_COUNT,
    HOTTEST,
    SEEDS,
    TOP_K,
    Section,
    check_temperature,
    key,
    refuse_dash,
    require,
)

# What a row of a data set may be made of (data/row_forms.py).
DATA_COLUMNS = ("messages", "prompt", "instruction", "input", "turns", "system", "tools", "category", "language")


@dataclass(frozen=True)
class DataConfig(Section, name="data"):
    """Prompts (group ``data``). Files are JSON lines, a JSON array or Parquet rows, compressed or not, of
    ``{"turns": ["…"]}`` with optional ``id``, ``system``, ``category``, ``language``; ``{"messages": [{"role": …,
    "content": …}]}`` that already hold answers are imported, not generated."""

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
    path: str = key(
        "",
        "data set on the Hub, or a local folder or file of one (parquet, arrow, csv, json), that prompts are drawn "
        "from; empty: data.train names prompt files",
        example="HuggingFaceH4/ultrachat_200k",
    )
    subset: str | None = key(None, "configuration of the set at data.path; null: its only one", example="en")
    revision: str | None = key(
        None, "commit, branch or tag of data.path; null: the newest commit, which is recorded", example="main"
    )
    split: str = key("train", "split of data.path that is read", example="train_sft")
    columns: dict[str, str] = key(
        make=dict,
        help="which column of data.path holds what: messages, prompt, instruction, input, turns, system, tools, "
        "category, language; what is not named is looked for under the usual names",
        example="{prompt: question}",
    )
    license: str | None = key(
        None, "licence of data.path, recorded in the manifest; null: not known", example="apache-2.0"
    )
    mix: dict[str, float] = key(
        make=dict,
        help="share of each source in data.max_train and data.max_heldout, by the names of options of data=",
        example="{ultrachat: 0.7, code_alpaca: 0.3}",
        above=0,
        at_most=1e6,
    )
    max_rows: int | None = key(
        None,
        "at most so many rows of each set are read, from its beginning; null: all",
        at_least=1,
        example="100000",
        at_most=ANY_COUNT,
    )
    near_duplicates: float | None = key(
        0.8,
        "prompts of data.path and data.mix that share so much of their wording with another (Jaccard similarity of "
        "word triples, by MinHash) are left out; null: only equal ones",
        above=0,
        at_most=1,
        example="0.7",
    )
    overlap_words: int | None = key(
        8,
        "prompts of data.path and data.mix that share so many words in a row with a prompt of a suite are left out; "
        "null: suites are not compared",
        at_least=3,
        at_most=100,
        example="13",
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

    @property
    def selects(self) -> bool:
        """Whether prompts are drawn from data sets, rather than read from prompt files."""
        return bool(self.path or self.mix)

    @property
    def source(self) -> tuple[str, ...]:
        """What the prompts come from, as the user names it; empty: nothing is named."""
        return tuple(self.mix) or ((self.path,) if self.path else self.train)

    def _check(self) -> None:
        given = [name for name in ("train", "path", "mix") if getattr(self, name)]
        require(len(given) < 2, f"data.{' and data.'.join(given)} name prompts: give one of them")
        require(
            not (self.selects and self.heldout),
            "data.heldout: of a data set, data.heldout_fraction is set aside: leave it out, or use data.train",
        )
        require(not self.mix or self.max_train, "data.mix shares out data.max_train: set it")
        for name in self.columns:
            require(
                name in DATA_COLUMNS,
                f"data.columns.{name} is nothing that is read: use {', '.join(DATA_COLUMNS)}",
            )
        for name in ("path", "subset", "revision"):
            refuse_dash(f"data.{name}", getattr(self, name))


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
