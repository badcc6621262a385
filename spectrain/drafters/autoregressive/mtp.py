"""Native multi-token prediction: the head that a target brings along (DeepSeek-V3, arXiv:2412.19437, section 2.2),
tuned on what that target says.

Column t holds the token x_{t+1} and the target's last hidden state at t behind its final norm; it predicts x_{t+2}. A
draft continues column t: step k reads its own output of step k − 1 in place of the hidden state. One physical layer is
run again for every draft, as vLLM runs it. Embedding and lm_head are the target's and are never written; what is
written is a folder that links the target's files and replaces the head's (``overlay.py``).

Where the head lies in a checkpoint, and in what order its parts compute, is a family's fact (``target/mtp_heads.py``);
``mtp_layer.py`` is the layer, ``mtp_tensors.py`` reads and writes its tensors, ``unroll.py`` trains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.config.drafter_schema import AutoregressiveConfig, DrafterConfig
from spectrain.data.packing import PackedBatch
from spectrain.data.vocab import DraftVocab, full_vocab
from spectrain.decoding.proposers import Observation, read_hidden
from spectrain.drafters.autoregressive.autoregressive_drafter import (
    AutoregressiveCache,
    AutoregressiveDrafter,
    AutoregressiveMethod,
    DraftSteps,
    observe_columns,
)
from spectrain.drafters.autoregressive.mtp_init import (
    begin_with_last_layer,
    load_native,
    read_last_layer,
    read_native,
)
from spectrain.drafters.autoregressive.mtp_layer import MtpBody
from spectrain.drafters.autoregressive.mtp_shape import DTYPES, MtpShape, plain_fields
from spectrain.drafters.autoregressive.mtp_tensors import (
    SCALES,
    HeadReader,
    body_tensors,
    has_stacked_experts,
    stored_tensors,
)
from spectrain.drafters.autoregressive.unroll import Columns, unroll
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.drafter_digests import TUNED_HEAD
from spectrain.drafters.field_checks import whole
from spectrain.drafters.layers import Rotary
from spectrain.drafters.overlay import SECTION, Overlay, target_config
from spectrain.drafters.unquantised_modules import ServedModules, leave_unquantised
from spectrain.errors import ConfigError, InputError
from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.families import family_of
from spectrain.target.head import TargetHead
from spectrain.target.mtp_heads import MTP_HEADS, mtp_family
from spectrain.target.spec import TargetSpec

LAST_LAYER = "last_layer"


class Mtp(AutoregressiveDrafter):
    """A target's own head. ``source``: the checkpoint whose files its folder links."""

    method = "mtp"
    reads_last_hidden = True
    shape: MtpShape
    body: MtpBody
    source: Path | None = None

    def __init__(self, shape: MtpShape, config: DrafterConfig | None = None) -> None:
        super().__init__(shape, full_vocab(shape.target_vocab_size), config)
        self.body = MtpBody(shape)
        self.rotary = Rotary(shape.turned)
        self.reads_before_norm = not shape.head.reads_normed

    @property
    def _dtype(self) -> torch.dtype:
        return self.body.norm.weight.dtype

    def unroll(self, batch: PackedBatch, columns: Columns) -> Tensor:
        if self.shape.most_context is not None:
            self._check_context(max(batch.lengths()))
        feature_TH = read_hidden(self, self.head, batch.last_hidden_TH).to(self._dtype)
        return unroll(self.body, self.rotary, self.head, feature_TH, batch, columns, self.attention_backend(batch))

    def new_cache(self, batch_size: int) -> AutoregressiveCache:
        return AutoregressiveCache(self.shape.layer, 1, batch_size, self.body.norm.weight)

    @torch.no_grad()
    def observe(self, cache: AutoregressiveCache, observation: Observation) -> None:
        if observation.last_hidden_BTH is None:
            raise ValueError("a multi-token-prediction head observes the target's last hidden state")
        feature_BTH = observation.last_hidden_BTH.to(self._dtype)
        observe_columns(self.body, self.rotary, self.head, cache, feature_BTH, observation)
        if self.shape.most_context is not None:
            self._check_context(int(cache.columns_B.max()) + 1)

    def _check_context(self, tokens: int) -> None:
        """InputError for a text of which a served head would read chosen keys alone (DeepSeek sparse attention)."""
        most = self.shape.most_context
        if most is not None and tokens > most:
            raise InputError(
                f"a text of {tokens:,} tokens: beyond {most:,} (index_topk) a head of {self.shape.family} reads keys "
                f"that its indexer chooses, which is not computed here: set target.max_length={most}"
            )

    def draft_steps(self, cache: AutoregressiveCache, anchor_B: Tensor, n: int) -> DraftSteps:
        return DraftSteps(self.body, self.rotary, self.head, cache, anchor_B, n)


