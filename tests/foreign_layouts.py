"""Drafters written in the layouts of other projects, field by field as those write them, and nothing that they do not
write.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from spectrain.drafters.drafter import Drafter

Written = tuple[dict[str, Any], dict[str, Tensor]]


def tensors_of_body(drafter: Drafter) -> dict[str, Tensor]:
    tensors = {name: tensor.detach().clone() for name, tensor in drafter.body.state_dict().items()}
    if drafter.shape.owns_head:
        ids = drafter.vocab.ids_D
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(drafter.shape.target_vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def plain_layer(drafter: Drafter) -> dict[str, Any]:
    """A decoder's fields as transformers 4 wrote them."""
    layer = drafter.shape.layer
    rope = dict(layer.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    return {
        "attention_bias": False,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "max_position_embeddings": layer.max_position_embeddings,
        "num_attention_heads": layer.num_attention_heads,
        "num_hidden_layers": drafter.shape.num_layers,
        "num_key_value_heads": layer.num_key_value_heads,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **rope},
        "rope_theta": theta,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": drafter.shape.target_vocab_size,
    }


def zlab_dflash(drafter: Drafter) -> Written:
    shape = drafter.shape
    nested: dict[str, Any] = {"mask_token_id": shape.mask_token_id, "target_layer_ids": [tap - 1 for tap in shape.taps]}
    if shape.sliding_window is not None:
        nested |= {"use_swa": True, "swa_window_size": shape.sliding_window, "causal": shape.causal}
    if shape.conv is not None:
        nested |= {"conv_kernel_size": shape.conv.kernel_size, "conv_group_size": shape.conv.group_size}
        nested |= {"selector_rank": shape.selector.rank, "selector_top_k": shape.selector.top_k}
    config = plain_layer(drafter) | {
        "architectures": ["DFlash2DraftModel" if shape.conv is not None else "DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": shape.block_size,
        "dflash_config": nested,
        "layer_types": ["full_attention"] * shape.num_layers,
        "model_type": "qwen3",
        "num_target_layers": 36,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    if shape.owns_head:
        config["draft_vocab_size"] = shape.draft_vocab_size
    return config, tensors_of_body(drafter)


def deepspec_dspark(drafter: Drafter) -> Written:
    shape = drafter.shape
    config = plain_layer(drafter) | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "markov_rank": shape.markov.rank,
        "markov_head_type": shape.markov.kind,
        "enable_confidence_head": shape.confidence,
        "confidence_head_with_markov": shape.confidence_with_markov,
        "model_type": "qwen3",
        "target_layer_ids": [tap - 1 for tap in shape.taps],
    }
    copies = {
        "embed_tokens.weight": drafter.head.embed_weight.clone(),
        "lm_head.weight": drafter.head.lm_head_weight.clone(),
    }
    return config, tensors_of_body(drafter) | copies


def eagle3(drafter: Drafter) -> Written:
    shape = drafter.shape
    config = plain_layer(drafter) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "model_type": "llama",
    }
    config |= {
        name: True
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        if getattr(shape, name)
    }
    if shape.sliding_window is not None:
        config |= {"layer_types": ["sliding_attention"] * shape.num_layers, "sliding_window": shape.sliding_window}
    return config, {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors_of_body(drafter).items()}


def write(layout: Callable[[Drafter], Written], drafter: Drafter, folder: Path, **changes: Any) -> Path:
    """A folder in a layout; ``changes`` to its configuration, None for a field that is not there."""
    config, tensors = layout(drafter)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in {**config, **changes}.items() if name not in changes or value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
