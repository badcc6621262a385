"""What may leave this machine: a drafter's ``config.json`` without anything of the place where it was trained, and a
search of everything that is to be uploaded for paths, tokens and prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from markupsafe import escape

from spectrain.drafters.drafter_digests import CONFIG, INDEX, weight_files, with_digests
from spectrain.drafters.overlay import recorded_files
from spectrain.errors import RunError

# Of ``spectrain`` in config.json: what a reader needs, and nothing that a later version may add without thinking of it.
_PUBLIC = (
    *("ttt_steps", "confidence_temperatures", "max_model_len", "coverage", "step", "simulated_acceptance_length"),
    *("target_revision", "target_fingerprint", "target_tokenizer"),
    *("target_architectures", "num_speculative_tokens", "overlay"),  # of folders in another layout than speculators'
)
_ABSOLUTE = re.compile(r"(?:/|~|[A-Za-z]:[\\/]|\\\\|file:)")
_TEXTS = {".json", ".md", ".html", ".svg", ".txt", ".yaml"}
_SHORTEST_PROMPT = 24  # characters: shorter ones are words that a card may have by itself


def public_config(config: Mapping[str, Any], base_model: str, folder: Path) -> dict[str, Any]:
    """``config.json`` with the target by its name on the Hub, and digests of what is published; the weights lie in
    ``folder``.

    A drafter names its target in the speculators layout, a target with a tuned head under ``spectrain.drafter``, an
    assistant in transformers' layout as ``spectrain.target``.

    Raises RunError naming a field that still holds a path of this machine.
    """
    section = config.get("spectrain") or {}
    own = {name: value for name, value in section.items() if name in _PUBLIC}
    if "drafter" in section:
        own["drafter"] = _for_target(section["drafter"], base_model)
    elif "target" in section:
        own["target"] = base_model
    public = {**_for_target(config, base_model), "spectrain": own}
    for field, text in _texts(public):
        if _ABSOLUTE.match(text):
            raise RunError(f"{CONFIG}: {field} is {text}, a path of this machine, which is not published: remove it")
    return with_digests(public, folder)


def _for_target(config: Mapping[str, Any], base_model: str) -> dict[str, Any]:
    """With another name for the target, where there is one."""
    speculation = config.get("speculators_config")
    if speculation is None:
        return dict(config)
    verifier = {**speculation["verifier"], "name_or_path": base_model}
    return {**config, "speculators_config": {**speculation, "verifier": verifier}}


def published_files(folder: Path) -> list[Path]:
    """What goes up beside ``config.json``: the weights. Of a target with a tuned head that is the head, the index, and
    what was written anew of the target's shards; the target's own files are linked again where it is served.
    """
    again = [folder / name for name, entry in recorded_files(folder).items() if "without" in entry]
    return [*weight_files(folder), *([folder / INDEX] if (folder / INDEX).is_file() else []), *again]


def write_config(config: Mapping[str, Any], folder: Path) -> None:
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _texts(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _texts(entry, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _texts(entry, f"{field}[{index}]")
    elif isinstance(value, str):
        yield field, value


def refuse_private(folder: Path, private: Mapping[str, str], prompts: Iterable[str] = ()) -> None:
    """Raise RunError if a file of ``folder`` has one of the texts ``private`` (text -> what it is), or one of these
    prompts. Of weights their header is searched, which is all the text they have.
    """
    contents = {path.relative_to(folder): _content(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    for name, content in contents.items():
        for text, what in private.items():
            if text and _holds(content, text):
                raise RunError(f"{name} would have been published with {what} in it: nothing was uploaded")
    everything = "\n".join(contents.values())
    for prompt in prompts:
        text = prompt.strip()
        # As it is, as JSON writes it, and as HTML does.
        forms = {text, json.dumps(text)[1:-1], str(escape(text))}
        if len(text) >= _SHORTEST_PROMPT and any(form in everything for form in forms):
            where = next(str(name) for name, content in contents.items() if any(form in content for form in forms))
            raise RunError(f"{where} would have been published with a prompt in it: nothing was uploaded")


def _holds(content: str, text: str) -> bool:
    """Whether a text is in there; a path only where it begins, not as the end of an address or of a longer one."""
    if not text.startswith("/"):
        return text in content
    return re.search(rf"(?<![\w.:/-]){re.escape(text)}(?![\w-])", content) is not None


def _content(path: Path) -> str:
    if path.name.endswith(".safetensors"):
        with path.open("rb") as file:
            return file.read(int.from_bytes(file.read(8), "little")).decode(errors="replace")
    if path.suffix not in _TEXTS:
        raise RunError(f"{path.name} is of a kind that publish does not upload")
    return path.read_text(encoding="utf-8")
