"""The drafter's folder: ``config.json`` and ``model.safetensors`` in the speculators layout, which is what vLLM serves
as it is.

There is no converter between training and serving: parameters carry vLLM's names, every switch whose default differs
between writers and readers is written out, ids of taps are written unchanged (the residual stream after so many
layers). What training knows and a server ignores is under ``spectrain``, with the digests of ``drafter_digests.py``.
Weights are stored in the type they were trained in, so reading a folder gives the same bits. Folders that others wrote
are read through ``foreign_checkpoints.py``, which turns their layouts into this one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, bfloat16, float16, float32, float64

from spectrain.data.vocab import DraftVocab, full_vocab, vocab_from_d2t
from spectrain.drafters.drafter import Drafter, DrafterShape, TargetCopies
from spectrain.drafters.drafter_digests import CONFIG, INDEX, WEIGHTS, check_weights, weight_files, with_digests
from spectrain.drafters.foreign_checkpoints import standard_config, standard_tensors
from spectrain.drafters.registry import DrafterMethod, find_method, known_method, method_names
from spectrain.errors import InputError
from spectrain.files import digest_strings, file_digest, recover_folder, replace_folder, write_atomically
from spectrain.reading import read_json
from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.served_rope import settled

if TYPE_CHECKING:
    from spectrain.drafters.drafter import DrafterShape


_DTYPES = (bfloat16, float16, float32, float64)
# An embedding that stands for the mask token in place of the target's own: vLLM reads it from beside the weights.
_MASK_EMBEDDING = "mask_embedding.pt"


def save_drafter(
    drafter: Drafter,
    folder: Path,
    *,
    target: str,
    target_architectures: tuple[str, ...],
    num_speculative_tokens: int,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Write the folder atomically: a reader sees the old drafter or the new one, never a mixture. Raises RunError if it
    cannot be written.

    Args:
        target: what a server loads beside the drafter when it is given this folder alone (Hub id or folder).
        target_architectures: the target's own, from its config.json.
        num_speculative_tokens: the number of draft tokens a server takes by default.
        metadata: anything to record under ``spectrain`` (scores, step, coverage).
    """
    shape = drafter.shape
    method = find_method(drafter.method)
    config = {
        "architectures": [method.architecture],
        "speculators_model_type": drafter.method,
        "speculators_config": {
            "algorithm": drafter.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}],
            "verifier": {"name_or_path": target, "architectures": list(target_architectures)},
        },
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.hidden_size,
        **method.describe(drafter),
        "torch_dtype": str(next(drafter.body.parameters()).dtype).removeprefix("torch."),
        "spectrain": {**method.metadata(drafter), **(metadata or {})},
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in method.stored_tensors(drafter).items()}
    if shape.owns_head:
        tensors["d2t"] = drafter.vocab.d2t()

    def fill(into: Path) -> None:
        save_file(tensors, into / method.weights_name, metadata={"format": "pt"})
        whole = method.finish_folder(drafter, into, config)
        (into / CONFIG).write_text(json.dumps(with_digests(whole, into), indent=2) + "\n", encoding="utf-8")

    replace_folder(folder, fill, "the drafter", sum(tensor.nbytes for tensor in tensors.values()))


