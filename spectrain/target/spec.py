"""What is known of a target before its weights are read: dimensions, layer kinds, rotary parameters.

Everything comes from the checkpoint's ``config.json`` through transformers. Multi-modal wrappers (Gemma-3, Gemma-4,
Qwen3.5, …) nest the language model's configuration under ``text_config``; a ``TargetSpec`` always describes the
language model.

Ids that end an answer of the target: one definition for every engine, the chat template and the loss mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spectrain.console import quiet_transformers
from spectrain.errors import InputError
from spectrain.reading import understood
from spectrain.target.attention_size import attention_entries
from spectrain.target.folder_files import CONFIG, check_config_file
from spectrain.target.quantization import Quantization, quantization_of
from spectrain.target.served_rope import is_longrope, settled

# Layers whose state is a K/V cache. Any other kind (linear_attention, mamba, conv, …) carries a recurrent state that
# cannot be cropped.
ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: ``count`` MLPs of ``width`` a layer, of which a token meets ``active``, beside a shared one
    of ``shared_width``; the first ``dense_layers`` have an ordinary MLP instead.
    """

    count: int
    active: int
    width: int
    shared_width: int
    dense_layers: int


@dataclass(frozen=True)
class TargetSpec:
    """Dimensions of a target's language model.

    Where layers differ in width (Gemma-4), numbers of heads, ``head_dim`` and ``intermediate_size`` are those of the
    first layer. ``rope_parameters`` is the flat dictionary of transformers (``rope_type``, ``rope_theta``, …); families
    with one set per layer kind (Gemma-3, Gemma-4) give that of their full-attention layers. ``sliding_window`` is None
    unless some layer uses it. ``hybrid``: some layer carries a recurrent state. ``dtype`` is the type of the
    checkpoint's weights.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    tie_word_embeddings: bool
    hybrid: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None
    architectures: tuple[str, ...]
    dtype: torch.dtype
    quantization: Quantization | None = None
    experts: Experts | None = None
    # What this was read from, and all fields of the language model's part, for what is built like its layers.
    config: Any = field(default=None, compare=False, repr=False)
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    attention_entries: int | None = None  # of all layers' attention matrices; None: four ordinary ones a layer
    kv_shapes: tuple[tuple[int, int], ...] = ()  # (key-value heads, size of a head) of each layer, where layers differ
    shared_kv_layers: int = 0  # the last layers, which make no keys and values but read those of earlier ones
    rope_by_kind: Mapping[str, dict[str, Any]] = field(
        default_factory=dict
    )  # of each kind of layer, where kinds differ

    @classmethod
    def from_config(cls, hf_config: Any, folder: Path | None = None) -> TargetSpec:
        """Reads a transformers configuration. A field that a decoder cannot lack and that is missing is an
        ``InputError``. ``folder``: where the target's other files are, some of which say how it is quantised.
        """
        text = hf_config.get_text_config(decoder=True)
        first = text.per_layer_config[0] if getattr(text, "is_heterogeneous", False) else text
        heads = _required(first, "num_attention_heads")
        hidden = _required(text, "hidden_size")
        layers = _required(text, "num_hidden_layers")
        layer_types = _layer_types(text, layers)
        return cls(
            model_type=text.model_type,
            hidden_size=hidden,
            num_layers=layers,
            vocab_size=_required(text, "vocab_size"),
            intermediate_size=_whole(
                first, ("dense_intermediate_size", "intermediate_size", "moe_intermediate_size"), 4 * hidden
            ),
            num_attention_heads=heads,
            num_key_value_heads=_whole(first, ("num_key_value_heads",), heads),
            head_dim=_whole(first, ("head_dim",), hidden // heads),
            rms_norm_eps=_positive(text, ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-6),
            rope_parameters=_rope_parameters(text),
            max_position_embeddings=_whole(text, ("max_position_embeddings",), 2048),
            # A wrapper and its nested model each have the field, and either may be the one a checkpoint sets.
            tie_word_embeddings=any(getattr(config, "tie_word_embeddings", False) for config in (hf_config, text)),
            hybrid=any(kind not in ATTENTION_LAYER_TYPES for kind in layer_types),
            layer_types=layer_types,
            sliding_window=getattr(text, "sliding_window", None) if "sliding_attention" in layer_types else None,
            architectures=_texts("architectures", getattr(hf_config, "architectures", None) or ()),
            dtype=_dtype(hf_config, text),
            quantization=quantization_of(hf_config, folder),
            experts=_experts(text),
            config=hf_config,
            fields=text.to_dict(),
            attention_entries=attention_entries(text, layer_types),
            kv_shapes=_kv_shapes(text, layers),
            shared_kv_layers=_first(text, ("num_kv_shared_layers",), 0),
            rope_by_kind=_rope_by_kind(text),
        )

    @classmethod
    def from_folder(cls, folder: Path, trust_remote_code: bool = False) -> TargetSpec:
        """Reads ``config.json`` of a checkpoint folder, no weights. ``InputError`` for one that makes no sense."""
        config = load_config(folder, trust_remote_code)
        with understood(f"{Path(folder) / CONFIG} as a target configuration"):
            return cls.from_config(config, folder)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], name: str) -> TargetSpec:
        """Of fields of a config.json, ``model_type`` among them. ``name``: whose they are, for errors."""
        from transformers import AutoConfig

        with understood(f"target.dimensions of {name}"), quiet_transformers():
            return cls.from_config(AutoConfig.for_model(**fields))

    def served_at(self, max_length: int) -> TargetSpec:
        """The same target as a server of ``max_length`` tokens computes it: see ``served_rope.py``."""
        rope = settled(self.rope_parameters, self.max_position_embeddings, max_length)
        return replace(self, rope_parameters=rope)

    def required_server_length(self, max_length: int) -> int | None:
        """vLLM's ``max_model_len`` with which it turns as it was trained up to ``max_length`` tokens, where that
        depends on it; else None.
        """
        if not is_longrope(self.rope_parameters):
            return None
        return max(max_length, int(self.rope_parameters["original_max_position_embeddings"]))

    def kv_sources(self) -> dict[str, int]:
        """Kind of layer -> the last layer of that kind that makes keys and values of its own, counted from 0."""
        own = self.layer_types[: self.num_layers - self.shared_kv_layers]
        return {kind: layer for layer, kind in enumerate(own)}

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """(key-value heads, size of a head) of a layer, counted from 0."""
        return self.kv_shapes[layer] if self.kv_shapes else (self.num_key_value_heads, self.head_dim)

    def default_taps(self) -> tuple[int, ...]:
        """The taps of EAGLE-3's reference code: residual stream after 2, N//2 and N−3 layers (N layers in all).

        Shallow models, where these clash or fall outside [0, N−1], get the deepest unused taps instead: N = 30 gives
        (2, 15, 27), N = 4 gives (1, 2, 3), N = 1 gives (0,).
        """
        last = self.num_layers - 1
        taps = {min(max(tap, 0), last) for tap in (2, self.num_layers // 2, self.num_layers - 3)}
        for tap in range(last, -1, -1):
            if len(taps) == 3:
                break
            taps.add(tap)
        return tuple(sorted(taps))

    def spread_taps(self, count: int = 5) -> tuple[int, ...]:
        """The taps of published block drafters: ``count`` of them, evenly from 2 to N−2. N = 36 gives (2, 10, 18, 26,
        34).

        Shallow models, which have no room for that, spread from 1 to N−1, and those with fewer layers get fewer taps.
        """
        first, last = (2, self.num_layers - 2) if self.num_layers >= count + 3 else (1, self.num_layers - 1)
        first = min(first, last)
        return tuple(sorted({round(first + index * (last - first) / (count - 1)) for index in range(count)}))


def load_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of a checkpoint folder; ``InputError`` where it is missing, broken or of an
    unknown architecture.
    """
    from transformers import AutoConfig

    path = Path(folder) / CONFIG
    if not path.is_file():
        raise InputError(f"{path} does not exist: a target is a folder with config.json, *.safetensors and a tokenizer")
    check_config_file(Path(folder))
    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers raises anything from KeyError to validation errors of its own
        if not trust_remote_code and "auto_map" in path.read_text(encoding="utf-8", errors="replace"):
            message = (
                f"the target in {folder} needs Python code of its own: "
                "read that code, then allow it with target.trust_remote_code=true"
            )
            raise InputError(message) from error
        reason = " ".join(str(error).split())[:400]
        raise InputError(
            f"{path} cannot be read as a target configuration ({type(error).__name__}: {reason})"
        ) from error


