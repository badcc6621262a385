"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): an autoregressive drafter that reads several layers of the target.

Column t holds the token x_{t+1} and the feature f_t = fc(taps at t); it predicts x_{t+2}. A draft continues column t:
step k takes the token x_{t+1+k} with the drafter's own previous output as feature, sits at position t + k and predicts
x_{t+2+k}:

    text        x_0  x_1  x_2  x_3  x_4          (x_2 is the first token that the target generated)
    column 1    f_1 with x_2   step 0 -> x_3     feature of the last prompt token: the server's first act
                own with x_3   step 1 -> x_4

First the architecture (``Eagle3Shape``, ``Eagle3Layer``, ``Eagle3Body``: names and shapes of the parameters are those
of the checkpoint that vLLM loads), then the drafter, then its kind. ``unroll.py`` trains it,
``autoregressive_drafter.py`` drafts with it, ``eagle3_init.py`` solves for initial weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spectrain.config.drafter_schema import AutoregressiveConfig, DrafterConfig
from spectrain.data.packing import PackedBatch
from spectrain.data.vocab import DraftVocab
from spectrain.decoding.proposers import Observation
from spectrain.drafters.autoregressive.autoregressive_drafter import (
    AutoregressiveCache,
    AutoregressiveDrafter,
    AutoregressiveMethod,
    DraftSteps,
    Steps,
    observe_columns,
)
from spectrain.drafters.autoregressive.eagle3_init import init_eagle3
from spectrain.drafters.autoregressive.unroll import AutoregressiveLayer, Columns, unroll
from spectrain.drafters.closed_form_size import MAX_COLUMNS_PER_DIM, column_operations
from spectrain.drafters.drafter import Advance, Batches, DrafterShape
from spectrain.drafters.field_checks import check_sizes, flag, whole
from spectrain.drafters.foreign_checkpoints import (
    decoder_layer,
    flat_layer,
    refuse_unknown_arithmetic,
    section,
    speculators_fields,
    taps,
    window_fields,
)
from spectrain.drafters.init_from_target import MLP, CopiedLayers, copy_weights, mlp_norm
from spectrain.drafters.layers import (
    LayerShape,
    Projections,
    RMSNorm,
    Rotary,
    SwiGLU,
    VocabProjection,
    from_layer_config,
    layer_shape,
    sliding_layers,
    to_layer_config,
    window_of,
)
from spectrain.errors import InputError
from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec


@dataclass(frozen=True)
class Eagle3Shape(DrafterShape):
    """Everything that decides the parameters' shapes and the arithmetic. A taps, T the target's hidden size, H the
    drafter's (equal).
    """

    layer: LayerShape
    num_layers: int
    taps: tuple[int, ...]
    target_vocab_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False  # the residual stream starts from the normed feature
    norm_before_fc: bool = False  # one norm over the concatenated taps
    fc_norm: bool = False  # one norm per tap
    norm_output: bool = False  # the next step's feature is the normed output
    sliding_window: int | None = None  # positions that a column sees, its own included; None: all

    def __post_init__(self) -> None:
        check_sizes(self, self.num_layers)
        if self.sliding_window is not None:
            whole(self.sliding_window, "sliding_window")

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    def closed_form_size(self, config: DrafterConfig) -> tuple[int, float]:
        taps_width, steps = len(self.taps) * self.hidden_size, self.solved_steps(config)
        return MAX_COLUMNS_PER_DIM * 2 * self.hidden_size, column_operations(self.layer, taps_width, steps)

    def solved_steps(self, config: DrafterConfig) -> int:
        """Of a round, those that the closed-form initialisation solves for."""
        return config.autoregressive.ttt_steps


