"""Digests in a drafter's folder, by which damage is found before the drafter is trained on, measured or served.

They are under ``spectrain`` in ``config.json``, so they go where the folder goes: one of the weights file, one of all
else that ``config.json`` says. Weights change by damage alone, so others than those that were written are refused. A
configuration may have been edited on purpose, which nobody but the user can tell: it is said. Folders that others wrote
have no digests, and pass.

Cost: one reading of the weights in a process, about a second a GB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spectrain.console import say
from spectrain.errors import InputError
from spectrain.files import file_digest, with_digest
from spectrain.reading import read_json

WEIGHTS, CONFIG = "model.safetensors", "config.json"
INDEX = "model.safetensors.index.json"  # of weights in several files
TUNED_HEAD = "tuned-mtp.safetensors"  # in a folder that is the target's own with other weights for its head
_SECTION, _DIGESTS = "spectrain", "digests"


def weight_files(folder: Path) -> list[Path]:
    """The files with a drafter's weights: one, or those that the index names; of a target with a tuned head the head's
    alone. Empty where there are none.

    Raises InputError for an index that names a file that is not there, or none of this folder.
    """
    if (folder / TUNED_HEAD).is_file():
        return [folder / TUNED_HEAD]
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else []
    named = read_json(folder / INDEX).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise InputError(f"{folder / INDEX}: weight_map is missing, so nothing says which files hold the weights")
    names = sorted({str(name) for name in named.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise InputError(f"{folder / INDEX} names {name}, which is not in that folder: fetch the drafter again")
    return [folder / name for name in names]


def with_digests(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A drafter's configuration with the digests of itself and of the weights that lie in ``folder``."""
    digests = {path.name: file_digest(path) for path in weight_files(folder)} | {CONFIG: _config_digest(config)}
    return {**config, _SECTION: {**config.get(_SECTION, {}), _DIGESTS: digests}}


def check_weights(folder: Path) -> None:
    """Raise InputError if the weights in a folder are not those that were written there. Where there are none, or no
    digest of them, others will say so.
    """
    for path in weight_files(folder):
        wanted = _digests(folder).get(path.name)
        if wanted is not None and file_digest(path) != wanted:
            raise InputError(
                f"{path} has changed since it was written, its digest differs: bring back a copy, or train the drafter "
                f"again"
            )


def check_drafter_digests(folder: Path) -> None:
    """``check_weights`` and ``note_changes``."""
    check_weights(folder)
    note_changes(folder)


def note_changes(folder: Path) -> None:
    """Tell the user if the configuration is not the one that was written."""
    if config_changed(folder):
        say(
            f"note: {folder / CONFIG} has changed since the drafter was written: if the change is not yours, it is "
            f"damaged"
        )


def config_changed(folder: Path) -> bool:
    """Whether the configuration is not the one that was written."""
    wanted = _digests(folder).get(CONFIG)
    return wanted is not None and _config_digest(_read(folder)) != wanted


def _config_digest(config: Mapping[str, Any]) -> str:
    section = {name: value for name, value in config.get(_SECTION, {}).items() if name != _DIGESTS}
    return str(with_digest({**config, _SECTION: section})["digest"])


def _digests(folder: Path) -> dict[str, Any]:
    section = _read(folder).get(_SECTION)
    digests = section.get(_DIGESTS) if isinstance(section, dict) else None
    return digests if isinstance(digests, dict) else {}


def _read(folder: Path) -> dict[str, Any]:
    """Empty where it cannot be read: readers of what it says tell why."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