def causal_model_class(hf_config: Any) -> Any:
    """The class of transformers' that makes a model of this configuration: some wrappers (Kimi-K2.5, MiniMax-M3) are
    known to it as models of images and text alone. Their language model is run.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    wrapped = type(hf_config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return (
        AutoModelForImageTextToText
        if wrapped and type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        else (AutoModelForCausalLM)
    )


def has_own_code(hf_config: Any) -> bool:
    """Whether a configuration was read with Python code of the target's, which was allowed then."""
    return type(hf_config).__module__.startswith("transformers_modules")


def _required(text_config: Any, name: str) -> int:
    value = getattr(text_config, name, None)
    if value is None:
        raise InputError(
            f"config.json of the target (model type {text_config.model_type!r}) lacks {name}: it is no decoder "
            f"language model"
        )
    return _whole(text_config, (name,), value)


def _whole(text_config: Any, names: tuple[str, ...], default: int) -> int:
    """The first of these fields that is set: a whole number of at least 1."""
    value = _first(text_config, names, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json of the target: {names[0]} is {value!r:.60}, it must be a whole number above 0")
    return value


def _kv_shapes(text_config: Any, num_layers: int) -> tuple[tuple[int, int], ...]:
    if not getattr(text_config, "is_heterogeneous", False):
        return ()
    layers = (text_config.per_layer_config[layer] for layer in range(num_layers))
    return tuple((int(layer.num_key_value_heads), int(layer.head_dim)) for layer in layers)


def _experts(text_config: Any) -> Experts | None:
    """Families name them differently, and say which layers have none by a number, a list or a stride."""
    count = _first(text_config, ("num_experts", "num_local_experts", "n_routed_experts"), None)
    active = _first(text_config, ("num_experts_per_tok", "experts_per_token", "top_k_experts"), None)
    if not isinstance(count, int) or not isinstance(active, int) or count < 1:
        return None
    width = _whole(text_config, ("moe_intermediate_size", "intermediate_size"), 1)
    shared = _first(text_config, ("shared_expert_intermediate_size", "shared_intermediate_size"), None)
    if getattr(text_config, "enable_moe_block", False):  # Gemma-4: beside the layer's ordinary MLP
        shared = text_config.intermediate_size
    if shared is None:
        shared = (_first(text_config, ("n_shared_experts",), 0) or 0) * width
    layers, stride = text_config.num_hidden_layers, _first(text_config, ("decoder_sparse_step",), 1) or 1
    dense = set(range(_first(text_config, ("first_k_dense_replace",), 0) or 0))
    dense |= set(_first(text_config, ("mlp_only_layers",), ()) or ())
    dense |= {layer for layer in range(layers) if (layer + 1) % stride}
    named = _first(text_config, ("mlp_layer_types",), ())
    dense |= {layer for layer, kind in enumerate(named) if kind == "dense"}
    return Experts(count, active, width, int(shared), len(dense))


def _positive(text_config: Any, names: tuple[str, ...], default: float) -> float:
    value = _first(text_config, names, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InputError(f"config.json of the target: {names[0]} is {value!r:.60}, it must be a number above 0")
    return float(value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
        raise InputError(f"config.json of the target: {name} is {value!r:.60}, it must be a list of texts")
    return tuple(value)


def _first(text_config: Any, names: tuple[str, ...], default: Any) -> Any:
    for name in names:
        value = getattr(text_config, name, None)
        if value is not None:
            return value
    return default


def _layer_types(text_config: Any, num_layers: int) -> tuple[str, ...]:
    named = getattr(text_config, "layer_types", None)
    if named:
        if len(_texts("layer_types", named)) != num_layers:
            raise InputError(
                f"config.json of the target: layer_types names {len(named)} layers, num_hidden_layers is {num_layers}"
            )
        return tuple(named)
    # Without a list all layers are alike: sliding where a window is set (Mistral) and not switched off.
    slides = getattr(text_config, "sliding_window", None) is not None and getattr(
        text_config, "use_sliding_window", True
    )
    return ("sliding_attention" if slides else "full_attention",) * num_layers


def _rope_parameters(text_config: Any) -> dict[str, Any]:
    """Checked here, because transformers only warns: a type that nothing knows, a base that is no number."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found = getattr(text_config, "rope_parameters", None) or {}
    parameters = dict(found.get("full_attention") or found)
    kind, base = parameters.get("rope_type", "default"), parameters.get("rope_theta", 1.0)
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
        raise InputError(f"config.json of the target: rope_type is {kind!r:.60}, it must be one of {known}")
    if base is not None and (not isinstance(base, int | float) or isinstance(base, bool) or not 0 < base < math.inf):
        raise InputError(f"config.json of the target: rope_theta is {base!r:.60}, it must be a number above 0")
    return parameters


def _rope_by_kind(text_config: Any) -> dict[str, dict[str, Any]]:
    found = getattr(text_config, "rope_parameters", None) or {}
    kinds = set(getattr(text_config, "layer_types", None) or ()) & set(found)
    return {kind: dict(found[kind]) for kind in sorted(kinds) if isinstance(found[kind], Mapping)}


def _dtype(hf_config: Any, text_config: Any) -> torch.dtype:
    dtype = getattr(hf_config, "dtype", None) or getattr(text_config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"config.json of the target: dtype is {dtype!r:.60}, it must be a type of torch")
    return dtype


def end_token_ids(tokenizer: Any, generation_config: Any) -> tuple[int, ...]:
    """Ids that end an answer, ascending: the generation config's and the tokenizer's, which is what vLLM stops at too.

    Raises InputError if neither names one: generation would never stop.
    """
    own = getattr(generation_config, "eos_token_id", None)
    ids = {own} if isinstance(own, int) else {int(token) for token in own or ()}
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise InputError("the target names no end token: set eos_token_id in its generation_config.json")
    return tuple(sorted(ids))
