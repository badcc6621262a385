"""A target's folder with a tuned head: links to the target's own files, one shard with the changed tensors, and an
index that points their names to it. vLLM serves it like the target.

    config.json                     the target's, with ``spectrain`` and, where the target is quantised, the head's
                                    modules among those that are not
    tuned-mtp.safetensors           the head
    model.safetensors.index.json    every tensor's file
    model-00001-of-….safetensors    links to the target's shards, and to its tokenizer and settings

vLLM reads whole files in the natural order of their names, so a shard that still holds the old head is read first and
the tuned one wins; a shard of nothing but the old head is left out. Scales of a head that was quantised fit no
unquantised module, so a shard that holds them is written again without. Of every file that is linked the size and the
digest are recorded: that nothing else of the target has changed can be proved.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spectrain.drafters.drafter_digests import TUNED_HEAD
from spectrain.errors import InputError
from spectrain.files import file_digest
from spectrain.reading import read_json
from spectrain.target.checkpoint import INDEX_FILE, SINGLE_FILE, CheckpointReader

SECTION = "overlay"  # of ``spectrain`` in config.json
_SINGLE_LINK = (
    "model-00001-of-00001.safetensors"  # a folder with both model.safetensors and an index is read in two ways
)
_CONFIG = "config.json"
_BLOB = re.compile("[0-9a-f]{64}")  # the Hub's cache calls a large file by its sha256
_NEVER_LINKED = (".git", ".gitattributes", ".cache", "README.md")


@dataclass(frozen=True)
class Overlay:
    """``source``: the target's folder. ``changed``: the tensors of the head by their names in the checkpoint;
    ``stale``: names that the checkpoint has and the overlay must not (scales of what was quantised).
    """

    source: Path
    changed: Mapping[str, Tensor]
    stale: frozenset[str] = frozenset()

    def write(self, into: Path) -> dict[str, Any]:
        """Write all but config.json; returns what config.json records of it. ``into``: a folder beside the final one.

        The weights themselves, ``TUNED_HEAD``, are there already.
        """
        reader = CheckpointReader(self.source)
        files: dict[Path, set[str]] = {}
        for name, path in reader.located():
            files.setdefault(path, set()).add(name)
        weight_map = dict.fromkeys(self.changed, TUNED_HEAD)
        recorded: dict[str, Any] = {}
        before = recorded_files(self.source)
        for path, names in sorted(files.items()):
            kept = names - set(self.changed) - self.stale
            if not kept:
                continue
            name = _link_name(path.name)
            if names & self.stale:
                _write_kept(path, kept, into / name)
            else:
                _link(path, into / name)
            recorded[name] = _described_as(path, before) | (
                {"without": sorted(names - kept)} if names & self.stale else {}
            )
            weight_map |= dict.fromkeys(kept, name)
        for path in sorted(self.source.iterdir()):
            if _goes_along(path, files):
                _link(path, into / path.name)
                recorded[path.name] = _described_as(path, before)
        size = sum(tensor.nbytes for tensor in self.changed.values())
        index = {"metadata": {"tuned_bytes": size}, "weight_map": dict(sorted(weight_map.items()))}
        (into / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return {"tensors": sorted(self.changed), "files": recorded}


def _goes_along(path: Path, weights: Iterable[Path]) -> bool:
    """Tokenizer, generation settings, code: what a server reads beside the weights."""
    if path.name in (_CONFIG, INDEX_FILE, TUNED_HEAD, *_NEVER_LINKED) or not path.is_file():
        return False
    return path not in weights and path.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def _link_name(name: str) -> str:
    if name == SINGLE_FILE:
        return _SINGLE_LINK
    # Behind the tuned shard in the natural order, it would bring the old head back.
    return name if name < TUNED_HEAD else f"linked-{name}"


def _link(path: Path, link: Path) -> None:
    """Relative, so that a tree with target and run can be moved; the Hub's cache is somewhere else anyway."""
    real = Path(os.path.realpath(path))
    link.symlink_to(os.path.relpath(real, os.path.realpath(link.parent)))


def described(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file; of one in the Hub's cache its name is the digest."""
    real = Path(os.path.realpath(path))
    digest = real.name if _BLOB.fullmatch(real.name) else file_digest(real)
    return {"bytes": real.stat().st_size, "sha256": digest}


def _described_as(path: Path, before: Mapping[str, Any]) -> dict[str, Any]:
    """``described``, with the name that the file has in its target. ``before``: what the overlay says of its files that
    this one is made from.
    """
    return {"name": before.get(path.name, {}).get("name", path.name), **described(path)}


def _write_kept(path: Path, names: set[str], into: Path) -> None:
    with safe_open(path, framework="pt") as file:
        save_file({name: file.get_tensor(name) for name in sorted(names)}, into, metadata={"format": "pt"})


def target_config(folder: Path) -> dict[str, Any]:
    """config.json of the target as it is, without what an overlay adds."""
    return {name: value for name, value in read_json(folder / _CONFIG).items() if name != "spectrain"}


def recorded_files(folder: Path) -> dict[str, Any]:
    """What config.json of an overlay says of the target's files; empty for other folders."""
    section = read_json(folder / _CONFIG).get("spectrain")
    overlay = section.get(SECTION) if isinstance(section, dict) else None
    return dict(overlay.get("files") or {}) if isinstance(overlay, dict) else {}


def is_overlay(folder: Path) -> bool:
    return (folder / TUNED_HEAD).is_file()


def restore_links(folder: Path, source: Path) -> None:
    """Link what is missing of the target's files again, out of ``source``: after a move, or for a folder that names
    its target on the Hub alone. Whether they are the right ones, ``check_links`` says.
    """
    for name, wanted in recorded_files(folder).items():
        found = source / str(wanted.get("name", name))
        if not (folder / name).exists() and "without" not in wanted and found.is_file():
            (folder / name).unlink(missing_ok=True)
            _link(found, folder / name)


def check_links(folder: Path, digests: bool = False) -> None:
    """InputError if a file of the target is missing, or is not the one that was linked: by its size and, if
    ``digests``, by its content.
    """
    for name, wanted in recorded_files(folder).items():
        path = folder / name
        if not path.exists():
            raise InputError(
                f"{path} links to a file of the target that is not there: bring the target back to where it was, or "
                f"name it with target.path"
            )
        if "without" in wanted or not path.is_symlink():
            continue  # written here, and read with what is said of the weights
        found = path.stat().st_size
        if found != wanted["bytes"] or (digests and described(path)["sha256"] != wanted["sha256"]):
            raise InputError(
                f"{path}: the target's file is not the one that the head was tuned for ({found:,} bytes, "
                f"{wanted['bytes']:,} when it was linked): bring the old one back, or tune the head again"
            )


def stitch(folder: Path) -> None:
    """Turn links into files, without the old head: a whole checkpoint that can be moved anywhere.

    Costs the target's size on disk. A shard that still holds the old head is written without it.
    """
    weight_map = read_json(folder / INDEX_FILE)["weight_map"]
    for path in sorted(folder.iterdir()):
        if not path.is_symlink():
            continue
        whole = path.with_name(path.name + ".part")
        names = {name for name, file in weight_map.items() if file == path.name}
        if names:
            _write_kept(path, names, whole)
        else:
            shutil.copyfile(path, whole)
        os.replace(whole, path)