class Eagle3Layer(AutoregressiveLayer):
    """One decoder layer. The first reads [norm(embedding); norm(feature)] (2H wide) and adds to the feature; others are
    ordinary.
    """

    def __init__(self, shape: Eagle3Shape, index: int) -> None:
        super().__init__()
        hidden, eps = shape.layer.hidden_size, shape.layer.rms_norm_eps
        self.is_first = index == 0
        self.norm_before_residual = shape.norm_before_residual
        self.input_layernorm = RMSNorm(hidden, eps)
        if self.is_first:
            self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Projections(shape.layer, 2 * hidden if self.is_first else hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(shape.layer)

    def attention_input(self, feature: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """(residual stream [..., H], what q, k and v read [..., 2H or H])."""
        if not self.is_first:
            return feature, self.input_layernorm(feature)
        normed = self.hidden_norm(feature)
        residual = normed if self.norm_before_residual else feature
        return residual, torch.cat([self.input_layernorm(embedding), normed], dim=-1)

    def finish(self, residual: Tensor, heads: Tensor) -> Tensor:
        """Residual stream after the layer, from the attention's heads [..., N, hd]."""
        middle = residual + self.self_attn.output(heads)
        return middle + self.mlp(self.post_attention_layernorm(middle))


class Eagle3Body(nn.Module):
    """fc, layers, norm and (with a reduced vocabulary) lm_head."""

    layers: list[Eagle3Layer]  # in truth a ModuleList of them
    zero_first = False

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        hidden, eps, width = (
            shape.layer.hidden_size,
            shape.layer.rms_norm_eps,
            len(shape.taps) * shape.layer.hidden_size,
        )
        self.shape = shape
        if shape.norm_before_fc:
            self.input_norm = RMSNorm(width, eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(hidden, eps) for _ in shape.taps)
        self.fc = nn.Linear(width, hidden, bias=False)
        self.layers = nn.ModuleList(Eagle3Layer(shape, i) for i in range(shape.num_layers))  # type: ignore[assignment]
        self.norm = RMSNorm(hidden, eps)
        if shape.owns_head:
            self.lm_head = VocabProjection(hidden, shape.draft_vocab_size, bias=False)

    @property
    def window(self) -> int | None:
        return self.shape.sliding_window

    def normed_taps(self, taps_AH: Tensor) -> Tensor:
        """What fc reads, before it is laid flat: [..., A, H]."""
        if self.shape.norm_before_fc:
            taps_AH = self.input_norm(taps_AH.flatten(-2)).view(taps_AH.shape)
        if self.shape.fc_norm:
            taps_AH = torch.stack(
                [norm(tap) for norm, tap in zip(self.fc_norm, taps_AH.unbind(-2), strict=True)], dim=-2
            )
        return taps_AH

    def fuse(self, taps_AH: Tensor) -> Tensor:
        """Taps [..., A, H] -> feature [..., H]."""
        return self.fc(self.normed_taps(taps_AH.to(self.fc.weight.dtype)).flatten(-2))

    def feed_back(self, output: Tensor, normed: Tensor) -> Tensor:
        """The feature of the next step."""
        return normed if self.shape.norm_output else output


class Eagle3(AutoregressiveDrafter):
    """EAGLE-3 with any number of taps."""

    method = "eagle3"
    has_closed_form = solves_together = True
    body_type: ClassVar[Any] = Eagle3Body
    shape: Eagle3Shape
    body: Eagle3Body

    def __init__(self, shape: Eagle3Shape, vocab: DraftVocab, config: DrafterConfig | None = None) -> None:
        super().__init__(shape, vocab, config)
        self.body = self.body_type(shape)
        self.rotary = Rotary(shape.layer)

    def closed_form_init(self, batches: Batches, advance: Advance = lambda percent: None) -> int:
        decay = self.config.autoregressive.step_decay
        return init_eagle3(self.body, self.rotary, self.head, batches, self.training_steps, decay, advance)

    def unroll(self, batch: PackedBatch, columns: Columns) -> Tensor:
        feature_TH = self.body.fuse(batch.taps_TAH)
        return unroll(self.body, self.rotary, self.head, feature_TH, batch, columns, self.attention_backend(batch))

    def new_cache(self, batch_size: int) -> AutoregressiveCache:
        return AutoregressiveCache(self.shape.layer, self.shape.num_layers, batch_size, self.body.fc.weight)

    @torch.no_grad()
    def observe(self, cache: AutoregressiveCache, observation: Observation) -> None:
        if observation.taps_BTAH is None:
            raise ValueError("an EAGLE-3 drafter observes taps of the target")
        feature_BTH = self.body.fuse(observation.taps_BTAH)
        observe_columns(self.body, self.rotary, self.head, cache, feature_BTH, observation)

    def draft_steps(self, cache: AutoregressiveCache, anchor_B: Tensor, n: int) -> Steps:
        return DraftSteps(self.body, self.rotary, self.head, cache, anchor_B, n)


_FOREIGN_DRAFTS = 3  # a round, where a layout has no field for it


class Eagle3Method(AutoregressiveMethod):
    """The kind ``eagle3``."""

    name = "eagle3"
    label = "EAGLE-3"
    reads_options = False
    sections: ClassVar[tuple[str, ...]] = (*AutoregressiveMethod.sections, "eagle3")
    # Defaults of these differ between writers and readers, so every one is written out.
    switches: ClassVar[tuple[str, ...]] = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    architecture = "Eagle3DraftModel"
    taps_field = "eagle_aux_hidden_state_layer_ids"
    may_leave_out_taps = True
    default_theta = 10000.0
    speculative_config = {"method": "eagle3"}
    vllm_defaults = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    foreign_architectures: ClassVar[tuple[str, ...]] = (
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3Qwen3ForCausalLM",
    )
    layout = "eagle"

    def shape(self, config: DrafterConfig, spec: TargetSpec) -> Eagle3Shape:
        return Eagle3Shape(**self.dimensions(config, spec))

    def dimensions(self, config: DrafterConfig, spec: TargetSpec) -> dict[str, Any]:
        """Fields of the shape, with the switches of the kind's own section."""
        own = getattr(config, self.sections[-1])
        return {
            "layer": layer_shape(config, spec, "qwen3" if spec.model_type.startswith("qwen3") else "llama"),
            "num_layers": config.num_layers,
            "taps": self.taps(config, spec),
            "target_vocab_size": spec.vocab_size,
            "draft_vocab_size": config.draft_vocab_size or spec.vocab_size,
            **{name: getattr(own, name) for name in self.switches},
            "sliding_window": own.sliding_window,
        }

    def norms_taps(self, config: DrafterConfig) -> bool:
        own = getattr(config, self.sections[-1])
        return any(getattr(own, name) for name in self.switches if name in ("norm_before_fc", "fc_norm"))

    def build(self, shape: Any, vocab: DraftVocab, config: DrafterConfig) -> Eagle3:
        return Eagle3(shape, vocab, config)

    def body(self, shape: Any) -> nn.Module:
        return Eagle3Body(shape)

    @torch.no_grad()
    def copy_from_target(self, drafter: Eagle3, spec: TargetSpec, head: TargetHead, folder: Path) -> None:
        """Final norm and, where the shapes agree, the MLP of the target's last decoder layer with its norm."""
        body, layer = drafter.body, drafter.body.layers[0]
        offset = 1.0 if head.one_plus else 0.0
        body.norm.weight.copy_(head.norm_weight + offset)
        last = next(self._copied(drafter.config).read(head.math.family, spec, CheckpointReader(folder), []))
        gain = mlp_norm(last)
        # Else a mixture of experts, fused projections, another width: the drafter's own initialisation stays.
        if gain is not None and copy_weights(layer.mlp, "mlp", MLP, last):
            layer.post_attention_layernorm.weight.copy_(gain.float() + offset)

    def check_copies(self, config: DrafterConfig, spec: TargetSpec, folder: Path) -> None:
        self._copied(config).check(spec, folder)

    def _copied(self, config: DrafterConfig) -> CopiedLayers:
        return CopiedLayers(1, ("mlp",), required=config.init == "target")

    def describe(self, drafter: Any) -> dict[str, Any]:
        shape: Eagle3Shape = drafter.shape
        return {
            self.taps_field: list(shape.taps),
            **{name: getattr(shape, name) for name in self.switches},
            # vLLM's Llama-style EAGLE-3 does not count the layer ids; an extra key here reaches its model.
            "transformer_layer_config": to_layer_config(shape)
            | {"num_aux_hidden_states": len(shape.taps)}
            | ({} if shape.sliding_window is None else sliding_layers(shape.num_layers, shape.sliding_window)),
        }

    def metadata(self, drafter: Eagle3) -> dict[str, Any]:
        return {"ttt_steps": drafter.training_steps}

    def read_shape(self, fields: dict[str, Any]) -> Eagle3Shape:
        return Eagle3Shape(**self.read_dimensions(fields))

    def read_dimensions(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of the shape that a config.json describes."""
        layer = fields["transformer_layer_config"]
        return {
            "layer": from_layer_config(layer),
            "num_layers": layer["num_hidden_layers"],
            "taps": tuple(fields[self.taps_field]),
            "target_vocab_size": layer["vocab_size"],
            "draft_vocab_size": fields["draft_vocab_size"],
            **{name: flag(fields[name], name) for name in self.switches},
            "sliding_window": window_of(layer),
        }

    def read_drafter(self, shape: Eagle3Shape, vocab: DraftVocab, metadata: Mapping[str, Any]) -> Eagle3:
        steps = whole(metadata.get("ttt_steps", 3), "spectrain.ttt_steps")
        config = DrafterConfig(method=self.name, autoregressive=AutoregressiveConfig(ttt_steps=steps))
        return self.build(shape, vocab, config)

    def settings(self, shape: Any) -> dict[str, object]:
        return {"eagle3.sliding_window": shape.sliding_window}

    def read_foreign(self, architecture: str, config: dict[str, Any], where: str) -> dict[str, Any]:
        """EAGLE, SpecForge and AngelSlim: a Llama configuration with switches, some of them under ``eagle_config``."""
        nested = section(config, "eagle_config", where)
        refuse_unknown_arithmetic(config, nested, where=where)
        layer = decoder_layer(config, "qwen3" if "Qwen3" in architecture else "llama", where, self.default_theta)
        layer |= window_fields(config, layer, where)
        standard = speculators_fields(config, self.name, _FOREIGN_DRAFTS, layer, where)
        standard |= {name: bool(config.get(name, False)) for name in ("norm_before_residual", "fc_norm", "norm_output")}
        standard["norm_before_fc"] = bool(nested.get("norm_before_fc", config.get("norm_before_fc", False)))
        name = self.taps_field
        ids, field = (config, name) if config.get(name) else (nested, f"eagle_config.{name}")
        if ids.get(name):
            standard[name] = taps(ids[name], 0, field, where)
        return standard

    def write_foreign(self, standard: dict[str, Any], where: str) -> dict[str, Any]:
        """Of a full vocabulary its size is left out: readers take the target's lm_head then."""
        layer = standard["transformer_layer_config"]
        if layer["num_hidden_layers"] != 1:
            raise InputError(f"{where}: EAGLE's layout has one layer, this drafter has {layer['num_hidden_layers']}")
        reduced = standard["draft_vocab_size"] != layer["vocab_size"]
        return {
            "architectures": ["Eagle3Qwen3ForCausalLM" if layer["model_type"] == "qwen3" else "LlamaForCausalLMEagle3"],
            **flat_layer(layer),
            **{name: layer[name] for name in sliding_layers(0, None) if name in layer},
            **({"draft_vocab_size": standard["draft_vocab_size"]} if reduced else {}),
            **{name: standard[name] for name in (self.taps_field, *self.switches)},
        }

    def foreign_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """``standard_tensors`` the other way round."""
        return {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}

    def sglang_algorithm(self, fields: Mapping[str, Any]) -> str:
        """One of Llama's layers that sees everything, none of the switches, and the taps 2, N//2 and N - 3 of a target
        of N layers.

        Ids that a folder names under ``eagle_config`` SGLang reads one layer deeper than vLLM reads its own field, so
        no folder can name others for both.
        """
        layer = fields.get("transformer_layer_config") or {}
        plain = layer.get("model_type") == "llama" and layer.get("num_hidden_layers") == 1
        plain = plain and "sliding_attention" not in (layer.get("layer_types") or ())
        taps = fields.get(self.taps_field) or []
        usual = len(taps) == 3 and taps == [2, (taps[2] + 3) // 2, taps[2]]
        return "EAGLE3" if plain and usual and not any(map(fields.get, self.switches)) else ""


METHOD = Eagle3Method()
