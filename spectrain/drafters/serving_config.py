"""What a server has to be told of a drafter: read from the ``config.json`` of a folder or of a Hub repository, without
its weights.

vLLM guesses the method of a drafter from its path where it is not told, so a run directory's name could change it; here
it always comes from the drafter's own configuration.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.drafters.drafter_digests import CONFIG, WEIGHTS, weight_files
from spectrain.drafters.field_checks import whole
from spectrain.drafters.foreign_checkpoints import standard_config
from spectrain.drafters.registry import known_method
from spectrain.errors import ConfigError, InputError
from spectrain.files import digest_strings, file_digest
from spectrain.reading import read_json
from spectrain.target.identity import TargetIdentity, described

_ASK_S = 10.0
# What in a path makes vLLM take a drafter for one of another kind, where it is told none.
_TAKEN_FOR_OTHERS = ("eagle-", "eagle3", "dflash", "dspark")


@dataclass(frozen=True)
class ServingConfig:
    """A drafter as a server sees it.

    path: the folder, or the Hub id. revision: commit of a Hub repository. method: as in the configuration (eagle3,
    dflash, …). num_speculative_tokens: the number of drafts it asks for. most_tokens: more than so many it cannot
    draft; None: no limit. target, target_revision: what it was trained for, where that is known; target_fingerprint,
    target_tokenizer: more of it, which drafters of this project know. vocab_size, hidden_size, last_tap: of that
    target; last_tap is the deepest layer whose output is read.
    """

    path: str
    revision: str | None
    method: str
    num_speculative_tokens: int
    most_tokens: int | None
    target: str | None
    target_revision: str | None
    vocab_size: int
    hidden_size: int
    last_tap: int | None
    max_model_len: int | None = None  # the server's, where the target computes otherwise with another
    target_fingerprint: str | None = None
    target_tokenizer: str | None = None

    @property
    def drafts_step_by_step(self) -> bool:
        """Whether a shorter round is the beginning of a longer one, and costs its share of it."""
        method = known_method(self.method)
        return method is not None and method.drafts_step_by_step

    @property
    def known_to_vllm(self) -> bool:
        """Whether vLLM has such a kind of drafter. What this version knows nothing of is vLLM's business alone."""
        method = known_method(self.method)
        return method is None or method.speculative_config is not None

    def speculative_config(self, num_speculative_tokens: int | None = None) -> dict[str, Any]:
        """vLLM's ``speculative_config`` with this drafter. None: the number of drafts that it asks for.

        Raises ConfigError for a kind of drafter that vLLM does not have.
        """
        method = known_method(self.method)
        if not self.known_to_vllm:
            raise ConfigError(f"drafter {self.path}: vLLM has no {self.method} drafters, use engine=hf")
        told = {"method": self.method} if method is None else dict(method.speculative_config or {})
        taken = next((word for word in _TAKEN_FOR_OTHERS if word in self.path.lower()), None)
        if taken is not None and "method" not in told:
            raise ConfigError(
                f"drafter {self.path}: vLLM takes a folder with {taken!r} in its path for another kind of drafter: "
                f"move the run directory"
            )
        config: dict[str, Any] = told if self.replaces_target else {"model": self.path, **told}
        if self.revision is not None:
            config["revision"] = self.revision
        return config | {"num_speculative_tokens": num_speculative_tokens or self.num_speculative_tokens}

    @property
    def replaces_target(self) -> bool:
        """Whether the drafter's folder is the target's with a tuned head, and served in its place."""
        method = known_method(self.method)
        return method is not None and method.serves_as_target

    def engine_args(self, num_speculative_tokens: int | None = None) -> dict[str, Any]:
        """vLLM's engine arguments that this drafter asks for."""
        model = {"model": self.path} if self.replaces_target else {}
        return {**model, "speculative_config": self.speculative_config(num_speculative_tokens)}

    def belongs_to(self, target: TargetIdentity) -> bool | None:
        """Whether it was trained for ``target``, by the weights' revision, or by its name where its writer recorded no
        revision. None: that cannot be told.
        """
        if self.target_revision is None:
            return self.target is None or _last(self.target) in (_last(target.name), _last(target.id)) or None
        if target.has_revision(self.target_revision):
            return True
        if self.target_fingerprint is not None and target.fingerprints:
            return target.has_revision(self.target_fingerprint)
        comparable = len(self.target_revision) == len(target.revision)  # two commits, or two digests
        return False if comparable else None

    def other_target(self, target: TargetIdentity) -> str | None:
        """A sentence where it was trained for another target than this one, or may have been; None where it was not.
        Shapes are not looked at: where they differ it cannot work, which is an error.
        """
        trained = f"drafter {self.path} was trained for {described(self.target or 'a target', self.target_revision)}"
        belongs = self.belongs_to(target)
        if belongs is False:
            return f"{trained}, this target is another, {target}: what was measured with its own says nothing here"
        if belongs is None:
            return f"{trained}; whether this target, {target}, is the same cannot be told"
        if self.target_tokenizer and target.tokenizer and not target.tokenizer.startswith(self.target_tokenizer):
            return f"{trained}, but with another tokenizer or chat template: it will see other text"
        return None


