"""The architecture of a Gemma-4 assistant, as transformers has it (``Gemma4AssistantForCausalLM``): its layers are
transformers' own, its parameters have the names of the checkpoint that transformers and vLLM load.

A layer has queries alone; keys and values are the target's own, of its last layer of the same kind that makes some
(``KindsOfKeys``). So an assistant caches nothing, costs no prefill, and what it attends to does not change while it
drafts:

    x_k = pre_projection([sqrt(H) * E[token]; f_k])      H wide each, E the target's embedding
    n_k = norm(layers(x_k))                              queries at the position of the last verified token, for every k
    logits = E_own n_k                                   E_own [V, h] is the assistant's (``model.embed_tokens``)
    f_{k+1} = post_projection(n_k)                       f_0: the target's last hidden state, after its final norm

With centroids (``use_ordered_embeddings``, the E series) the vocabulary lies in C clusters of equal size, and only the
tokens of the ``centroid_intermediate_top_k`` nearest ones are scored.

Legend: M queries, T tokens of a text, B rows, V vocabulary, C centroids, H the target's hidden size, h the assistant's,
G key-value heads, d size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.console import quiet_transformers
from spectrain.drafters.drafter import DrafterShape
from spectrain.drafters.layers import LayerShape, VocabProjection
from spectrain.target.cpu_kernels import linear
from spectrain.target.spec import TargetSpec

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = (SLIDING, FULL)
# What transformers notes in a configuration and nothing depends on.
_VOLATILE = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype")
_REFUSED = {"attention_bias": (False,), "hidden_activation": ("gelu_pytorch_tanh",)}

KeyValues = Mapping[str, tuple[Tensor, Tensor]]  # kind of layer -> keys and values


@dataclass(frozen=True)
class Gemma4MTPShape(DrafterShape):
    """``assistant``: the configuration in transformers' own words (``Gemma4AssistantConfig``). Raises ValueError where
    it makes no sense.
    """

    assistant: dict[str, Any]
    target_vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] = ()

    @classmethod
    def of(cls, assistant: Mapping[str, Any]) -> Gemma4MTPShape:
        """From the fields of a config.json, whatever else is there."""
        from transformers import Gemma4AssistantConfig

        fields = {name: value for name, value in assistant.items() if name not in _VOLATILE}
        with quiet_transformers():
            config = Gemma4AssistantConfig(**fields)
        if config.text_config is None:
            raise ValueError("text_config is missing")
        kept = {name: value for name, value in config.to_diff_dict().items() if name not in _VOLATILE}
        kept["text_config"] = {
            name: value for name, value in config.text_config.to_dict().items() if name not in _VOLATILE
        }
        vocabulary = config.text_config.vocab_size
        return cls(kept, vocabulary, vocabulary)

    def __post_init__(self) -> None:
        text = self.text
        for name, values in _REFUSED.items():
            if getattr(text, name) not in values:
                raise ValueError(f"{name} is {getattr(text, name)!r}, this version reads assistants with {values[0]!r}")
        for kind in self.kinds:
            if text.num_attention_heads % self.kv_shape(kind)[0]:
                raise ValueError(
                    f"num_attention_heads={text.num_attention_heads} is no multiple of the {self.kv_shape(kind)[0]} "
                    f"key-value heads of {kind}"
                )
        if self.config.use_ordered_embeddings and text.vocab_size % self.config.num_centroids:
            raise ValueError(
                f"num_centroids={self.config.num_centroids} does not divide the vocabulary of {text.vocab_size}"
            )

    @cached_property
    def config(self) -> Any:
        from transformers import Gemma4AssistantConfig

        with quiet_transformers():
            return Gemma4AssistantConfig(**self.assistant)

    @property
    def text(self) -> Any:
        return self.config.text_config

    @property
    def hidden_size(self) -> int:
        """The target's."""
        return int(self.config.backbone_hidden_size)

    @property
    def owns_matrix(self) -> bool:
        return True

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of its layers, and so of the target's layers that it reads."""
        return tuple(kind for kind in KINDS if kind in self.text.layer_types)

    def kv_shape(self, kind: str) -> tuple[int, int]:
        """(key-value heads, size of a head) that its layers of this kind read."""
        layer = self.text.per_layer_config[self.text.layer_types.index(kind)]
        return int(layer.num_key_value_heads), int(layer.head_dim)

    @property
    def window(self) -> int:
        """Tokens that a sliding layer sees, the last verified one included."""
        return int(self.text.sliding_window)

    @property
    def num_centroids(self) -> int:
        return int(self.config.num_centroids) if self.config.use_ordered_embeddings else 0

    @property
    def layer(self) -> LayerShape:
        """Near enough for an account of memory: heads of the widest kind, keys of none."""
        kv_heads, head_dim = max((self.kv_shape(kind) for kind in self.kinds), key=lambda shape: shape[1])
        text = self.text
        return LayerShape(
            "qwen3",
            text.hidden_size,
            text.intermediate_size,
            text.num_attention_heads,
            kv_heads,
            head_dim,
            text.rms_norm_eps,
            {"rope_type": "default", "rope_theta": 10000.0},
            text.max_position_embeddings,
        )


