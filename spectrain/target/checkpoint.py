"""Single tensors out of a checkpoint folder, by name, without loading the rest.

Files are memory-mapped, so a tensor costs its own bytes and nothing else, whatever the size of the checkpoint. Only
safetensors are read: a pickle can run code.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from spectrain.errors import InputError
from spectrain.reading import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class CheckpointReader:
    """The tensors of one folder, sharded or not.

    Raises ``InputError`` at once if the folder has no safetensors, if its index is broken or if a shard that the index
    names is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._files = self._read_index() if (self.folder / INDEX_FILE).is_file() else self._scan()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    @property
    def paths(self) -> list[Path]:
        """The safetensors files, sorted."""
        return sorted(set(self._files.values()))

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
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} cannot be read ({error}): fetch the file again") from error

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
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                return dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} cannot be read ({error}): fetch the file again") from error