def add_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    """Record more under ``spectrain`` in a folder that is there, in one step; its weights stay as they are."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config["spectrain"] = {**config.get("spectrain", {}), **metadata}
    write_atomically(folder / CONFIG, json.dumps(with_digests(config, folder), indent=2) + "\n")


def read_shape(folder: str | Path, usual_taps: Sequence[int] | None = None) -> DrafterShape:
    """What a drafter folder's ``config.json`` says of its drafter: taps, dimensions, vocabulary sizes. Reads no
    weights.

    ``usual_taps``: what an EAGLE-3 drafter of another writer reads that does not say so (the target's
    ``default_taps``).

    Raises InputError naming the file, and the field that is missing or makes no sense.
    """
    return _shape_from_config(_read_config(Path(folder), usual_taps), Path(folder))


def read_method(folder: str | Path) -> str:
    """The method of the drafter in a folder. Raises InputError as ``read_shape`` does."""
    return str(_read_config(Path(folder))["speculators_model_type"])


def load_drafter(
    folder: str | Path, usual_taps: Sequence[int] | None = None, served_length: int | None = None
) -> Drafter:
    """Read a drafter folder of any layout that ``foreign_checkpoints.py`` knows; weights are bit for bit what was
    saved.

    Call ``attach(head)`` before drafting. ``usual_taps`` as in ``read_shape``. ``served_length``: tokens up to which it
    is served, which decides how folders of others turn (``served_rope.py``); those that fit writes have decided.

    Raises InputError naming the file and the field or tensor that is missing or has the wrong shape, or weights that
    have changed since they were written.
    """
    folder = Path(folder)
    if not folder.exists():  # a writer was killed between its two renames; one that is at work must not be disturbed
        recover_folder(folder)
    config = _read_config(folder, usual_taps)
    shape = _shape_from_config(_served_at(config, served_length), folder)
    tensors = _method(config).standard_tensors(standard_tensors(read_tensors(folder)), str(folder / WEIGHTS))
    vocab = _vocab(tensors.pop("d2t", None), shape, folder)
    _check_t2d(tensors.pop("t2d", None), vocab, folder)
    where = weight_files(folder)[0]
    copies = TargetCopies.taken_from(tensors, shape.owns_head, str(where))
    drafter = _build(config, shape, vocab, folder)
    try:
        tensors = _method(config).body_tensors(drafter, tensors)
    except KeyError as error:
        raise InputError(f"{where}: tensor {error} is missing") from None
    _check_tensors(drafter.body.state_dict(), tensors, where)
    check_weights(folder)
    drafter.folder = folder
    drafter.body.load_state_dict(tensors, assign=True)
    drafter.copies = copies if copies.tensors else None
    return drafter.eval()


def _read_config(folder: Path, usual_taps: Sequence[int] | None = None) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise InputError(f"{folder} holds no drafter: {CONFIG} is missing")
    config = read_json(path)
    if (folder / _MASK_EMBEDDING).is_file():
        raise InputError(
            f"{folder / _MASK_EMBEDDING}: this version reads drafters whose mask is a token of the target alone"
        )
    config = standard_config(config, str(path), usual_taps)
    kind = config.get("speculators_model_type")
    method = known_method(str(kind))
    if method is None or not method.trainable:
        raise InputError(
            f"{path}: speculators_model_type is {kind!r}; this version reads {', '.join(method_names())} drafters in "
            f"the speculators layout (a kind of your own comes with drafter.module)"
        )
    return config


def _served_at(config: dict[str, Any], length: int | None) -> dict[str, Any]:
    """The configuration with its rotary parameters settled; one that is broken is left for the reader of shapes."""
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        return config
    rope, most = layer.get("rope_parameters"), layer.get("max_position_embeddings")
    if not isinstance(rope, dict) or not isinstance(most, int):
        return config
    return {**config, "transformer_layer_config": {**layer, "rope_parameters": settled(rope, most, length)}}


def _method(config: dict[str, Any]) -> DrafterMethod:
    return find_method(config["speculators_model_type"])


def _shape_from_config(config: dict[str, Any], folder: Path) -> DrafterShape:
    try:
        return _method(config).read_shape(config)
    except KeyError as error:
        raise InputError(f"{folder / CONFIG}: field {error} is missing") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise InputError(
            f"{folder / CONFIG} describes no drafter ({error}): name a folder that fit has written"
        ) from None


def _build(config: dict[str, Any], shape: DrafterShape, vocab: DraftVocab, folder: Path) -> Drafter:
    """The drafter, its weights not yet read."""
    metadata = config.get("spectrain") or {}
    try:
        if not isinstance(metadata, dict):
            raise ValueError(f"spectrain is {metadata!r}, it must be a section with fields")
        return _method(config).read_drafter(shape, vocab, metadata)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        ArithmeticError,
    ) as error:  # the last two for sizes that no machine holds
        raise InputError(
            f"{folder / CONFIG} describes no drafter ({error}): name a folder that fit has written"
        ) from None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, under the names that its files have, from one file or several."""
    paths = weight_files(folder)
    if not paths:
        raise InputError(f"{folder / WEIGHTS} is missing, and so is {INDEX} (only safetensors are read)")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            # Copied, because kernels sum in another order where a tensor does not begin at a whole cache line, as in a
            # mapped file.
            tensors |= {name: tensor.clone() for name, tensor in load_file(path).items()}
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} cannot be read as safetensors: {error}") from None
    return tensors


