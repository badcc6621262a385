"""The pieces of a decoder layer, shared by every drafter. Names are those of Llama and Qwen3 checkpoints, which is what
vLLM loads.

Shapes: x_..H; heads are split as [N, T, hd] by the attention functions. All norms are plain RMS norms (``w * x /
rms``): a drafter never carries a family's (1 + w) convention.

A drafter's decoder layers: from the configuration and the target, and as a Hugging Face configuration in both
directions, which is what ``transformer_layer_config`` of a folder holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.console import quiet_transformers
from spectrain.drafters.compiled_pieces import gated, rms_norm, turned
from spectrain.drafters.field_checks import positive, whole
from spectrain.errors import ConfigError
from spectrain.target.served_rope import settled
from spectrain.target.spec import TargetSpec


@dataclass(frozen=True)
class LayerShape:
    """Dimensions of the drafter's decoder layers, as a Hugging Face Llama or Qwen3 configuration has them."""

    layer_type: str  # llama, or qwen3 with q/k norms
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            whole(getattr(self, name), name)
        positive(self.rms_norm_eps, "rms_norm_eps")
        positive(self.rope_parameters.get("rope_theta"), "rope_theta")
        for name in _OTHER_ARITHMETIC & set(self.rope_parameters):
            value = self.rope_parameters[name]
            if value and not (name == "partial_rotary_factor" and (value == 1 or self.rope_kind == "proportional")):
                raise ValueError(f"rope_parameters has {name}={value!r}: a drafter's heads are turned whole and alike")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, it must be even: rotary positions turn pairs")
        Rotary(self)  # raises for parameters that give no frequencies

    @property
    def qk_norm(self) -> bool:
        return self.layer_type == "qwen3"

    @property
    def rope_kind(self) -> str:
        return str(self.rope_parameters.get("rope_type", "default"))


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x²) + eps)``, computed in float32. First tokens of a document reach 10⁴ times the
    median.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Rotary:
    """Rotary phases, always in float32: rounding ``inv_freq`` to bf16 shifts late positions by whole radians.

    Not a module on purpose: ``module.to(bfloat16)`` must not reach the frequencies. Scaled variants (llama3, yarn,
    linear) come from transformers' own table, with the parameters that vLLM reads (``served_rope.py``), so that the
    drafter turns by the same phases as there. ValueError for a variant that is unknown or incomplete.
    """

    def __init__(self, shape: LayerShape) -> None:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        parameters, kind = settled(shape.rope_parameters, shape.max_position_embeddings, None), shape.rope_kind
        self.attention_scaling = 1.0
        if kind == "default":
            exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
            self.inv_freq = 1.0 / (float(parameters["rope_theta"]) ** exponent)
            return
        if kind not in ROPE_INIT_FUNCTIONS:
            raise ValueError(f"rope_type is {kind!r}, known are default, {', '.join(ROPE_INIT_FUNCTIONS)}")
        try:
            # of one head: it refuses heads that do not divide hidden_size, and head_dim is all that matters
            config = LlamaConfig(
                hidden_size=shape.head_dim,
                num_attention_heads=1,
                head_dim=shape.head_dim,
                max_position_embeddings=shape.max_position_embeddings,
                rope_parameters=parameters,
            )
            with quiet_transformers(), torch.device("cpu"):  # real numbers, also where a drafter is counted on meta
                self.inv_freq, self.attention_scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        except Exception as error:  # of many types, some of them transformers' own
            raise ValueError(f"rope_parameters of rope_type {kind!r}: {' '.join(str(error).split())}") from None
        if self.inv_freq.shape != (shape.head_dim // 2,):
            raise ValueError(
                f"rope_parameters of rope_type {kind!r} give {len(self.inv_freq)} frequencies, heads of "
                f"head_dim={shape.head_dim} turn by {shape.head_dim // 2}"
            )
        if not bool(self.inv_freq.isfinite().all()):
            raise ValueError(f"rope_parameters of rope_type {kind!r} give frequencies that are not finite")

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [...] -> cos and sin [..., hd] in float32 (float64 phases are never needed: positions are below
        2²⁴).
        """
        self.inv_freq = self.inv_freq.to(positions.device)
        phase = positions.float()[..., None] * self.inv_freq
        phase = torch.cat([phase, phase], dim=-1)
        return phase.cos() * self.attention_scaling, phase.sin() * self.attention_scaling


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary phases to x [..., T, N, hd]; cos and sin are [..., T, hd]."""
    return turned(x, *cos_sin)


class Projections(nn.Module):
    """q, k, v and o of one attention, with rotary phases and, for Qwen3, norms per head. Returns heads as [..., T, N,
    hd].
    """

    def __init__(self, shape: LayerShape, input_size: int) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, q_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def queries(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.shape.num_attention_heads, self.shape.head_dim))
        return rotate(self.q_norm(q) if self.shape.qk_norm else q, cos_sin)

    def keys_values(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        heads = (self.shape.num_key_value_heads, self.shape.head_dim)
        k, v = self.k_proj(x).unflatten(-1, heads), self.v_proj(x).unflatten(-1, heads)
        return rotate(self.k_norm(k) if self.shape.qk_norm else k, cos_sin), v

    def output(self, heads: Tensor) -> Tensor:
        return self.o_proj(heads.flatten(-2))


class DecoderLayer(nn.Module):
    """Base of decoder layers. Training calls one as a module and as a whole, so that the hooks of a strategy that
    shards parameters find it: they gather a layer's before it runs, and let them go after it.

    ``recompute``: the backward pass runs ``run`` again instead of keeping what is inside the layer
    (``trainer.gradient_checkpointing``). So ``run`` must give the same whenever it is called with the same arguments.
    """

    recompute = False

    def forward(self, *arguments: Any) -> Any:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.run, *arguments, use_reentrant=False)
        return self.run(*arguments)

    def run(self, *arguments: Any) -> Any:
        """What the layer computes."""
        raise NotImplementedError