class MtpMethod(AutoregressiveMethod):
    """The kind ``mtp``."""

    name = "mtp"
    label = "native MTP"
    reads_options = False
    architecture = "NativeMtpHead"
    weights_name = TUNED_HEAD
    library = "vllm"
    serves_as_target = True
    is_tuned = True
    speculative_config = {"method": "mtp"}

    def taps(self, config: DrafterConfig, spec: TargetSpec) -> tuple[int, ...]:
        return ()  # it reads the last hidden state, which is always captured

    def check(self, config: DrafterConfig) -> None:
        """A head has its target's shape and vocabulary; nothing of it can be chosen."""
        plain = DrafterConfig()
        for name in ("num_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            if getattr(config, name) != getattr(plain, name):
                raise ConfigError(f"drafter.{name}: a multi-token-prediction head has its target's shape, leave it out")
        if config.draft_vocab_size is not None:
            raise ConfigError(
                "drafter.draft_vocab_size: a multi-token-prediction head shares its target's vocabulary, leave it out"
            )
        if config.init == "random":
            raise ConfigError(
                "drafter.init=random: a multi-token-prediction head begins with the target's own (target), or with its "
                "last layer (last_layer)"
            )

    def shape(self, config: DrafterConfig, spec: TargetSpec) -> MtpShape:
        family = mtp_family(spec.model_type, spec.architectures)
        if MTP_HEADS[family].selects and config.init == LAST_LAYER:
            raise ConfigError(
                f"drafter.init=last_layer: a head of {family} has an indexer, which is not trained here: use a "
                "checkpoint with its own head"
            )
        experts = spec.experts
        dtype = "bfloat16" if spec.quantization is not None else str(spec.dtype).removeprefix("torch.")
        count, active = (0, 0) if experts is None else (experts.count, experts.active)
        try:
            return MtpShape(family, plain_fields(spec.fields), dtype, count, active)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"drafter=mtp: config.json of the target describes no head ({error})") from None

    def build(self, shape: MtpShape, vocab: DraftVocab, config: DrafterConfig) -> Mtp:
        return Mtp(shape, config)

    def body(self, shape: MtpShape) -> nn.Module:
        return MtpBody(shape)

    @torch.no_grad()
    def copy_from_target(self, drafter: Mtp, spec: TargetSpec, head: TargetHead, folder: Path) -> None:
        """The target's own head, or, with ``drafter.init=last_layer``, a new one that begins as its last layer."""
        load = begin_with_last_layer if drafter.config.init == LAST_LAYER else load_native
        load(drafter, spec, head, folder)
        drafter.source = folder

    def check_copies(self, config: DrafterConfig, spec: TargetSpec, folder: Path) -> None:
        """Also whether the tuned head could be served beside the target's quantised layers."""
        shape, reader = self.shape(config, spec), HeadReader(folder, spec.quantization, shapes_only=True)
        with torch.device("meta"):
            state = MtpBody(shape).state_dict()
        if config.init == LAST_LAYER:
            read_last_layer(state, spec, family_of(spec.config), reader)
        else:
            read_native(state, shape, reader)
        stacked = has_stacked_experts(reader.reader.names, shape.head, shape.target_layers)
        changed = stored_tensors(state, shape.head, shape.target_layers, stacked)
        _served_config(shape, folder, changed)

    def comes_with(self, shape: MtpShape, folder: Path) -> bool:
        return shape.head.found_in(CheckpointReader(folder).names, shape.target_layers)

    @torch.no_grad()
    def untuned(self, drafter: Mtp, spec: TargetSpec, folder: Path) -> Drafter:
        native = Mtp(drafter.shape, DrafterConfig(self.name, autoregressive=drafter.config.autoregressive))
        load_native(native, spec, drafter.head, folder)
        return native.to(next(drafter.parameters()).device).eval().attach(drafter.head)

    # --- its folder --------------------------------------------------------------------------------------------------

    def describe(self, drafter: Mtp) -> dict[str, Any]:
        shape = drafter.shape
        return {
            "transformer_layer_config": {"hidden_size": shape.hidden_size, "vocab_size": shape.target_vocab_size},
            "mtp": {
                "family": shape.family,
                "text": dict(shape.text),
                "dtype": shape.dtype,
                "experts": shape.experts,
                "active": shape.active,
            },
        }

    def metadata(self, drafter: Mtp) -> dict[str, Any]:
        return {"ttt_steps": drafter.training_steps}

    def read_shape(self, fields: dict[str, Any]) -> MtpShape:
        return MtpShape(**fields["mtp"])

    def read_drafter(self, shape: MtpShape, vocab: DraftVocab, metadata: Mapping[str, Any]) -> Mtp:
        steps = whole(metadata.get("ttt_steps", 3), "spectrain.ttt_steps")
        return Mtp(shape, DrafterConfig(self.name, autoregressive=AutoregressiveConfig(ttt_steps=steps)))

    def stored_tensors(self, drafter: Mtp) -> dict[str, Tensor]:
        """In the type of the target's weights; what is no parameter keeps its own."""
        shape, parameters = drafter.shape, {name for name, _ in drafter.body.named_parameters()}
        state = {
            name: tensor.detach().to(DTYPES[shape.dtype]) if name in parameters else tensor
            for name, tensor in drafter.body.state_dict().items()
        }
        stacked = has_stacked_experts(CheckpointReader(_source(drafter)).names, shape.head, shape.target_layers)
        return stored_tensors(state, shape.head, shape.target_layers, stacked)

    def body_tensors(self, drafter: Mtp, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        shape = drafter.shape
        return body_tensors(stored, drafter.body.state_dict(), shape.head, shape.target_layers)

    def finish_folder(self, drafter: Mtp, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        shape, source = drafter.shape, _source(drafter)
        changed = self.stored_tensors(drafter)
        start, names = shape.head.start(shape.target_layers), CheckpointReader(source).names
        stale = frozenset(
            name for name in names if name.startswith(start) and SCALES.search(name) and not shape.head.stays(name)
        )
        recorded = Overlay(source, changed, stale).write(folder)
        whole_config = _served_config(shape, source, changed)
        text = whole_config.get("text_config")
        part = text if isinstance(text, dict) else whole_config
        part[shape.head.layers_field] = part.get(shape.head.layers_field) or 1
        kept = {name: value for name, value in config.items() if name != "spectrain"}
        return {**whole_config, "spectrain": {**config["spectrain"], "drafter": kept, SECTION: recorded}}


def _served_config(shape: MtpShape, source: Path, changed: Mapping[str, Tensor]) -> dict[str, Any]:
    """The target's config.json, which has vLLM load the head as ``changed`` is stored: in 16 bits or more."""
    head, layers = shape.head, shape.target_layers
    modules = [head.served_name(module, layers) for module in _modules(changed)]
    served = ServedModules(modules, head.served_name(head.start(layers), layers), head.kept_part)
    return leave_unquantised(target_config(source), source, served)


def _modules(tensors: Mapping[str, Tensor]) -> list[str]:
    """Modules whose matrices these are; experts in stacks are one."""
    parts = [name.rpartition(".")[0] for name, tensor in tensors.items() if tensor.ndim > 1]
    return list(dict.fromkeys(parts))


def _source(drafter: Mtp) -> Path:
    """The checkpoint that the head belongs to: the target, or the overlay that training went on from."""
    source = drafter.source or drafter.folder
    if source is None:
        raise RuntimeError("the head's target is not known: build it with copy_from_target, or read it from a folder")
    return source


METHOD = MtpMethod()
