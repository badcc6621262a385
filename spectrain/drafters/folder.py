"""The drafter's folder: ``config.json`` and ``model.safetensors`` in the speculators layout, which is what vLLM serves as it is.

There is no converter between training and serving: parameters carry vLLM's names, every switch whose default differs between writers and
readers is written out, ids of taps are written unchanged (the residual stream after so many layers). Facts of training that a server
ignores stand under ``spectrain``. Weights are stored in the type they were trained in, so reading a folder gives the same bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.data.vocab import DraftVocab, full_vocab, vocab_from_d2t
from spectrain.drafters.base import Drafter
from spectrain.drafters.layers import LayerShape
from spectrain.drafters.recurrent.drafter import Eagle3
from spectrain.drafters.recurrent.eagle3 import Eagle3Shape
from spectrain.errors import InputError
from spectrain.files import recover_folder, replace_folder
from spectrain.run_dir import file_digest

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_ROPE_THETA_DEFAULT = 10000.0


def save_drafter(
    drafter: Eagle3,
    folder: Path,
    *,
    target: str,
    target_architectures: tuple[str, ...],
    num_speculative_tokens: int,
    facts: dict[str, Any] | None = None,
) -> None:
    """Write the folder atomically: a reader sees the old drafter or the new one, never a mixture.

    Args:
        target: what a server loads beside the drafter when it is given this folder alone (Hub id or folder).
        target_architectures: the target's own, from its config.json.
        num_speculative_tokens: the number of draft tokens a server takes by default.
        facts: anything to record under ``spectrain`` (scores, step, coverage).
    """
    shape = drafter.shape
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}],
            "verifier": {"name_or_path": target, "architectures": list(target_architectures)},
        },
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.layer.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        **{name: getattr(shape, name) for name in _SWITCHES},
        "transformer_layer_config": _layer_config(shape),
        "torch_dtype": str(drafter.body.fc.weight.dtype).removeprefix("torch."),
        "spectrain": {"unroll_steps": drafter.steps, **(facts or {})},
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.body.state_dict().items()}
    if shape.owns_head:
        tensors["d2t"] = drafter.vocab.d2t()

    def fill(into: Path) -> None:
        save_file(tensors, into / WEIGHTS, metadata={"format": "pt"})
        (into / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    replace_folder(folder, fill)


def _layer_config(shape: Eagle3Shape) -> dict[str, Any]:
    """The decoder layer as a Hugging Face configuration; its ``vocab_size`` is the target's."""
    layer = shape.layer
    config = {
        "model_type": layer.layer_type,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_parameters": layer.rope_parameters,
        "rope_theta": layer.rope_parameters.get("rope_theta", _ROPE_THETA_DEFAULT),  # where releases before rope_parameters look
        "max_position_embeddings": layer.max_position_embeddings,
        "vocab_size": shape.target_vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    # vLLM's Llama-style EAGLE-3 does not count the layer ids; an extra key in this dictionary reaches its model.
    return config | {"num_aux_hidden_states": len(shape.taps)}


def read_shape(folder: str | Path) -> Eagle3Shape:
    """What a drafter folder's ``config.json`` says of its drafter: taps, dimensions, vocabulary sizes. Reads no weights.

    Raises InputError naming the file, and the field that is missing or makes no sense.
    """
    return _shape_from_config(_read_config(Path(folder)), Path(folder))


def load_drafter(folder: str | Path) -> Drafter:
    """Read a drafter folder; weights are bit for bit what was saved. Call ``attach(head)`` before drafting.

    Raises InputError naming the file and the field or tensor that is missing or has the wrong shape.
    """
    folder = Path(folder)
    if not folder.exists():  # a writer was killed between its two renames; one that is at work must not be disturbed
        recover_folder(folder)
    config = _read_config(folder)
    shape = _shape_from_config(config, folder)
    tensors = _read_tensors(folder)
    vocab = _vocab(tensors.pop("d2t", None), shape, folder)
    tensors.pop("t2d", None)
    facts = config.get("spectrain") or {}
    drafter = Eagle3(shape, vocab, steps=int(facts.get("unroll_steps", 3)))
    _check_tensors(drafter.body.state_dict(), tensors, folder / WEIGHTS)
    drafter.body.load_state_dict(tensors, assign=True)
    return drafter.eval()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise InputError(f"{folder} holds no drafter: {CONFIG} is missing")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    kind = config.get("speculators_model_type") if isinstance(config, dict) else None
    if kind != "eagle3":
        raise InputError(f"{path}: speculators_model_type is {kind!r}; this version reads eagle3 drafters in the speculators layout")
    return config


def _shape_from_config(config: dict[str, Any], folder: Path) -> Eagle3Shape:
    try:
        layer = config["transformer_layer_config"]
        if layer["model_type"] not in ("llama", "qwen3"):
            raise ValueError(f"its layer is of type {layer['model_type']!r}, known are llama and qwen3")
        rope = layer.get("rope_parameters") or {"rope_type": "default", "rope_theta": layer.get("rope_theta", _ROPE_THETA_DEFAULT)}
        return Eagle3Shape(
            layer=LayerShape(
                layer_type=layer["model_type"],
                hidden_size=layer["hidden_size"],
                intermediate_size=layer["intermediate_size"],
                num_attention_heads=layer["num_attention_heads"],
                num_key_value_heads=layer["num_key_value_heads"],
                head_dim=layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"],
                rms_norm_eps=layer["rms_norm_eps"],
                rope_parameters=rope,
                max_position_embeddings=layer["max_position_embeddings"],
            ),
            num_layers=layer["num_hidden_layers"],
            taps=tuple(config["eagle_aux_hidden_state_layer_ids"]),
            target_vocab_size=layer["vocab_size"],
            draft_vocab_size=config["draft_vocab_size"],
            **{name: bool(config[name]) for name in _SWITCHES},
        )
    except KeyError as error:
        raise InputError(f"{folder / CONFIG}: field {error} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{folder / CONFIG} describes no drafter ({error}): name a folder that fit has written") from None


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        raise InputError(f"{path} is missing (only safetensors are read)")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read as safetensors: {error}") from None


def _vocab(d2t: Tensor | None, shape: Eagle3Shape, folder: Path) -> DraftVocab:
    if not shape.owns_head:
        return full_vocab(shape.target_vocab_size)
    if d2t is None:
        raise InputError(f"{folder / WEIGHTS}: tensor 'd2t' is missing, but draft_vocab_size is smaller than the target's vocabulary")
    if tuple(d2t.shape) != (shape.draft_vocab_size,):
        raise InputError(f"{folder / WEIGHTS}: tensor 'd2t' has {tuple(d2t.shape)}, draft_vocab_size says {shape.draft_vocab_size}")
    vocab = vocab_from_d2t(d2t, shape.target_vocab_size)
    ids_D = vocab.ids_D
    if int(ids_D.min()) < 0 or int(ids_D.max()) >= shape.target_vocab_size or not bool((ids_D.diff() > 0).all()):
        raise InputError(f"{folder / WEIGHTS}: tensor 'd2t' does not give ascending ids of a vocabulary of {shape.target_vocab_size}")
    return vocab


def _check_tensors(expected: dict[str, Tensor], found: dict[str, Tensor], path: Path) -> None:
    for name, tensor in expected.items():
        if name not in found:
            raise InputError(f"{path}: tensor '{name}' is missing")
        if found[name].shape != tensor.shape:
            raise InputError(
                f"{path}: tensor '{name}' has shape {tuple(found[name].shape)}, the configuration asks for {tuple(tensor.shape)}"
            )
    extra = sorted(set(found) - set(expected))
    if extra:
        raise InputError(f"{path}: tensor '{extra[0]}' belongs to no part of this drafter")


def weights_digest(folder: Path) -> str:
    """sha256 of the weights file: binds evaluations and parity records to exact weights."""
    return file_digest(folder / WEIGHTS)