class VocabProjection(nn.Linear):
    """A linear layer whose outputs are logits, one for each token of a vocabulary. The type tells it from layers
    between hidden features: each of its rows belongs to a token.
    """


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def hidden(self, x: Tensor) -> Tensor:
        """The units [..., I] that ``down_proj`` reads."""
        return gated(self.gate_proj(x), self.up_proj(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.hidden(x))


_ROPE_THETA_DEFAULT = 10000.0
# What vLLM reads besides, and what is not done here.
_OTHER_ARITHMETIC = frozenset(
    ("partial_rotary_factor", "rope_dim", "alpha", "mixed_b", "use_fope", "max_trained_positions")
)
# Frequencies of one plain rotary embedding. Partial and multi-axis settings of a target describe its own heads, not the
# drafter's.
ROPE_KEYS = frozenset(
    (
        "rope_type",
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "short_factor",
        "long_factor",
        "short_mscale",
        "long_mscale",
        "truncate",
    )
)


def layer_shape(config: DrafterConfig, spec: TargetSpec, layer_type: str, longrope: bool = True) -> LayerShape:
    """As the target's layers, where the configuration does not say otherwise. ``layer_type``: where it names none;
    ``longrope``: whether vLLM has it for such a drafter. Raises ConfigError for layers that cannot be.
    """
    heads = config.num_attention_heads or spec.num_attention_heads
    kv_heads = config.num_key_value_heads or min(spec.num_key_value_heads, heads)
    if heads % kv_heads:
        raise ConfigError(
            f"drafter.num_attention_heads={heads} must be a multiple of drafter.num_key_value_heads={kv_heads}"
        )
    head_dim = config.head_dim or spec.head_dim
    if head_dim % 2:
        raise ConfigError(f"drafter.head_dim={head_dim} must be even: rotary positions turn pairs")
    try:
        return LayerShape(
            layer_type=config.layer_type or layer_type,
            hidden_size=spec.hidden_size,
            intermediate_size=config.intermediate_size or spec.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=spec.rms_norm_eps,
            rope_parameters=_own_rope(spec.rope_parameters, head_dim, longrope),
            max_position_embeddings=spec.max_position_embeddings,
        )
    except ValueError as error:
        raise ConfigError(f"no drafter can have layers like the target's ({error}): correct its config.json") from None


def _own_rope(target: Mapping[str, Any], head_dim: int, longrope: bool) -> dict[str, Any]:
    """The drafter's rotary parameters: the target's, where its heads can be turned by them, else plain ones. Drafters
    learn with what they get, but have to be served with the same.
    """
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": _ROPE_THETA_DEFAULT}
    rope = plain | {key: value for key, value in target.items() if key in ROPE_KEYS and value is not None}
    if "factor" in rope and isinstance(rope["factor"], int):
        rope["factor"] = float(rope["factor"])  # vLLM takes a whole number for a list of factors
    fits = rope["rope_type"] in ("default", "linear", "dynamic", "yarn", "llama3") or (
        rope["rope_type"] == "longrope" and longrope and len(rope.get("short_factor") or ()) == head_dim // 2
    )
    # Other kinds: proportional is plain for heads that are turned whole, the rest are some family's own.
    return rope if fits else {"rope_type": "default", "rope_theta": rope["rope_theta"]}


def to_layer_config(shape: Any) -> dict[str, Any]:
    """Of a shape with ``layer`` and ``num_layers``; ``vocab_size`` is the target's."""
    layer = shape.layer
    return {
        "model_type": layer.layer_type,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_parameters": layer.rope_parameters,
        "rope_theta": layer.rope_parameters.get(
            "rope_theta", _ROPE_THETA_DEFAULT
        ),  # where releases before rope_parameters look
        "max_position_embeddings": layer.max_position_embeddings,
        "vocab_size": shape.target_vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def sliding_layers(num_layers: int, window: int | None) -> dict[str, Any]:
    """Fields of a Hugging Face configuration whose layers see so many positions, their own included; None: all."""
    kind = "full_attention" if window is None else "sliding_attention"
    return {"layer_types": [kind] * num_layers, "use_sliding_window": window is not None, "sliding_window": window}


def window_of(config: Mapping[str, Any]) -> int | None:
    """The other way round. Raises ValueError where not all layers are of one kind, KeyError or ValueError where they
    slide and nothing says how far.
    """
    kinds = config.get("layer_types") or ["full_attention"]
    if kinds not in ([kind] * len(kinds) for kind in ("full_attention", "sliding_attention")):
        raise ValueError(
            f"layer_types is {kinds!r}, this version reads sliding_attention or full_attention in all layers"
        )
    return whole(config["sliding_window"], "sliding_window") if kinds[0] == "sliding_attention" else None


def from_layer_config(config: dict[str, Any]) -> LayerShape:
    """Raises KeyError for a field that is missing, ValueError for a type of layer that is not known."""
    if config["model_type"] not in ("llama", "qwen3"):
        raise ValueError(f"its layer is of type {config['model_type']!r}, known are llama and qwen3")
    rope = config.get("rope_parameters") or {
        "rope_type": "default",
        "rope_theta": config.get("rope_theta", _ROPE_THETA_DEFAULT),
    }
    return LayerShape(
        layer_type=config["model_type"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters=rope,
        max_position_embeddings=config["max_position_embeddings"],
    )
