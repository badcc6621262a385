"""A drafter on the Hub as a folder of this machine: ``drafter.path=ORG/NAME``, with ``@REVISION`` or drafter.revision.

What is in the Hub's cache is used without asking the network, so that a repeated run sees the same weights; name
another revision to move on. Of a repository only ``config.json`` and safetensors are fetched.
"""

from __future__ import annotations

import os
from pathlib import Path

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.console import say
from spectrain.drafters.drafter_digests import CONFIG, INDEX, weight_files
from spectrain.drafters.serving_config import fetch_config_file
from spectrain.errors import ConfigError, InputError

_FILES = (CONFIG, INDEX, "*.safetensors")


def drafter_path(config: DrafterConfig) -> Path:
    """The folder of ``drafter.path``; a drafter that only the Hub has is brought here.

    Raises ConfigError where no drafter is named, InputError where it is neither a folder nor on the Hub.
    """
    if config.path is None:
        raise ConfigError("drafter.path names no drafter: give a folder or a Hub id")
    folder = Path(config.path).expanduser()
    # A name that no Hub id can have is a folder that is not here, which whoever reads it says.
    return folder if os.path.exists(folder) or not is_hub_id(config.path) else _snapshot(config.path, config.revision)


def drafter_name(config: DrafterConfig) -> str:
    """What a record calls the drafter of ``drafter.path``: the folder, or Hub id and commit."""
    folder = drafter_path(config)
    return str(folder) if str(folder) == str(Path(config.path or "").expanduser()) else f"{config.path}@{folder.name}"


def is_hub_id(path: str) -> bool:
    """Whether the Hub could have a drafter of this name. One word alone is a folder: drafters have owners."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return path.count("/") == 1 and not path.startswith((".", "~", "/"))


def _snapshot(repo: str, revision: str | None) -> Path:
    """The drafter's files in the Hub's cache."""
    from huggingface_hub import snapshot_download

    folder = fetch_config_file(repo, revision).parent
    try:
        if weight_files(folder):
            return folder
    except InputError:  # an index whose files are not all here yet
        pass
    say(f"drafter {repo}: downloading it at {folder.name[:12]} from the Hub")
    try:
        return Path(snapshot_download(repo, revision=folder.name, allow_patterns=[*_FILES]))
    except Exception as error:  # network, disk and Hub errors of many types
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"drafter.path={repo}: the download broke off ({reason}): run again, done files are kept"
        ) from error
