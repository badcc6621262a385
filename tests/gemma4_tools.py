"""Tiny Gemma-4 targets of every sort, and assistants for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decoders import float64_target
from tiny import VOCAB_SIZE, tiny_target

from spectrain.config.drafter_schema import AutoregressiveConfig, DrafterConfig, Gemma4MTPConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.data.vocab import full_vocab
from spectrain.drafters.autoregressive.gemma4_mtp import METHOD, Gemma4MTP
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel
from spectrain.target.resolve import resolve_target

_PLAIN = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_MORE_HEADS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
# Windows of 8; the keys that an assistant reads are those of layers 2 and 3, or of 0 and 1 where the others share them.
SORTS: dict[str, dict[str, Any]] = {
    "dense": {**_PLAIN, **_MORE_HEADS, "tie_word_embeddings": True},
    "moe": {**_PLAIN, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "e_series": {},
}


@dataclass(frozen=True)
class Gemma4:
    """A target and its two ends."""

    folder: Path
    target: TargetModel
    head: TargetHead

    @classmethod
    def make(
        cls, sort: str, folder: Path, double: bool = False, family: str = "gemma4_text", **overrides: Any
    ) -> Gemma4:
        """``double``: in float64, so that no two ways through it disagree about an argmax."""
        if double:
            target = float64_target(family, folder, **{**SORTS[sort], **overrides})
            return cls(folder, target, TargetHead.from_checkpoint(folder, dtype=torch.float64))
        config = TargetConfig(path=str(tiny_target(family, folder, **{**SORTS[sort], **overrides})))
        target = TargetModel.load(resolve_target(config), config)
        return cls(folder, target, TargetHead.from_checkpoint(folder))

    def states(
        self, prompt: Sequence[int], answer: Sequence[int], key: str = "0", split: str = "train"
    ) -> TargetStates:
        """One document as the target sees it in one pass without a cache, by transformers' own names."""
        ids = torch.tensor([*prompt, *answer])
        with torch.no_grad():
            output = self.target.model(
                input_ids=ids[None], use_cache=False, output_hidden_states=True, return_shared_kv_states=True
            )
            hidden = self.target.run(ids[None], torch.arange(len(ids))[None]).last_hidden_BSH[0]
        sources = self.target.spec.kv_sources()
        return TargetStates(
            input_ids=ids.int(),
            loss_mask=torch.tensor([0] * len(prompt) + [1] * len(answer), dtype=torch.uint8),
            taps=hidden[:, None][:, :0],
            last_hidden=hidden,
            log_normalizer=output.logits[0].logsumexp(-1),
            key=key,
            split=split,
            target_kv={
                layer: tuple(part[0].transpose(0, 1).contiguous() for part in output.shared_kv_states[kind])
                for kind, layer in sources.items()
            },
        )

    def assistant(self, centroids: int = 0, steps: int = 3, **options: Any) -> Gemma4MTP:
        """A random one, wide enough apart that every part matters. ``options``: of its configuration."""
        config = DrafterConfig(
            **{"method": "gemma4_mtp", "num_layers": 3, **options},
            autoregressive=AutoregressiveConfig(ttt_steps=steps),
            gemma4_mtp=Gemma4MTPConfig(
                hidden_size=24,
                num_centroids=centroids,
                centroid_top_k=5 if centroids else 32,
            ),
        )
        vocab = self.target.spec.vocab_size
        drafter = METHOD.build(METHOD.shape(config, self.target.spec), full_vocab(vocab), config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, parameter in sorted(drafter.named_parameters()):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5)
            for layer in drafter.body.model.layers:
                layer.layer_scalar.fill_(0.7)
            if centroids:
                drafter.body.masked_embedding.token_ordering.copy_(torch.randperm(vocab, generator=generator))
        return drafter.to(self.head.embed_weight.dtype).attach(self.head)


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
