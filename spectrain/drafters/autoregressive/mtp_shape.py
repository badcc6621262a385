"""What decides the parameters and the arithmetic of a multi-token-prediction head: its family and its target's
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from spectrain.drafters.drafter import DrafterShape
from spectrain.drafters.layers import ROPE_KEYS, LayerShape, Rotary
from spectrain.target.families import FAMILIES
from spectrain.target.mtp_heads import MTP_HEADS, MtpHead, attention_sizes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MtpShape(DrafterShape):
    """``family``: key of ``MTP_HEADS``; ``text``: fields of the language model's configuration; ``dtype``: of the
    weights as they are written; ``active``: experts that a token meets, of ``experts``.
    """

    family: str
    text: Mapping[str, Any]
    dtype: str
    experts: int = 0
    active: int = 0
    taps: tuple[int, ...] = ()
    num_layers: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        if self.family not in MTP_HEADS:
            raise ValueError(f"its family is {self.family!r}, known are {', '.join(MTP_HEADS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"its dtype is {self.dtype!r}, known are {', '.join(DTYPES)}")
        Rotary(self.turned)

    @property
    def head(self) -> MtpHead:
        return MTP_HEADS[self.family]

    @property
    def most_context(self) -> int | None:
        return int(self.text[self.head.selects]) if self.head.selects else None

    @property
    def offset(self) -> float:
        """What is added to stored gains."""
        family = FAMILIES.get(str(self.text["model_type"]))
        return 1.0 if family is not None and family.one_plus else 0.0

    @property
    def hidden_size(self) -> int:
        return int(self.text["hidden_size"])

    @property
    def target_vocab_size(self) -> int:  # type: ignore[override]
        return int(self.text["vocab_size"])

    @property
    def draft_vocab_size(self) -> int:  # type: ignore[override]
        return self.target_vocab_size

    @property
    def target_layers(self) -> int:
        return int(self.text["num_hidden_layers"])

    @property
    def sizes(self) -> tuple[int, int, int]:
        return attention_sizes(self.family, self.text)

    @property
    def layer(self) -> LayerShape:
        """Dimensions of the layer as cache and plan see it."""
        return self._layer(self.sizes[0])

    @property
    def turned(self) -> LayerShape:
        """The same with heads as wide as what turns of them, which decides the rotary phases."""
        return self._layer(self.sizes[1])

    def _layer(self, head_dim: int) -> LayerShape:
        text, (_, _, kv_heads) = self.text, self.sizes
        rope = text.get("rope_parameters") or {}
        plain = {"rope_type": "default", "rope_theta": text.get("rope_theta") or 10000.0}
        inner = int(text.get("intermediate_size") or 0)
        if self.experts:
            inner = self.active * int(text["moe_intermediate_size"]) + int(
                text.get("shared_expert_intermediate_size")
                or (text.get("n_shared_experts") or 0) * text["moe_intermediate_size"]
            )
        return LayerShape(
            layer_type="qwen3" if self.head.qk_norm else "llama",
            hidden_size=self.hidden_size,
            intermediate_size=inner,
            num_attention_heads=int(text["num_attention_heads"]),
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(text["rms_norm_eps"]),
            rope_parameters=plain | {key: rope[key] for key in ROPE_KEYS if rope.get(key) is not None},
            max_position_embeddings=int(text["max_position_embeddings"]),
        )


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a transformers configuration that a config.json can hold and a layer may depend on."""
    dropped = ("quantization_config", "_name_or_path", "transformers_version", "dtype", "torch_dtype")
    return {name: value for name, value in fields.items() if name not in dropped and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)
