"""The small files of a target's folder, which anybody may have written: read and checked here, once, before any library
sees them.

Checked are what every reader relies on: plain files of a bearable size, UTF-8, JSON objects, sizes that a machine can
hold, fields of the type that they must have. What a family's configuration needs beyond that, transformers says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spectrain.console import quiet_transformers
from spectrain.errors import InputError
from spectrain.reading import check_file, read_json, read_text, understood

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
_JSON_FILES = (
    *(GENERATION_CONFIG, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "vocab.json", "preprocessor_config.json", "processor_config.json"),
)
_TEXT_FILES = ("chat_template.jinja", "merges.txt")
_MOST_CONFIG_BYTES = 1 << 24
_MOST_TEMPLATE_BYTES = 1 << 20
# Files that a library reads in its own way: only their size is known.
_OTHER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model")

# Fields of config.json that count something which is made at once: name -> the most that any model could have.
_LAYERS, _WIDTH, _ENTRIES = 10_000, 1 << 20, 1 << 24
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), _LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "num_attention_heads", "num_key_value_heads"), _WIDTH),
    **dict.fromkeys(("head_dim", "global_head_dim", "num_experts", "num_local_experts", "n_routed_experts"), _WIDTH),
    **dict.fromkeys(("vocab_size", "draft_vocab_size", "intermediate_size", "moe_intermediate_size"), _ENTRIES),
    "max_position_embeddings": 1 << 31,
}
_LANGUAGE_MODELS = ("text_config", "llm_config", "language_config", "thinker_config")


def check_files(folder: Path) -> None:
    """Every small file of a target's folder can be read and is what its name says. InputError names the first that is
    not.
    """
    check_config_file(folder)
    for name in _JSON_FILES:
        if _is_there(folder / name):
            read_json(folder / name)
    for name in _TEXT_FILES:
        if _is_there(folder / name):
            read_text(folder / name, _MOST_TEMPLATE_BYTES if name.endswith(".jinja") else 1 << 27)
    for name in _OTHER_FILES:
        if _is_there(folder / name):
            check_file(folder / name)
    check_generation_fields(folder)


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


# --- config.json ---------------------------------------------------------------------------------------------------


def check_config_file(folder: Path) -> None:
    """``config.json`` is a JSON object, and none of its sizes is absurd: some libraries make a list as long as a model
    has layers while they read it.
    """
    path = folder / CONFIG
    refuse_absurd_sizes(path, read_json(path, _MOST_CONFIG_BYTES), least=1)


def refuse_absurd_sizes(path: Path | str, fields: Mapping[str, Any], least: int = 0, prefix: str = "") -> None:
    """No size in a configuration, and in the sections below it, is absurd. InputError names ``path`` and field."""
    for name, value in fields.items():
        if name.endswith("_config") and value is not None:
            if not isinstance(value, dict):
                raise InputError(f"{path}: {prefix}{name} is {value!r:.60}, it must be an object")
            # The parts of a wrapper that are no language model (towers) may lack something.
            refuse_absurd_sizes(path, value, least if name in _LANGUAGE_MODELS else 0, f"{prefix}{name}.")
        elif name in _MOST and value is not None:
            several = value if isinstance(value, list) else [value]  # some families name them layer by layer
            if len(several) > _LAYERS:
                raise InputError(f"{path}: {prefix}{name} names {len(several):,} values, at most {_LAYERS:,} may be")
            for number in several:
                require_whole(path, f"{prefix}{name}", number, least, _MOST[name])


def require_whole(path: Path | str, name: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number within its bounds. InputError names file and field."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{path}: {name} is {value!r:.60}, it must be a whole number")
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most:,}"
        shown = f"{value:.6g}" if abs(value) < 1 << 1000 else f"{value!r:.60}"  # a whole number may have no float
        raise InputError(f"{path}: {name} is {shown}, it must be {bounds}")
    return value


# --- generation_config.json ----------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


# Field -> (test, what it must be), of those that are read.
_GENERATION: dict[str, tuple[Callable[[Any], bool], str]] = {
    "eos_token_id": (
        lambda value: all(map(_is_token, value)) if isinstance(value, list) else _is_token(value),
        "a token id, or a list of them",
    ),
    "temperature": (lambda value: _is_number(value) and value >= 0, "a number of at least 0"),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0, at most 1"),
    "top_k": (lambda value: isinstance(value, int) and -1 <= value < 1 << 31, "a whole number, 0 for none"),
    "do_sample": (lambda value: isinstance(value, bool), "true or false"),
}


def check_generation_fields(folder: Path) -> None:
    """What is read of ``generation_config.json``, where there is one, makes sense."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return
    fields = read_json(path)
    for name, (holds, wanted) in _GENERATION.items():
        value = fields.get(name)
        if value is not None and not holds(value):
            raise InputError(f"{path}: {name} is {value!r:.60}, it must be {wanted}: correct it or leave it out")


def load_generation_config(folder: Path) -> Any:
    """transformers' ``GenerationConfig`` of a folder, a neutral one where it has no such file. InputError for one that
    is broken: to go on without its end tokens would let answers run on.
    """
    from transformers import GenerationConfig

    path = folder / GENERATION_CONFIG
    if not path.exists():
        return GenerationConfig()
    check_generation_fields(folder)
    with understood(str(path)), quiet_transformers():
        return GenerationConfig.from_pretrained(str(folder), local_files_only=True)


# --- the tokenizer -------------------------------------------------------------------------------------------------


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """transformers' tokenizer of a folder. InputError for files that do not make a tokenizer, and for one with code of
    its own, unless that is allowed.
    """
    from transformers import AutoTokenizer

    path = folder / "tokenizer_config.json"
    fields = read_json(path) if path.is_file() else {}
    advice = ""
    if "auto_map" in fields and not trust_remote_code:
        advice = "it needs Python code of its own: read that code, then allow it with target.trust_remote_code=true"
    with understood(f"the tokenizer in {folder} (tokenizer.json, {path.name})", advice), quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
        # Some mistakes show only when it is used.
        _ = tokenizer.decode(tokenizer("a b", add_special_tokens=False)["input_ids"]), tokenizer.special_tokens_map
    end, template = tokenizer.eos_token_id, tokenizer.chat_template
    if end is not None and (not isinstance(end, int) or end < 0):
        raise InputError(f"{path}: eos_token has the id {end!r:.60}, it must be one of the tokenizer's tokens")
    if template is not None and not isinstance(template, str | dict):
        raise InputError(f"{path}: chat_template is {template!r:.60}, it must be a text")
    return tokenizer