def _vocab(d2t: Tensor | None, shape: DrafterShape, folder: Path) -> DraftVocab:
    if not shape.owns_head:
        if d2t is not None and bool(d2t.any()):
            raise InputError(
                f"{folder / WEIGHTS}: tensor 'd2t' moves ids, but draft_vocab_size is the target's whole vocabulary"
            )
        return full_vocab(shape.target_vocab_size)
    if d2t is None:
        raise InputError(
            f"{folder / WEIGHTS}: tensor 'd2t' is missing, but draft_vocab_size is smaller than the target's vocabulary"
        )
    if d2t.is_floating_point():
        raise InputError(f"{folder / WEIGHTS}: tensor 'd2t' is of type {d2t.dtype}, it must hold whole numbers")
    if tuple(d2t.shape) != (shape.draft_vocab_size,):
        raise InputError(
            f"{folder / WEIGHTS}: tensor 'd2t' has {tuple(d2t.shape)}, draft_vocab_size says {shape.draft_vocab_size}"
        )
    vocab = vocab_from_d2t(d2t, shape.target_vocab_size)
    ids_D = vocab.ids_D
    if int(ids_D.min()) < 0 or int(ids_D.max()) >= shape.target_vocab_size or not bool((ids_D.diff() > 0).all()):
        raise InputError(
            f"{folder / WEIGHTS}: tensor 'd2t' does not give ascending ids of a vocabulary of {shape.target_vocab_size}"
        )
    return vocab


def check_vocab(folder: Path) -> None:
    """Raises InputError where ``d2t`` and ``t2d`` of a folder disagree. Reads no other weights."""
    reader = CheckpointReader(folder)
    d2t, t2d = (reader.get(name) if name in reader.names else None for name in ("d2t", "t2d"))
    if d2t is not None and t2d is not None and d2t.any():
        _check_t2d(t2d, vocab_from_d2t(d2t, len(t2d)), folder)


def _check_t2d(t2d: Tensor | None, vocab: DraftVocab, folder: Path) -> None:
    """``t2d``, which tokens of the target can be drafted, says nothing beyond ``d2t``; one that says something else
    shows that one of them belongs to another drafter.
    """
    if t2d is None:
        return
    where = f"{folder / WEIGHTS}: tensor 't2d'"
    if tuple(t2d.shape) != (vocab.target_size,):
        raise InputError(f"{where} has {tuple(t2d.shape)}, the target's vocabulary is {vocab.target_size}")
    drafted_V = torch.zeros(vocab.target_size, dtype=torch.bool)
    drafted_V[vocab.ids_D[vocab.ids_D < vocab.target_size]] = True
    different = (t2d.bool() != drafted_V).nonzero()
    if len(different):
        raise InputError(
            f"{where} and 'd2t' disagree on {len(different):,} tokens, first on {int(different[0])}: one of them is "
            f"another drafter's, write it again"
        )


def _check_tensors(expected: dict[str, Tensor], found: dict[str, Tensor], path: Path) -> None:
    for name, tensor in expected.items():
        if name not in found:
            raise InputError(f"{path}: tensor '{name}' is missing")
        if found[name].shape != tensor.shape:
            raise InputError(
                f"{path}: tensor '{name}' has shape {tuple(found[name].shape)}, the configuration asks for "
                f"{tuple(tensor.shape)}"
            )
        if found[name].dtype not in _DTYPES and found[name].dtype != tensor.dtype:
            raise InputError(
                f"{path}: tensor '{name}' is of type {found[name].dtype}, this version reads "
                f"{', '.join(map(str, _DTYPES))}"
            )
        if not bool(found[name].isfinite().all()):
            raise InputError(
                f"{path}: tensor '{name}' holds values that are not finite: the drafter is broken, write it again"
            )
    extra = sorted(set(found) - set(expected))
    if extra:
        raise InputError(f"{path}: tensor '{extra[0]}' belongs to no part of this drafter")


def weights_digest(folder: Path) -> str:
    """sha256 of the weights file, or of the digests of several: binds evaluations and parity records to exact
    weights.
    """
    digests = [file_digest(path) for path in weight_files(folder) or [folder / WEIGHTS]]
    return digests[0] if len(digests) == 1 else digest_strings(digests)
