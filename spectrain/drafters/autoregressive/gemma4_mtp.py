"""Gemma-4 MTP: an assistant of a Gemma-4 target, which reads the target's own keys and values.

Column t holds the token x_{t+1} and the target's last hidden state at t, after its final norm; it predicts x_{t+2}.
Every step of a draft asks from the position of x_t, the last verified token, and sees the keys of x_0 … x_t (a sliding
layer: the last ``sliding_window`` of them), as vLLM's proposer does. (``generate`` of transformers asks from one
position later and lets a sliding layer see one key more.)

    text        x_0  x_1  x_2  x_3  x_4          (x_2 is the first token that the target generated)
    column 1    f_1 with x_2   step 0 -> x_3     keys of x_0, x_1; position 1
                own with x_3   step 1 -> x_4     keys of x_0, x_1; position 1

So steps share keys, mask and positions, and all that one step hands to the next is its feature. The architecture is in
``gemma4_assistant.py``; losses, scores and drafting are those of every autoregressive drafter.

Legend: B rows, T tokens, M counted columns, K steps, U teacher positions, H hidden of the target, h of the assistant, G
key-value heads, d size of a head, C centroids or slots of a cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectrain.config.drafter_schema import AutoregressiveConfig, DrafterConfig
from spectrain.config.trainer_schema import TrainerConfig
from spectrain.data.packing import PackedBatch
from spectrain.data.vocab import DraftVocab
from spectrain.decoding.proposers import Observation
from spectrain.drafters.autoregressive.autoregressive_drafter import AutoregressiveDrafter, AutoregressiveMethod
from spectrain.drafters.autoregressive.gemma4_assistant import (
    FULL,
    SLIDING,
    Gemma4MTPBody,
    Gemma4MTPShape,
    KeyValues,
    clusters,
    fresh_assistant,
    misfit,
)
from spectrain.drafters.autoregressive.unroll import ColumnLayout, Columns, UnrolledOutputs
from spectrain.drafters.drafter import KeyValueCache
from spectrain.drafters.field_checks import whole
from spectrain.drafters.losses.students import Teacher, rows_in_chunk
from spectrain.drafters.training_cost import BatchSize, CorpusSize, TrainingCost, TrainingRows
from spectrain.errors import ConfigError, InputError
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec

_ARCHITECTURE = "Gemma4AssistantForCausalLM"
_MATRIX = "model.embed_tokens.weight"
_DRAFTS = 3  # a round, where a folder does not say so
_INIT_STD = 0.02


class VerifiedCache(KeyValueCache):
    """The target's keys and values of verified tokens, one entry of ``keys`` and ``values`` a kind of layer; and
    ``hidden_BH``, its last hidden state at the last of them, normed. None before the first observe.
    """

    hidden_BH: Tensor | None = None

    def __init__(self, shape: Gemma4MTPShape, batch_size: int, weight: Tensor) -> None:
        sizes = [shape.kv_shape(kind) for kind in shape.kinds]
        self.keys = [weight.new_zeros(batch_size, 1, *size) for size in sizes]
        self.values = [weight.new_zeros(batch_size, 1, *size) for size in sizes]
        self.columns_B = torch.zeros(batch_size, dtype=torch.long, device=weight.device)

    def select(self, rows_B: Tensor) -> None:
        super().select(rows_B)
        self.hidden_BH = None if self.hidden_BH is None else self.hidden_BH[rows_B]


class AssistantSteps:
    """The steps of one draft behind the anchor."""

    def __init__(self, drafter: Gemma4MTP, cache: VerifiedCache, anchor_B: Tensor, n: int) -> None:
        if cache.hidden_BH is None:
            raise RuntimeError(
                "observe the prompt before proposing: a draft starts from the hidden state of the last verified token"
            )
        self.token_B = anchor_B
        self._drafter = drafter
        self._left = n
        self._feature_B1H = cache.hidden_BH[:, None]
        shape, end = drafter.shape, int(cache.columns_B.max())
        self._kv = {
            kind: (keys[:, :end].transpose(1, 2), values[:, :end].transpose(1, 2))
            for kind, keys, values in zip(shape.kinds, cache.keys, cache.values, strict=True)
        }
        self._last_B1 = cache.columns_B[:, None] - 1
        slots_BC = torch.arange(end, device=anchor_B.device) - self._last_B1
        self._visible = visible_kinds(shape, slots_BC <= 0, -slots_BC, (1, 2))

    def __iter__(self) -> AssistantSteps:
        return self

    def __next__(self) -> Tensor:
        if self._left == 0:
            raise StopIteration
        self._left -= 1
        drafter = self._drafter
        embedding_B1H = drafter.head.embed(self.token_B[:, None])
        normed_B1h, self._feature_B1H = drafter.body.step(
            embedding_B1H, self._feature_B1H, self._last_B1, self._kv, self._visible
        )
        return normed_B1h[:, 0]


def visible_kinds(
    shape: Gemma4MTPShape, seen: Tensor, distance: Tensor, new_axes: tuple[int, int]
) -> dict[str, Tensor]:
    """Which keys a query of each kind of layer sees. ``seen``: those up to its own position; ``distance``: how far
    behind it each lies.
    """
    masks = {FULL: seen, SLIDING: seen & (distance < shape.window)}
    first, second = new_axes
    return {kind: masks[kind].unsqueeze(first).unsqueeze(second) for kind in shape.kinds}


class Gemma4MTP(AutoregressiveDrafter):
    """An assistant with the target's keys and values."""

    method = "gemma4_mtp"
    reads_last_hidden = True
    shape: Gemma4MTPShape
    body: Gemma4MTPBody
    _layers: Mapping[str, int]  # kind -> layer of the target that it reads

    def __init__(self, shape: Gemma4MTPShape, vocab: DraftVocab, config: DrafterConfig | None = None) -> None:
        super().__init__(shape, vocab, config)
        self.body = Gemma4MTPBody(shape)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        super().reset(generator)
        self.body.matrix_VH.normal_(0.0, _INIT_STD, generator=generator)

    def attach(self, head: TargetHead) -> Gemma4MTP:
        missing = [kind for kind in self.shape.kinds if kind not in head.kv_sources]
        if missing:
            raise InputError(f"a gemma4_mtp drafter reads keys of {missing[0]} layers, which this target does not have")
        self._layers = {kind: head.kv_sources[kind] for kind in self.shape.kinds}
        self.kv_layers = tuple(sorted(self._layers.values()))
        super().attach(head)
        return self

    @property
    def lm_head_DH(self) -> Tensor:
        return self.body.matrix_VH

    def draft_logits(self, hidden: Tensor) -> Tensor:
        return self.body.logits(hidden)

    # --- training ----------------------------------------------------------------------------------------------------

    def unroll(self, batch: PackedBatch, columns: Columns) -> Tensor:
        query_M, last = columns.query_M, batch.num_tokens - 1
        layout = ColumnLayout.build(columns.host_query_M, batch.host.document_ids_T, query_M.device)
        distance_MT = query_M[:, None] - torch.arange(batch.num_tokens, device=query_M.device)
        visible = visible_kinds(self.shape, layout.ranges().visible(query_M.device), distance_MT, (0, 0))
        kv = self._kinds(
            {layer: (k.transpose(0, 1)[None], v.transpose(0, 1)[None]) for layer, (k, v) in batch.target_kv.items()}
        )
        position_1M = batch.position_ids_T[query_M][None]
        feature_1MH = self.head.post_norm(batch.last_hidden_TH[query_M])[None].to(self.body.matrix_VH.dtype)
        normed_KMh = []
        for step in range(len(columns.valid_KM)):
            ids_M = batch.input_ids_T[(query_M + 1 + step).clamp(max=last)]
            embedding_1MH = self.head.embed(ids_M)[None]
            normed_1Mh, feature_1MH = self.body.step(embedding_1MH, feature_1MH, position_1M, kv, visible)
            normed_KMh.append(normed_1Mh[0])
        return torch.stack(normed_KMh)

    def _kinds(self, by_layer: Mapping[int, tuple[Tensor, Tensor]] | None) -> KeyValues:
        if not by_layer:
            raise ValueError("a gemma4_mtp drafter reads keys and values of the target")
        return {kind: by_layer[layer] for kind, layer in self._layers.items()}

    def extra_loss(self, students: UnrolledOutputs, teacher: Teacher) -> Tensor | None:
        """Of the centroids, Σ weight · CE(the target's mass of each cluster, softmax of the centroids' scores). They
        learn which clusters the target's next token lies in; the layers below learn from the scored tokens alone.
        """
        if not self.shape.num_centroids:
            return None
        weight, head = self.config.gemma4_mtp.centroid_weight, self.body.masked_embedding
        if weight == 0:  # data-parallel ranks wait for a gradient of every parameter
            return head.centroids.weight.sum() * 0.0
        total = students.hidden_KUH.new_zeros((), dtype=torch.float32)
        rows = rows_in_chunk(self.body.matrix_VH)
        for start in range(0, len(students.teacher_U), rows):
            part = slice(start, start + rows)
            with torch.no_grad():
                mass_UC = head.cluster_mass(teacher.log_probs(part).exp())
            scores_KUC = head.centroids(students.hidden_KUH[:, part].detach()).float()
            ce_KU = -(mass_UC * F.log_softmax(scores_KUC, dim=-1)).sum(-1)
            total = total + (ce_KU * students.weight_KU[:, part]).sum()
        return weight * total

    # --- drafting ----------------------------------------------------------------------------------------------------

    def new_cache(self, batch_size: int) -> VerifiedCache:
        return VerifiedCache(self.shape, batch_size, self.body.matrix_VH.detach())

    @torch.no_grad()
    def observe(self, cache: VerifiedCache, observation: Observation) -> None:
        if observation.last_hidden_BTH is None:
            raise ValueError("a gemma4_mtp drafter reads the last hidden state of the target")
        lengths_B, width = observation.lengths_B, observation.ids_BT.shape[1]
        rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
        slots_BT = cache.columns_B[:, None] + torch.arange(width, device=lengths_B.device)
        cache.reserve(int(slots_BT.max()) + 1)
        kv = self._kinds(observation.target_kv)
        # Padding is written too, behind the row's own columns, where nothing looks before it is overwritten.
        for kind, keys, values in zip(self.shape.kinds, cache.keys, cache.values, strict=True):
            new_keys, new_values = kv[kind]
            keys[rows_B[:, None], slots_BT] = new_keys.transpose(1, 2).to(keys.dtype)
            values[rows_B[:, None], slots_BT] = new_values.transpose(1, 2).to(values.dtype)
        hidden_BH = observation.last_hidden_BTH[rows_B, (lengths_B - 1).clamp(min=0)].to(cache.keys[0].dtype)
        before_BH = hidden_BH if cache.hidden_BH is None else cache.hidden_BH
        cache.hidden_BH = torch.where((lengths_B > 0)[:, None], hidden_BH, before_BH)
        cache.columns_B = cache.columns_B + lengths_B

    def draft_steps(self, cache: VerifiedCache, anchor_B: Tensor, n: int) -> AssistantSteps:
        return AssistantSteps(self, cache, anchor_B, n)


