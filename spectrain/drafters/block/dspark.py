"""DSpark: DFlash with a Markov head that fixes the order of the drafts, a confidence head, and a draft from the
anchor's own slot.

vLLM serves the plain (vanilla) Markov head only: a folder with another is for this package's own loop, and vLLM refuses
its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.drafters.block.block_method import BlockMethod, layers_below, read_flag, write_block
from spectrain.drafters.block.block_shape import BlockShape, MarkovShape
from spectrain.drafters.foreign_checkpoints import count, refuse_unknown_arithmetic, section
from spectrain.errors import ConfigError, InputError
from spectrain.target.spec import TargetSpec

_FOREIGN_DEFAULTS = {
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}


class DSparkMethod(BlockMethod):
    """The kind ``dspark``."""

    name = "dspark"
    label = "DSpark"
    reads_options = False
    sections = (*BlockMethod.sections, "dspark")
    architecture = "Qwen3DSparkModel"
    speculative_config = {"method": "dspark"}
    vllm_defaults = {"sample_from_anchor": False, "markov_head_type": "vanilla"}
    # DeepSpec's; the second is its name while training.
    foreign_architectures = ("Qwen3DSparkModel", "DSparkDraftModel")
    layout = "deepspec"
    layout_holds_copies = True

    def samples_from_anchor(self, config: DrafterConfig) -> bool:
        return config.dspark.sample_from_anchor

    def has_confidence(self, config: DrafterConfig) -> bool:
        return config.dspark.confidence

    def check(self, config: DrafterConfig) -> None:
        super().check(config)
        if config.block.sliding_window is not None and not config.block.causal:
            raise ConfigError(
                "drafter.block.causal=false: a dspark drafter with a sliding window is causal, vLLM knows no other"
            )

    def heads(self, config: DrafterConfig, spec: TargetSpec) -> dict[str, Any]:
        own = config.dspark
        markov = None if own.markov == "none" else MarkovShape(own.markov, own.markov_rank)
        return {
            "markov": markov,
            "confidence": own.confidence,
            "confidence_with_markov": own.confidence and markov is not None and own.confidence_with_markov,
        }

    def describe_heads(self, shape: BlockShape) -> dict[str, Any]:
        return {
            "markov_rank": shape.markov.rank if shape.markov else 0,
            "markov_head_type": shape.markov.kind if shape.markov else "none",
            "enable_confidence_head": shape.confidence,
            "confidence_head_with_markov": shape.confidence_with_markov,
        }

    def read_heads(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        kind = (fields.get("markov_head_type") or "vanilla") if fields.get("markov_rank") else "none"
        return {
            "markov": None if kind == "none" else MarkovShape(kind, fields["markov_rank"]),
            "confidence": read_flag(fields, "enable_confidence_head"),
            "confidence_with_markov": read_flag(fields, "confidence_head_with_markov") and kind != "none",
        }

    def read_sample_from_anchor(self, fields: Mapping[str, Any]) -> bool:
        return read_flag(fields, "sample_from_anchor")

    def read_causal(self, fields: Mapping[str, Any], slides: bool) -> bool:
        return slides

    def head_settings(self, shape: BlockShape) -> dict[str, object]:
        settings: dict[str, object] = {
            "dspark.sample_from_anchor": shape.sample_from_anchor,
            "dspark.markov": "none" if shape.markov is None else shape.markov.kind,
            "dspark.confidence": shape.confidence,
        }
        return settings if shape.markov is None else settings | {"dspark.markov_rank": shape.markov.rank}

    def read_foreign(self, architecture: str, config: dict[str, Any], where: str) -> dict[str, Any]:
        """DeepSpec: a flat Qwen3 configuration; older exports keep what is DSpark's own in ``dflash_config``."""
        nested = section(config, "dflash_config", where)
        refuse_unknown_arithmetic(config, nested, where=where)
        fields = {**config, **nested}
        block, from_anchor = count(fields, "block_size", where), bool(config.get("sample_from_anchor", True))
        standard, causal = self.foreign_block(config, nested, block, block if from_anchor else block - 1, where)
        if causal != standard["transformer_layer_config"]["use_sliding_window"]:
            raise InputError(
                f"{where}: its attention is {'' if causal else 'not '}causal, but a dspark drafter's is exactly where "
                f"it slides"
            )
        return standard | {
            "sample_from_anchor": from_anchor,
            "markov_rank": count(fields, "markov_rank", where, least=0),
            **{name: fields.get(name, default) for name, default in _FOREIGN_DEFAULTS.items()},
        }

    def write_foreign(self, standard: dict[str, Any], where: str) -> dict[str, Any]:
        layer = standard["transformer_layer_config"]
        slides = bool(layer.get("use_sliding_window"))
        return {
            "architectures": [self.foreign_architectures[0]],
            **write_block(standard),
            "mask_token_id": standard["mask_token_id"],
            "target_layer_ids": layers_below(standard[self.taps_field]),
            "sample_from_anchor": standard["sample_from_anchor"],
            "markov_rank": standard["markov_rank"],
            **{name: standard[name] for name in _FOREIGN_DEFAULTS},
            "layer_types": ["sliding_attention" if slides else "full_attention"] * layer["num_hidden_layers"],
            "use_sliding_window": slides,
            "sliding_window": layer["sliding_window"] if slides else None,
            "max_window_layers": 0 if slides else layer["num_hidden_layers"],
        }


METHOD = DSparkMethod()
