"""Single tensors out of a checkpoint folder, by name, without loading the rest; and whether its tensors are those that
its configuration asks for.

Files are memory-mapped, so a tensor costs its own bytes and nothing else, whatever the size of the checkpoint. Only
safetensors are read: a pickle can run code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from spectrain.errors import InputError
from spectrain.reading import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")

# Parts of a checkpoint that the language model computes without: encoders of images and sounds, heads that draft, what
# older releases stored beside the weights, scales of a K/V cache in 8 bits and of activations.
_NOT_OF_THE_DECODER = re.compile(
    r"(^|[._])(vision|visual|image|audio|speech|sound|multi_modal|multimodal|mm|mtp|nextn|medusa)([._]|$)"
    r"|rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(^|\.)position_ids$|\.masked_bias$"
    r"|\.[qkv]_scale$|\.kv_scale$|\.(input|activation|output)_scale$|\.input_global_scale$"
)
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.*)")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


class CheckpointReader:
    """The tensors of one folder, sharded or not.

    Raises ``InputError`` at once if the folder has no safetensors, if its index is broken or if a shard that the index
    names is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._files = self._read_index() if (self.folder / INDEX_FILE).is_file() else self._scan()

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def of_module(self, module: str) -> Sequence[str]:
        """The names of a module's own tensors."""
        return self._by_module.get(module, ())

    @cached_property
    def _by_module(self) -> Mapping[str, Sequence[str]]:
        found: dict[str, list[str]] = {}
        for name in self._files:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return found

    def located(self) -> Iterator[tuple[str, Path]]:
        """(name, file) of every tensor."""
        yield from self._files.items()

    @property
    def paths(self) -> list[Path]:
        """The safetensors files, sorted."""
        return sorted(set(self._files.values()))

    def described(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, type as safetensors calls it, shape) of every tensor; of the files only headers are read."""
        for path in self.paths:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - no dictionary
                    part = file.get_slice(name)
                    yield name, str(part.get_dtype()), tuple(part.get_shape())

    def get(self, name: str) -> torch.Tensor:
        """The tensor as stored, on the CPU, memory-mapped. ``InputError`` if the checkpoint lacks it or its file is
        broken.
        """
        if name not in self._files:
            raise InputError(
                f"tensor {name} is missing from the checkpoint in {self.folder}: it is incomplete, or its config.json "
                f"is not its own"
            )
        path = self._files[name]
        with _opened(path) as file:
            try:
                return file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from error

    def _read_index(self) -> dict[str, Path]:
        path = self.folder / INDEX_FILE
        try:
            files = {name: self.folder / file for name, file in read_json(path)["weight_map"].items()}
        except (KeyError, AttributeError, TypeError) as error:
            raise InputError(
                f"{path} is not a safetensors index ({type(error).__name__}: {error}): fetch the file again"
            ) from error
        for shard in sorted(set(files.values())):
            if not shard.is_file():
                raise InputError(f"{shard} is missing, though {INDEX_FILE} names it: the checkpoint is incomplete")
        return files

    def _scan(self) -> dict[str, Path]:
        path = self.folder / SINGLE_FILE
        if not path.is_file():
            pickles = sorted(file.name for pattern in PICKLE_PATTERNS for file in self.folder.glob(pattern))
            if pickles:
                raise InputError(
                    f"{self.folder} holds its weights as {pickles[0]}; only safetensors are read, for a pickle can "
                    f"run code: "
                    "save the model with save_pretrained of a current transformers"
                )
            raise InputError(
                f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: the target's weights must lie there as "
                f"safetensors"
            )
        with _opened(path) as file:
            return dict.fromkeys(file.keys(), path)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} cannot be read ({error}): fetch the file again")


def check_loading(info: Mapping[str, Any], folder: Path, num_layers: int, extra_layers: int = 0) -> None:
    """``InputError`` that names the first tensor which the checkpoint lacks, has in another shape or has for nothing.

    transformers fills what is missing with random numbers, anew in each process, and only reports it.

    info: what ``from_pretrained`` says it found, by its names: missing_keys, mismatched_keys, unexpected_keys.
    extra_layers: behind the last of the ``num_layers``, that draft (``num_nextn_predict_layers``).
    """
    if info["mismatched_keys"]:
        ordered = sorted(info["mismatched_keys"])
        name, found, asked = ordered[0]
        raise InputError(
            f"the checkpoint in {folder}: tensor {name} has shape {tuple(found)}, config.json asks for "
            f"{tuple(asked)}{_more(ordered)}: one of them is not the other's, fetch both again"
        )
    missing = _of_the_decoder(info["missing_keys"])
    if missing:
        raise InputError(
            f"the checkpoint in {folder}: tensor {missing[0]} is missing{_more(missing)}: it is incomplete, or its "
            f"config.json is not its own"
        )
    drafting = range(num_layers, num_layers + extra_layers)
    unexpected = [
        name
        for name in _of_the_decoder(info["unexpected_keys"])
        if not ((layer := _LAYER.search(name)) and int(layer[2]) in drafting)
    ]
    if unexpected:
        raise InputError(
            f"the checkpoint in {folder}: tensor {unexpected[0]} has no place in the model that its config.json "
            f"describes{_more(unexpected)}: one of them is not the other's, fetch both again"
        )


def check_experts(reader: CheckpointReader) -> None:
    """``InputError`` if an expert lacks a tensor that others have. They are stacked as they are loaded, so what is said
    then names none of them.
    """
    parts = [match.groups() for match in map(_EXPERT.fullmatch, reader.names) if match]
    count = max((int(number) for _, number, _ in parts), default=-1) + 1
    for start, end in sorted({(start, end) for start, _, end in parts}):
        for number in range(count):
            name = f"{start}{number}.{end}"
            if name not in reader.names:
                raise InputError(
                    f"the checkpoint in {reader.folder}: tensor {name} is missing: it is incomplete, fetch it again"
                )


def _of_the_decoder(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not _NOT_OF_THE_DECODER.search(name))


def _more(found: list[Any]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""