class Gemma4MTPMethod(AutoregressiveMethod):
    """The kind ``gemma4_mtp``."""

    name = "gemma4_mtp"
    library = "transformers"
    label = "Gemma-4 MTP"
    reads_options = False
    reads_target_kv = True
    sections = (*AutoregressiveMethod.sections, "gemma4_mtp")
    architecture = _ARCHITECTURE
    foreign_architectures = (_ARCHITECTURE,)
    speculative_config: ClassVar[Mapping[str, Any] | None] = {}  # vLLM knows an assistant by its architecture

    def taps(self, config: DrafterConfig, spec: TargetSpec) -> tuple[int, ...]:
        return ()

    def kv_layers(self, spec: TargetSpec) -> tuple[int, ...]:
        return tuple(sorted(spec.kv_sources().values()))

    def check(self, config: DrafterConfig) -> None:
        for name in ("taps", "draft_vocab_size", "layer_type", "num_key_value_heads", "head_dim"):
            if getattr(config, name) is not None:
                raise ConfigError(f"drafter.{name}: a gemma4_mtp drafter has none of its own, set drafter.{name}=null")
        if config.attention not in ("auto", "sdpa"):
            raise ConfigError(
                f"drafter.attention={config.attention}: a gemma4_mtp drafter attends as transformers does with sdpa, "
                "use auto"
            )

    def shape(self, config: DrafterConfig, spec: TargetSpec) -> Gemma4MTPShape:
        if spec.model_type != "gemma4_text":
            raise ConfigError(
                f"drafter=gemma4_mtp drafts for Gemma-4 alone, and the target is of model type {spec.model_type!r}: "
                f"use drafter=eagle3, or a Gemma-4 target"
            )
        try:
            return Gemma4MTPShape.of(fresh_assistant(config, spec))
        except ValueError as error:
            raise ConfigError(f"no assistant of this target can be such (drafter: {error})") from None

    def build(self, shape: Gemma4MTPShape, vocab: DraftVocab, config: DrafterConfig) -> Gemma4MTP:
        return Gemma4MTP(shape, vocab, config)

    def body(self, shape: Gemma4MTPShape) -> nn.Module:
        return Gemma4MTPBody(shape)

    @torch.no_grad()
    def copy_from_target(self, drafter: Gemma4MTP, spec: TargetSpec, head: TargetHead, folder: Path) -> None:
        """The directions of the target's output matrix that matter most, h of them: its rows become the assistant's,
        and the projections lead there and back.
        """
        body, rows_VH = drafter.body, head.lm_head_weight.float()
        width = body.matrix_VH.shape[1]
        _, directions_HH = torch.linalg.eigh(rows_VH.T @ rows_VH)
        most_Hh = directions_HH[:, -width:].flip(1)
        if most_Hh.shape[1] < width:  # an assistant that is wider than its target
            most_Hh = F.pad(most_Hh, (0, width - most_Hh.shape[1]))
        body.matrix_VH.copy_(rows_VH @ most_Hh)
        body.post_projection.weight.copy_(most_Hh)
        body.pre_projection.weight[:, drafter.shape.hidden_size :].copy_(most_Hh.T)
        if drafter.shape.num_centroids:
            centroid_head = body.masked_embedding
            centroid_head.token_ordering.copy_(clusters(body.matrix_VH, drafter.shape.num_centroids))
            centroid_head.centroids.weight.copy_(body.matrix_VH[centroid_head.tokens_CS].mean(1))

    def training_cost(
        self, config: DrafterConfig, trainer: TrainerConfig, entries: Mapping[str, int], corpus: CorpusSize
    ) -> TrainingCost:
        return replace(
            super().training_cost(config, trainer, entries, corpus),
            token_entries=0,
            output_entries=sum(size for name, size in entries.items() if name != _MATRIX),
            head_entries=entries[_MATRIX],
        )

    def _rows(self, config: DrafterConfig, steps: int, batch: BatchSize) -> TrainingRows:
        columns = batch.generated_tokens
        return TrainingRows(layer_rows=columns * steps, students=columns * steps, teachers=columns)

    # --- its folder --------------------------------------------------------------------------------------------------

    def describe(self, drafter: Gemma4MTP) -> dict[str, Any]:
        return dict(drafter.shape.assistant)

    def metadata(self, drafter: Gemma4MTP) -> dict[str, Any]:
        return {"ttt_steps": drafter.training_steps}

    def finish_folder(self, drafter: Gemma4MTP, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        """That of transformers, which knows no verifier: what a server has to be told is under ``spectrain``."""
        speculation = config["speculators_config"]
        own = {
            "target": speculation["verifier"]["name_or_path"],
            "target_architectures": speculation["verifier"]["architectures"],
            "num_speculative_tokens": speculation["proposal_methods"][0]["speculative_tokens"],
        }
        kept = {"architectures": [_ARCHITECTURE], **drafter.shape.assistant, "dtype": config["torch_dtype"]}
        return {**kept, "spectrain": {**own, **config["spectrain"]}}

    def standard_tensors(self, tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
        """The output matrix once: some writers store it under both of its names."""
        again = tensors.pop("lm_head.weight", None)
        if again is not None and not torch.equal(again, tensors.setdefault(_MATRIX, again)):
            raise InputError(
                f"{where}: lm_head.weight and {_MATRIX} differ, this version reads assistants that tie them"
            )
        return tensors

    def read_foreign(self, architecture: str, config: dict[str, Any], where: str) -> dict[str, Any]:
        text, own = config.get("text_config"), config.get("spectrain") or {}
        if not isinstance(text, dict) or not isinstance(own, dict):
            raise InputError(f"{where}: field 'text_config' is missing: it says how an assistant's layers compute")
        width = config.get("backbone_hidden_size")
        if config.get("tie_word_embeddings") is False:
            raise InputError(f"{where}: tie_word_embeddings is false, this version reads assistants that tie them")
        return {
            "speculators_model_type": self.name,
            "speculators_config": {
                "algorithm": self.name,
                "proposal_methods": [{"speculative_tokens": own.get("num_speculative_tokens", _DRAFTS)}],
                "verifier": {"name_or_path": own.get("target")},
            },
            "transformer_layer_config": {"vocab_size": text.get("vocab_size"), "hidden_size": width},
            "target_hidden_size": width,
            "draft_vocab_size": text.get("vocab_size"),
            "assistant": {name: value for name, value in config.items() if name != "spectrain"},
            "spectrain": own,
        }

    def read_shape(self, fields: dict[str, Any]) -> Gemma4MTPShape:
        return Gemma4MTPShape.of(fields["assistant"])

    def read_drafter(self, shape: Gemma4MTPShape, vocab: DraftVocab, metadata: Mapping[str, Any]) -> Gemma4MTP:
        steps = whole(metadata.get("ttt_steps", 3), "spectrain.ttt_steps")
        return Gemma4MTP(shape, vocab, DrafterConfig(autoregressive=AutoregressiveConfig(ttt_steps=steps)))

    def misfit(self, shape: Gemma4MTPShape, spec: TargetSpec) -> str:
        return misfit(shape, spec)


METHOD = Gemma4MTPMethod()
