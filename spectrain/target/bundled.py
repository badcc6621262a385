"""A target out of an installed Python package: its GGUF, converted once into a safetensors folder in the user's cache.

This is how a small target works without network beyond package installation. The package is located, never imported.
Conversion of a 135 M parameter model takes half a minute and four bytes a parameter on disk; the folder appears under
its final name only when it is whole, so a kill or a second process at the same moment leaves no half-written target.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from spectrain.console import quiet_transformers, say
from spectrain.errors import ConfigError, InputError
from spectrain.files import writing

# Part of the folder's name: raise it when conversion starts to write something else.
_CONVERSION = 1
_PACKAGE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_][A-Za-z0-9_-]*)*")


def find_gguf(package: str) -> Path | None:
    """The one GGUF in an installed package, None if the package is not installed; nothing is imported.

    Raises ConfigError for what cannot be a package's name, InputError if it has no GGUF, or several.
    """
    folders = _package_folders(package)
    if folders is None:
        return None
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        raise InputError(
            f"target.bundled_package={package} holds {len(files)} GGUF files, one is expected: reinstall it, or name "
            f"another package"
        )
    return files[0]


def _package_folders(package: str) -> list[str] | None:
    """Folders of a package, which may lie in another one (``a.b``); None if it is not installed.

    ``importlib.util.find_spec("a.b")`` would import ``a``, that is, run code of a package that is only named.
    """
    if not _PACKAGE.fullmatch(package):
        raise ConfigError(f"target.bundled_package={package} is no name of a package: correct it")
    name, *inner = package.replace("-", "_").split(".")
    found = importlib.util.find_spec(name)
    for part in inner:
        folders = [] if found is None else list(found.submodule_search_locations or ())
        name = f"{name}.{part}"
        specs = (finder.find_spec(name, folders) for finder in sys.meta_path if folders)
        found = next((spec for spec in specs if spec is not None), None)
    return None if found is None else list(found.submodule_search_locations or ())


def gguf_digest(gguf: Path) -> str:
    """SHA-256 of the file, hexadecimal."""
    with gguf.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converted_folder(name: str, digest: str) -> Path:
    """Where the conversion of a GGUF with this digest lies, or will lie."""
    plain_name = re.sub(r"[/\\]|^\.+", "_", name)  # it is the user's, the folder is ours
    return user_cache() / "targets" / f"{plain_name}-{digest[:12]}-{_CONVERSION}"


def converted_from(folder: Path) -> str | None:
    """The first 12 digits of the digest of the GGUF that ``folder`` was converted from, by its name; None if it was
    not.
    """
    found = re.search(rf"-([0-9a-f]{{12}})-{_CONVERSION}$", folder.name)
    return found[1] if found is not None and folder.parent == (user_cache() / "targets").resolve() else None


def convert_once(gguf: Path, folder: Path) -> Path:
    """Converts ``gguf`` into ``folder`` unless that has been done; returns ``folder``."""

    def convert(destination: Path) -> None:
        say(f"converting {gguf.name} into {folder} (once; about half a minute)")
        convert_gguf(gguf, destination)

    return install_once(folder, convert)


def convert_gguf(gguf: Path, destination: Path) -> None:
    """Writes config, tokenizer (with chat template) and float32 safetensors of ``gguf`` into the folder
    ``destination``.

    Float32, because the file's 4-bit blocks are scaled in 16-bit floats: nothing is rounded a second time.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        # The bar of the dequantisation heeds no setting of transformers.
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent),
                gguf_file=gguf.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
            )
            size_bytes = sum(parameter.nbytes for parameter in model.parameters())
            with writing(destination, "the converted target", size_bytes):
                model.save_pretrained(destination)
                tokenizer.save_pretrained(destination)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise InputError(
            f"{gguf} cannot be converted ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        ) from error


def install_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Makes ``folder`` appear with what ``build(temporary folder)`` writes, whole or not at all, once among all
    processes.

    The lock only spares a second process the work and lets it clear away what a killed one left; wholeness rests on the
    rename alone.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}."
    with FileLock(folder.parent / f"{prefix}lock"):
        if folder.is_dir():
            return folder
        for leftover in folder.parent.glob(f"{prefix}*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=prefix, suffix=".partial"))
        try:
            build(partial)
            partial.chmod(0o755)  # mkdtemp makes it private
            _rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _rename(partial: Path, folder: Path) -> None:
    try:
        os.rename(partial, folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, on a file system whose locks do nothing
            raise


def user_cache() -> Path:
    """The platform's folder for data that can be made again, below it ours."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "spectrain"
