"""Tiny random targets that recipes make themselves, from a seed, to try a whole pipeline in a minute: those of
``tiny_targets.py``, and what transformers cannot write of them, a multi-token-prediction head.

What they say makes no sense. Everything around it is as with a real target, so vLLM loads them, too (heads are 32 wide,
the least that its CPU kernels take).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.target.bundled import install_once, user_cache
from spectrain.target.checkpoint import SINGLE_FILE
from spectrain.target.mtp_heads import MTP_HEADS, MtpHead, mtp_family

_VERSION = 1  # part of the folder's name: raise it when something else is written
_MIMO: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
# Its last layers read the keys of earlier ones, as in the E series: an assistant reads those of layers 2 and 3.
_GEMMA4: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 32,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "final_logit_softcapping": None,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
# Name -> family of ``tiny_targets.py`` and what its configuration has otherwise. MiMo's decoder is Qwen2's.
TINY: dict[str, tuple[str, dict[str, Any]]] = {"mimo": ("qwen2", _MIMO), "gemma4": ("gemma4_text", _GEMMA4)}
_ARCHITECTURES = {"mimo": "MiMoForCausalLM"}


def tiny_folder(name: str) -> Path:
    """The target called ``name`` in the user's cache, made there the first time, in a second."""
    return install_once(user_cache() / "targets" / f"tiny-{name}-{_VERSION}", lambda folder: write_tiny(name, folder))


def write_tiny(name: str, folder: Path, seed: int = 0) -> None:
    """Write the target called ``name`` into an existing folder; the same bits for the same seed."""
    from spectrain.target.tiny_targets import tiny_target

    family, fields = TINY[name]
    tiny_target(family, folder, seed, **fields)
    if name in _ARCHITECTURES:
        change_config(folder, architectures=[_ARCHITECTURES[name]])
        add_mtp_head(folder, seed)


def change_config(folder: Path, **fields: Any) -> dict[str, Any]:
    """Set fields of a folder's config.json; returns all of them."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **fields}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return config


def add_mtp_head(folder: Path, seed: int = 0) -> list[str]:
    """Give a tiny target (one safetensors file) a multi-token-prediction head of its family: its last layer with
    attention, stirred, behind a random projection. Returns the names of the tensors.

    transformers drops such tensors on loading, and cannot write them. Experts are stored as the target's are: one by
    one.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    head = MTP_HEADS[mtp_family(text["model_type"], config.get("architectures") or ())]
    tensors = load_file(folder / SINGLE_FILE)
    made = _head_tensors(tensors, head, text, seed)
    save_file({**tensors, **made}, folder / SINGLE_FILE, metadata={"format": "pt"})
    text[head.layers_field] = 1
    change_config(folder, **config)
    return sorted(made)


def _head_tensors(
    tensors: Mapping[str, Tensor], head: MtpHead, text: Mapping[str, Any], seed: int
) -> dict[str, Tensor]:
    generator, hidden, layers = torch.Generator().manual_seed(seed + 1), text["hidden_size"], text["num_hidden_layers"]
    kinds = text.get("layer_types") or ["full_attention"] * layers
    last = max(index for index, kind in enumerate(kinds) if kind in ("full_attention", "indexed_attention"))
    marker, start = f"layers.{last}.", head.start(layers)
    made = {
        f"{start}{head.layer}{name.split(marker, 1)[1]}": tensor
        for name, tensor in tensors.items()
        if marker in name and not name.startswith(start)
    }
    like = next(iter(made.values()))
    gain = made[f"{start}{head.layer}input_layernorm.weight"]
    names = (head.embedding_norm, head.hidden_norm, head.output_norm)
    made |= {f"{start}{name}.weight": gain for name in names}
    made[f"{start}{head.projection}.weight"] = like.new_zeros(hidden, 2 * hidden)
    return {name: _stirred(tensor, generator) for name, tensor in sorted(made.items())}


def _stirred(tensor: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(tensor.shape, generator=generator)
    return (tensor.float() + (0.1 if tensor.ndim == 1 else 0.2) * noise).to(tensor.dtype).contiguous()