def misfit(shape: Gemma4MTPShape, spec: TargetSpec) -> str:
    """Why an assistant cannot read a target's keys and values; empty where it can."""
    sources, text = spec.kv_sources(), shape.text
    for kind in shape.kinds:
        if kind not in sources:
            return f"it reads keys of {kind} layers, of which the target has none that makes its own"
        if shape.kv_shape(kind) != spec.kv_shape(sources[kind]):
            heads, size = spec.kv_shape(sources[kind])
            own_heads, own_size = shape.kv_shape(kind)
            return (
                f"its {kind} layers read {own_heads} key-value heads of {own_size}, the target's have {heads} of {size}"
            )
    if SLIDING in shape.kinds and shape.window != spec.sliding_window:
        return f"its sliding_window is {shape.window}, the target's {spec.sliding_window}"
    rope = {kind: text.rope_parameters[kind] for kind in shape.kinds}
    for kind, own in rope.items():
        theirs = spec.rope_by_kind.get(kind, {})
        if {name: value for name, value in own.items() if value is not None} != theirs:
            return f"rope_parameters of its {kind} layers are {own}, the target's {theirs}"
    return ""


def fresh_assistant(config: DrafterConfig, spec: TargetSpec) -> dict[str, Any]:
    """Fields of a fresh assistant's config.json: heads, keys, positions and window are the target's."""
    own, sources = config.gemma4_mtp, spec.kv_sources()
    hidden = own.hidden_size or max(64, spec.hidden_size // 4 // 64 * 64)
    kinds = [SLIDING] * (config.num_layers - 1) + [FULL]
    if SLIDING not in sources:
        kinds = [FULL] * config.num_layers
    shapes = {kind: spec.kv_shape(layer) for kind, layer in sources.items()}
    heads, head_dim = shapes.get(SLIDING, shapes[FULL])
    full_heads, full_head_dim = shapes[FULL]
    text = {
        "model_type": "gemma4_text",
        "vocab_size": spec.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": config.intermediate_size or 4 * hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads or spec.num_attention_heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "global_head_dim": full_head_dim,
        "num_global_key_value_heads": full_heads,
        "attention_k_eq_v": True,  # what lets the full layers have other heads; an assistant makes no values
        "layer_types": kinds,
        "sliding_window": spec.sliding_window or spec.max_position_embeddings,
        "rope_parameters": {kind: dict(rope) for kind, rope in spec.rope_by_kind.items()},
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": config.num_layers,
    }
    centroids = {"num_centroids": own.num_centroids, "centroid_intermediate_top_k": own.centroid_top_k}
    return {
        "text_config": text,
        "backbone_hidden_size": spec.hidden_size,
        "use_ordered_embeddings": own.num_centroids > 0,
        **(centroids if own.num_centroids else {}),
    }


class CentroidHead(nn.Module):
    """Chooses the tokens that are scored. ``token_ordering`` [V]: tokens cluster by cluster."""

    token_ordering: Tensor

    def __init__(self, hidden: int, vocabulary: int, num_centroids: int, top_k: int) -> None:
        super().__init__()
        self.centroids = VocabProjection(hidden, num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.arange(vocabulary))
        self.top_k = top_k

    @property
    def tokens_CS(self) -> Tensor:
        """Tokens of each cluster."""
        return self.token_ordering.view(len(self.centroids.weight), -1)

    def logits(self, hidden_BH: Tensor, matrix_VH: Tensor) -> Tensor:
        """[B, V]: the smallest number of the type where a token is in no chosen cluster, as in vLLM."""
        chosen_BK = self.centroids(hidden_BH).topk(self.top_k, dim=-1).indices
        tokens_BS = self.tokens_CS[chosen_BK].flatten(1)
        scores_BS = torch.einsum("bh,bsh->bs", hidden_BH, matrix_VH[tokens_BS])
        nothing_BV = scores_BS.new_full((len(hidden_BH), len(matrix_VH)), torch.finfo(scores_BS.dtype).min)
        return nothing_BV.scatter_(1, tokens_BS, scores_BS)

    def cluster_mass(self, probs_BV: Tensor) -> Tensor:
        """[B, C]: probability of each cluster."""
        return probs_BV[:, self.token_ordering].unflatten(1, (len(self.centroids.weight), -1)).sum(-1)


class Gemma4MTPBody(nn.Module):
    """``model`` (transformers' text model without keys and values), the two projections, and ``masked_embedding`` where
    there are centroids. The output matrix is ``model.embed_tokens``, which embeds nothing.

    ``recompute``: the backward pass runs a step's layers again instead of keeping what is inside
    (``trainer.gradient_checkpointing``).
    """

    recompute = False

    def __init__(self, shape: Gemma4MTPShape) -> None:
        from transformers import AutoModel

        super().__init__()
        config, text = shape.config, shape.text
        self.shape = shape
        with quiet_transformers():
            self.model = AutoModel.from_config(text, attn_implementation="sdpa")
        self.pre_projection = nn.Linear(2 * shape.hidden_size, text.hidden_size, bias=False)
        self.post_projection = nn.Linear(text.hidden_size, shape.hidden_size, bias=False)
        if shape.num_centroids:
            self.masked_embedding = CentroidHead(
                text.hidden_size, text.vocab_size, shape.num_centroids, config.centroid_intermediate_top_k
            )

    @property
    def matrix_VH(self) -> Tensor:
        return self.model.embed_tokens.weight

    def step(
        self,
        embedding_BMH: Tensor,
        feature_BMH: Tensor,
        position_BM: Tensor,
        target_kv: KeyValues,
        visible: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """One draft step of B rows of M queries each.

        Args:
            embedding_BMH: of the token before the drafted one, scaled.
            target_kv: keys and values [B, G, T, d] of each kind of layer.
            visible: which of the T each query of a kind of layer sees, bool [B or 1, 1, M, T].

        Returns (normed output [B, M, h], the next step's feature [B, M, H]).
        """
        x_BMh = self.pre_projection(torch.cat([embedding_BMH.to(feature_BMH.dtype), feature_BMH], dim=-1))
        kv = {kind: (keys.to(x_BMh.dtype), values.to(x_BMh.dtype)) for kind, (keys, values) in target_kv.items()}
        masks = {kind: visible.get(kind) for kind in KINDS}

        def layers(inputs_BMh: Tensor) -> Tensor:
            return self.model(
                inputs_embeds=inputs_BMh,
                attention_mask=masks,
                position_ids=position_BM,
                shared_kv_states=kv,
                use_cache=False,
            ).last_hidden_state

        again = self.recompute and torch.is_grad_enabled()
        normed_BMh = checkpoint(layers, x_BMh, use_reentrant=False) if again else layers(x_BMh)
        return normed_BMh, self.post_projection(normed_BMh)

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """What is drafted from, [B, V]."""
        matrix_VH = self.matrix_VH.to(hidden_BH.dtype)
        if self.shape.num_centroids:
            return self.masked_embedding.logits(hidden_BH, matrix_VH)
        return linear(hidden_BH, matrix_VH)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Gemma4MTPBody:
        """Rotary frequencies move with the module, but stay float32: in 16 bits late positions would turn by whole
        radians too far.
        """
        before = {
            name: buffer for name, buffer in self.model.rotary_emb.named_buffers() if buffer.dtype == torch.float32
        }
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            setattr(self.model.rotary_emb, name, buffer.to(self.matrix_VH.device))
        return self


def clusters(rows_VH: Tensor, count: int) -> Tensor:
    """An order [V] of tokens in which ``count`` clusters of equal size lie one behind the other, neighbours by their
    rows: halved again and again along the direction in which they differ most.
    """

    def halved(tokens_T: Tensor, parts: int) -> Tensor:
        if parts == 1:
            return tokens_T
        rows_TH = rows_VH[tokens_T] - rows_VH[tokens_T].mean(0)
        _, directions_HH = torch.linalg.eigh(rows_TH.T @ rows_TH)
        ordered_T = tokens_T[torch.argsort(rows_TH @ directions_HH[:, -1], stable=True)]
        left = parts // 2
        middle = len(tokens_T) // parts * left
        return torch.cat([halved(ordered_T[:middle], left), halved(ordered_T[middle:], parts - left)])

    return halved(torch.arange(len(rows_VH), device=rows_VH.device), count)
