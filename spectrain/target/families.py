"""Per-family facts: how a target turns token ids into its residual stream, and its residual stream into logits.

A decoder's ends differ between families in five facts: the kind of final norm, whether its gain is ``w`` or ``1 + w``,
a factor on the embeddings, a factor on the logits, and a soft-cap on the logits. Getting one wrong gives a teacher that
looks plausible and is wrong, so nothing is guessed: of a model type that is not in ``FAMILIES`` they are measured on
its own code (``generic_family.py``) and compared with the loaded model before anything is done with them; a known one
whose configuration carries a factor that its entry does not read is an error.

To add a family, read its ``modeling_*.py`` in transformers (the norm's ``forward``, the embedding module, the lines
after ``lm_head``), add an entry, and add a tiny configuration of it to ``CONFIGS`` in ``tiny_targets.py``:
the tests compare entry and model numerically.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spectrain.errors import InputError

# Configuration fields that are known to scale embeddings or logits somewhere, with the value that does nothing.
SCALING_FIELDS: dict[str, float | None] = {
    "final_logit_softcapping": None,
    "logits_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "output_multiplier_scale": 1.0,
    "embedding_multiplier": 1.0,
    "embedding_multiplier_scale": 1.0,
    "scale_emb": 1.0,
    "dim_model_base": None,
}

SQRT_HIDDEN = "sqrt(hidden_size)"


@dataclass(frozen=True)
class Family:
    """Facts of one family. Names are those of ``config.json`` and of the checkpoint's tensors, below a prefix of
    ``prefixes``. Where a field is named, a number may stand that was measured and that no field holds.
    """

    norm: str = "rms"  # rms: x / sqrt(mean(x²) + eps); layer: the mean is subtracted first
    one_plus: bool = False  # gain 1 + w, with w stored around 0
    eps_field: str | float = "rms_norm_eps"
    embed_scale: str | float | None = None  # SQRT_HIDDEN, or the field whose value multiplies the embeddings
    logit_multiplier: str | float | None = None  # field whose value multiplies the logits
    logit_divisor: str | float | None = None  # field whose value divides the logits
    soft_cap: str | None = None  # field with c in c·tanh(logits / c); applied last
    # Where the decoder lies, in checkpoints (current and older layouts) and in the module tree alike; the first that
    # fits counts.
    prefixes: tuple[str, ...] = ("model.language_model.", "language_model.model.", "model.")
    embeddings: str = "embed_tokens"
    layers: str = "layers"
    final_norm: str = "norm"
    lm_heads: tuple[str, ...] = ("lm_head.weight", "language_model.lm_head.weight")
    # Its decoder hands out the keys and values of the last layer of each kind that makes its own (``shared_kv_states``
    # of transformers), which later layers and an assistant read.
    hands_out_kv: bool = False
    found: bool = False  # measured, not known: ``generic_check`` compares before anything is done


_PLAIN = Family()
_ONE_PLUS = Family(one_plus=True)
_GEMMA = Family(one_plus=True, embed_scale=SQRT_HIDDEN)
_GEMMA_CAPPED = Family(one_plus=True, embed_scale=SQRT_HIDDEN, soft_cap="final_logit_softcapping")
_COHERE = Family(norm="layer", eps_field="layer_norm_eps", logit_multiplier="logit_scale")
_GRANITE = Family(embed_scale="embedding_multiplier", logit_divisor="logits_scaling")

# Keyed by the language model's own model_type: a wrapper's text_config counts, not the wrapper.
FAMILIES: dict[str, Family] = {
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "ministral3": _PLAIN,
    "mixtral": _PLAIN,
    "phi3": _PLAIN,
    "olmo2": _PLAIN,
    "smollm3": _PLAIN,
    "glm4_moe": _PLAIN,
    "gpt_oss": _PLAIN,
    "deepseek_v3": _PLAIN,
    "mimo": _PLAIN,
    "deepseek_v32": _PLAIN,
    "kimi_k2": _PLAIN,  # DeepSeek-V3's model
    "minimax_m3_vl_text": _ONE_PLUS,
    "qwen2": _PLAIN,
    "qwen2_moe": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3_moe": _PLAIN,
    "qwen3_next": _ONE_PLUS,
    "qwen3_5_text": _ONE_PLUS,
    "qwen3_5_moe_text": _ONE_PLUS,
    "gemma": _GEMMA,
    "gemma2": _GEMMA_CAPPED,
    "gemma3_text": _GEMMA_CAPPED,
    # Gemma-4 went back to storing the whole gain.
    "gemma4_text": Family(embed_scale=SQRT_HIDDEN, soft_cap="final_logit_softcapping", hands_out_kv=True),
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
}


@dataclass(frozen=True)
class HeadMath:
    """A family's facts with one target's numbers put in: all that is needed around its weights."""

    family: Family
    hidden_size: int
    eps: float
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    soft_cap: float | None = None

    def scale_embeddings(self, rows: torch.Tensor) -> torch.Tensor:
        """Embedding rows of any shape, as they enter the residual stream.

        The factor is rounded to the rows' own type first: √3072 = 55.4256 acts as 55.5 in bfloat16, as in the models
        themselves.
        """
        return (
            rows
            if self.embed_scale == 1.0
            else rows * torch.full((), self.embed_scale, dtype=rows.dtype, device=rows.device)
        )

    def normalise(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The final norm over the last dimension, computed in float32 and returned in the type of ``weight``."""
        hidden = at_least_float32(hidden)
        if self.family.norm == "layer":
            hidden = hidden - hidden.mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)
        gain = weight.to(hidden.dtype)
        return (hidden * (1.0 + gain if self.family.one_plus else gain)).to(weight.dtype)

    def transform_logits(self, raw: torch.Tensor) -> torch.Tensor:
        """The output of lm_head, any shape, to float32 logits: factor, then soft-cap. Elementwise, so any part of a
        vocabulary will do.
        """
        logits = at_least_float32(raw)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Half precision widened to float32; float64, which tests use, kept."""
    return x if x.dtype == torch.float64 else x.float()


def family_of(hf_config: Any) -> Family:
    """Facts of the family of a transformers configuration; ``InputError`` where they are neither known nor found."""
    family = FAMILIES.get(hf_config.get_text_config(decoder=True).model_type)
    if family is None:
        from spectrain.target.generic_family import find_family  # builds the model

        return find_family(hf_config)
    return family


def head_math(hf_config: Any) -> HeadMath:
    """Looks the target's family up and reads its numbers; ``InputError`` for a family or a scaling field that nothing
    is known of.
    """
    text = hf_config.get_text_config(decoder=True)
    family = family_of(hf_config)
    if not family.found:
        _reject_unread_scaling(text, family)
    scale = _number(text, family.logit_multiplier, 1.0) / _number(text, family.logit_divisor, 1.0)
    embed_scale = text.hidden_size**0.5 if family.embed_scale == SQRT_HIDDEN else _number(text, family.embed_scale, 1.0)
    soft_cap = getattr(text, family.soft_cap, None) if family.soft_cap else None
    return HeadMath(family, text.hidden_size, _number(text, family.eps_field, None), embed_scale, scale, soft_cap)


def _reject_unread_scaling(text_config: Any, family: Family) -> None:
    read = {family.embed_scale, family.logit_multiplier, family.logit_divisor, family.soft_cap}
    for name, neutral in SCALING_FIELDS.items():
        value = getattr(text_config, name, None)
        if name not in read and value is not None and value != neutral:
            raise InputError(
                f"config.json of the target sets {name}={value}, which models of type {text_config.model_type!r} are "
                f"not known to use; "
                "remove the field or give the model its own entry in FAMILIES (spectrain/target/families.py)"
            )


def _number(text_config: Any, name: str | float | None, default: float | None) -> float:
    if isinstance(name, float):
        return name
    value = getattr(text_config, name, None) if name else default
    if value is None:
        raise InputError(
            f"config.json of the target (model type {text_config.model_type!r}) lacks {name}, a number its family needs"
        )
    return float(value)
