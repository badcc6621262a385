"""What all kinds of block drafters have in common: shape, initial weights, costs, and their part of a folder.

``dflash.py``, ``dspark.py`` and ``dflash2.py`` add the heads of their kind.

vLLM reads one flag of causality for all layers: ``sliding_window_non_causal`` for dflash and dflash2; a dspark layer is
causal if it is a sliding one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.trainer_schema import TrainerConfig
from spectrain.data.vocab import DraftVocab
from spectrain.drafters.block.block_drafter import BlockDrafter
from spectrain.drafters.block.block_model import BlockBody
from spectrain.drafters.block.block_shape import BlockShape, blocks_together
from spectrain.drafters.field_checks import flag, positive
from spectrain.drafters.foreign_checkpoints import (
    block_decoder_layer,
    block_taps,
    flat_layer,
    mask_token,
    speculators_fields,
)
from spectrain.drafters.init_from_target import ATTENTION, MLP, CopiedLayers, copy_weights, mlp_norm
from spectrain.drafters.layers import from_layer_config, layer_shape, sliding_layers, to_layer_config, window_of
from spectrain.drafters.mask_token import mask_token_of, resolve_mask_token
from spectrain.drafters.registry import Corpus, DrafterMethod
from spectrain.drafters.training_cost import BatchSize, CorpusSize, TrainingCost, TrainingRows
from spectrain.errors import ConfigError
from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec

# Matrices that an output does not meet as a product: the fused taps are made once a token, tables are looked up.
_NOT_PER_OUTPUT = ("fc.weight", "lm_head.weight", "markov_w1.weight", "codebook")
_TEMPERATURES = "confidence_temperatures"


class BlockMethod(DrafterMethod):
    """Base of the kinds. A kind has heads: what they are by the configuration (``heads``), in a folder's config.json
    (``describe_heads``, ``read_heads``) and in the words of the configuration (``head_settings``).
    """

    sections: ClassVar[tuple[str, ...]] = ("block",)
    taps_field = "aux_hidden_state_layer_ids"
    vllm_defaults: ClassVar[Mapping[str, Any]] = {"sample_from_anchor": False, "sliding_window_non_causal": True}

    def heads(self, config: DrafterConfig, spec: TargetSpec) -> dict[str, Any]:
        """Fields of ``BlockShape``."""
        return {}

    def describe_heads(self, shape: BlockShape) -> dict[str, Any]:
        return {}

    def read_heads(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def head_settings(self, shape: BlockShape) -> dict[str, object]:
        return {}

    def samples_from_anchor(self, config: DrafterConfig) -> bool:
        """Whether slot 0 drafts."""
        return False

    # --- from configuration to drafter -------------------------------------------------------------------------------

    def default_taps(self, spec: TargetSpec) -> tuple[int, ...]:
        return spec.spread_taps()

    def max_drafts(self, config: DrafterConfig) -> int:
        return config.block.block_size - (not self.samples_from_anchor(config))

    def check(self, config: DrafterConfig) -> None:
        if config.layer_type == "llama":
            raise ConfigError(
                f"drafter.layer_type=llama: the layers of {self.name} are qwen3's, with norms on q and k: leave it out"
            )

    def resolve(self, config: DrafterConfig, corpus: Corpus, say: Callable[[str], None]) -> DrafterConfig:
        return resolve_mask_token(config, "block", corpus, say)

    def shape(self, config: DrafterConfig, spec: TargetSpec) -> BlockShape:
        block = config.block
        return BlockShape(
            method=self.name,
            layer=layer_shape(config, spec, "qwen3", longrope=False),  # vLLM's block drafters cannot turn so
            num_layers=config.num_layers,
            taps=self.taps(config, spec),
            target_vocab_size=spec.vocab_size,
            draft_vocab_size=config.draft_vocab_size or spec.vocab_size,
            block_size=block.block_size,
            mask_token_id=mask_token_of(config, "block", spec),
            sample_from_anchor=self.samples_from_anchor(config),
            sliding_window=block.sliding_window,
            causal=block.sliding_window is not None and block.causal,
            **self.heads(config, spec),
        )

    def build(self, shape: BlockShape, vocab: DraftVocab, config: DrafterConfig) -> BlockDrafter:
        return BlockDrafter(shape, vocab, config)

    def body(self, shape: BlockShape) -> nn.Module:
        return BlockBody(shape)

    @torch.no_grad()
    def copy_from_target(self, drafter: BlockDrafter, spec: TargetSpec, head: TargetHead, folder: Path) -> None:
        """Drafter layer i of L begins as layer N − L + i of the target where the shapes agree, the fused context as the
        deepest tap, and the final norm as the target's: keys and values of the context are then close to the target's.
        """
        body, offset = drafter.body, 1.0 if head.one_plus else 0.0
        body.norm.weight.copy_(head.norm_weight + offset)
        hidden = spec.hidden_size
        body.fc.weight[:, -hidden:] += torch.eye(hidden)  # taps ascend, so the deepest comes last
        copied = self._copied(drafter.config).read(head.math.family, spec, CheckpointReader(folder), [])
        for layer, source in zip(body.layers, copied, strict=True):
            gain = source.get("input_layernorm.weight")
            if gain is not None and copy_weights(layer.self_attn, "self_attn", ATTENTION, source):
                layer.input_layernorm.weight.copy_(gain.float() + offset)
                body.hidden_norm.weight.copy_(gain.float() + offset)
                copy_weights(layer.self_attn, "self_attn", ("q_norm", "k_norm"), source, offset)
            gain = mlp_norm(source)
            if gain is not None and copy_weights(layer.mlp, "mlp", MLP, source):
                layer.post_attention_layernorm.weight.copy_(gain.float() + offset)

    def check_copies(self, config: DrafterConfig, spec: TargetSpec, folder: Path) -> None:
        self._copied(config).check(spec, folder)

    def _copied(self, config: DrafterConfig) -> CopiedLayers:
        return CopiedLayers(config.num_layers, ("self_attn", "mlp"), required=config.init == "target")

    def training_cost(
        self, config: DrafterConfig, trainer: TrainerConfig, entries: Mapping[str, int], corpus: CorpusSize
    ) -> TrainingCost:
        block, sequences = config.block, trainer.micro_batch_size
        drawn = corpus.tokens * block.anchors / trainer.packed_length
        # The context's keys and values, in every layer.
        context = sum(size for name, size in entries.items() if name.endswith(("k_proj.weight", "v_proj.weight")))
        batch_blocks = min(sequences * block.anchors, trainer.packed_length * sequences)
        return TrainingCost(
            outputs=min(corpus.generated_tokens, drawn) * block.block_size,
            batch_outputs=batch_blocks * block.block_size,
            token_entries=entries["fc.weight"] + context,
            output_entries=sum(size for name, size in entries.items() if not name.endswith(_NOT_PER_OUTPUT)),
        )

    def training_rows(self, config: DrafterConfig, trainer: TrainerConfig, batch: BatchSize) -> TrainingRows:
        drawn = config.block.anchors * batch.tokens / trainer.packed_length
        return self._rows(config, min(batch.generated_tokens, drawn), self.max_drafts(config), batch)

    def simulated_rows(self, config: DrafterConfig, drafts: int, batch: BatchSize) -> TrainingRows:
        drafts = min(drafts, self.max_drafts(config))
        together = blocks_together(drafts + (not self.samples_from_anchor(config)))
        return self._rows(config, min(batch.generated_tokens, together), drafts, batch)

    def _rows(self, config: DrafterConfig, blocks: float, drafts: int, batch: BatchSize) -> TrainingRows:
        """Of blocks that give so many drafts each; the context has keys and values alone."""
        slots = drafts + (not self.samples_from_anchor(config))
        students = blocks * drafts
        return TrainingRows(
            layer_rows=blocks * slots,
            students=students,
            teachers=min(students, batch.generated_tokens),
            key_rows=batch.tokens,
            own_keys=slots,
            extra_widths=self.extra_widths(config, slots),
        )

    def extra_widths(self, config: DrafterConfig, slots: int) -> float:
        """Float32 copies of a slot that this kind's layers keep in training beyond those of a decoder layer."""
        return 0.0

    # --- its folder --------------------------------------------------------------------------------------------------

    def describe(self, drafter: BlockDrafter) -> dict[str, Any]:
        shape = drafter.shape
        return {
            self.taps_field: list(shape.taps),
            "mask_token_id": shape.mask_token_id,
            "block_size": shape.block_size,
            "sample_from_anchor": shape.sample_from_anchor,
            "sliding_window_non_causal": not shape.causal,
            **self.describe_heads(shape),
            "transformer_layer_config": to_layer_config(shape) | sliding_layers(shape.num_layers, shape.sliding_window),
        }

    def metadata(self, drafter: BlockDrafter) -> dict[str, Any]:
        return {_TEMPERATURES: list(drafter.temperatures)} if drafter.temperatures else {}

    def read_shape(self, fields: dict[str, Any]) -> BlockShape:
        layer = fields["transformer_layer_config"]
        sliding = window_of(layer)
        return BlockShape(
            method=self.name,
            layer=from_layer_config(layer),
            num_layers=layer["num_hidden_layers"],
            taps=tuple(fields[self.taps_field]),
            target_vocab_size=layer["vocab_size"],
            draft_vocab_size=fields.get("draft_vocab_size") or layer["vocab_size"],
            block_size=fields["block_size"],
            mask_token_id=fields["mask_token_id"],
            sample_from_anchor=self.read_sample_from_anchor(fields),
            sliding_window=sliding,
            causal=self.read_causal(fields, sliding is not None),
            **self.read_heads(fields),
        )

    def read_sample_from_anchor(self, fields: Mapping[str, Any]) -> bool:
        if read_flag(fields, "sample_from_anchor"):
            raise ValueError(
                f"sample_from_anchor is true, but only dspark drafts from the anchor's slot, not {self.name}"
            )
        return False

    def read_causal(self, fields: Mapping[str, Any], slides: bool) -> bool:
        return not read_flag(fields, "sliding_window_non_causal", True)

    def read_drafter(self, shape: BlockShape, vocab: DraftVocab, metadata: Mapping[str, Any]) -> BlockDrafter:
        drafter = BlockDrafter(shape, vocab, DrafterConfig(method=self.name))
        found = metadata.get(_TEMPERATURES) or ()
        drafter.temperatures = tuple(positive(value, f"spectrain.{_TEMPERATURES}") for value in found)
        return drafter

    def read_max_drafts(self, fields: Mapping[str, Any]) -> int | None:
        block = fields.get("block_size")
        return None if block is None else int(block) - (not fields.get("sample_from_anchor"))

    def settings(self, shape: BlockShape) -> dict[str, object]:
        common = {name: getattr(shape, name) for name in ("block_size", "mask_token_id", "sliding_window")}
        return {**{f"block.{name}": value for name, value in common.items()}, **self.head_settings(shape)}

    def foreign_block(
        self, config: dict[str, Any], nested: dict[str, Any], block: int, drafts: int, where: str
    ) -> tuple[dict[str, Any], bool]:
        """(what the flat layouts of z-lab and DeepSpec say alike, whether the blocks are causal). ``nested``: their
        ``dflash_config``.
        """
        layer, causal = block_decoder_layer(config, nested, where)
        return speculators_fields(config, self.name, drafts, layer, where) | {
            self.taps_field: block_taps(config, nested, where),
            "mask_token_id": mask_token(config, nested, where),
            "block_size": block,
        }, causal


def write_block(standard: dict[str, Any]) -> dict[str, Any]:
    """What the flat layouts of z-lab and DeepSpec say alike, with a reduced vocabulary where there is one."""
    layer = standard["transformer_layer_config"]
    reduced = standard.get("draft_vocab_size") not in (None, layer["vocab_size"])
    return {
        **flat_layer(layer),
        "block_size": standard["block_size"],
        **({"draft_vocab_size": standard["draft_vocab_size"]} if reduced else {}),
    }


def layers_below(taps: Any) -> list[int]:
    """Ids of the layers whose outputs are the taps, counted from 0."""
    return [tap - 1 for tap in taps]


def read_flag(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = fields.get(name)
    return default if value is None else flag(value, name)