def _last(name: str) -> str:
    """The part of a path or a Hub id that people go by."""
    return name.rstrip("/").rpartition("/")[2].lower()


def read_serving_config(path: str, revision: str | None = None) -> ServingConfig:
    """Read the configuration of a drafter, in any layout that ``foreign_checkpoints.py`` knows. vLLM reads them all as
    they are.

    path: a folder, or a Hub id; of that only ``config.json`` is fetched, from the Hub's cache where it is there.
    revision: of a Hub id; None: its default branch.

    Raises InputError if there is no drafter, or if its configuration lacks what a server needs.
    """
    folder = Path(path).expanduser()
    if os.path.isdir(folder):  # unlike Path.is_dir, False for names that no folder can have
        return _from_config(_read(folder / CONFIG), str(folder.resolve()), None, str(folder / CONFIG))
    file = fetch_config_file(path, revision)
    return _from_config(_read(file), path, file.parent.name, f"{CONFIG} of {path}")


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(
            f"{file.parent} holds no drafter ({CONFIG} is missing): name a folder that fit has written, or a Hub id"
        )
    return read_json(file)


def fetch_config_file(repo: str, revision: str | None = None) -> Path:
    """``config.json`` of a Hub repository, in the Hub's cache: in the folder of its commit. Raises InputError."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        try:
            return Path(hf_hub_download(repo, CONFIG, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            HfApi().model_info(repo, revision=revision, timeout=_ASK_S)  # unlike the download, it tries once
            # By the name that was given, so that the cache knows it the next time.
            return Path(hf_hub_download(repo, CONFIG, revision=revision))
    except HFValidationError:
        raise InputError(f"drafter.path={repo} is no folder, and no name that the Hub could have: correct it") from None
    except Exception as error:  # network, disk and Hub errors of many types
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"drafter.path={repo} is no folder here, and the Hub gives no {CONFIG} of it ({reason}): correct it"
        ) from error


def _from_config(config: dict[str, Any], path: str, revision: str | None, where: str) -> ServingConfig:
    config = standard_config(config, where)
    if not isinstance(config.get("speculators_config"), dict):
        raise InputError(
            f"{where} is not in the speculators layout (it has no speculators_config): only such drafters are served"
        )
    try:
        speculation, layer = config["speculators_config"], config["transformer_layer_config"]
        verifier, method = speculation["verifier"], config["speculators_model_type"]
        known = known_method(method)
        taps = [] if known is None else config.get(known.taps_field) or []
        drafts = speculation["proposal_methods"][0]["speculative_tokens"]
        metadata = config.get("spectrain") or {}
        length = metadata.get("max_model_len")
        return ServingConfig(
            path=path,
            revision=revision,
            method=method,
            num_speculative_tokens=whole(drafts, "speculative_tokens"),
            most_tokens=None if known is None else known.read_max_drafts(config),
            target=_name(verifier["name_or_path"], "verifier.name_or_path"),
            target_revision=_name(metadata.get("target_revision"), "spectrain.target_revision"),
            vocab_size=whole(layer["vocab_size"], "vocab_size"),
            hidden_size=whole(config.get("target_hidden_size") or layer["hidden_size"], "hidden_size"),
            last_tap=max((whole(tap, "a layer that is read", least=0) for tap in taps), default=None),
            max_model_len=None if length is None else whole(length, "spectrain.max_model_len"),
            target_fingerprint=_name(metadata.get("target_fingerprint"), "spectrain.target_fingerprint"),
            target_tokenizer=_name(metadata.get("target_tokenizer"), "spectrain.target_tokenizer"),
        )
    except KeyError as error:
        raise InputError(f"{where}: field {error} is missing: write the drafter again") from None
    except (TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise InputError(f"{where} describes no drafter ({error}): write the drafter again") from None


def _name(value: Any, field: str) -> str | None:
    """A name that may be shown and put on a command line. Raises ValueError for what cannot be one."""
    if value is None or value == "":
        return None
    if not isinstance(value, str) or not value.isprintable() or value.startswith("-"):
        raise ValueError(f"{field} is {value!r}, it must be a name that does not begin with a dash")
    return value


def drafter_digest(folder: Path) -> str:
    """Of everything a server loads from a drafter's folder: binds what was measured to exactly this drafter."""
    weights = weight_files(folder) or [folder / WEIGHTS]
    return digest_strings([file_digest(path) for path in (folder / CONFIG, *weights)])
