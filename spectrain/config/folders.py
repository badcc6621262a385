"""Where configuration, recipes, prompts and suites are found.

Four folders belong to the user: ``conf`` (shared groups), ``data_gen`` (prompts and the group ``data``), ``recipes``
and ``eval``. They ship with spectrain, beside the package in a checkout and inside it (``spectrain/_share``) in a
wheel. Folders of the same name beside the working directory are looked at first, so one can add a recipe, or replace
one, without touching the installation.
"""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("conf", "data_gen", "recipes", "eval")
GROUP_FOLDERS = {
    "recipe": "recipes",
    "target": "conf",
    "data": "data_gen",
    "engine": "conf",
    "states": "conf",
    "drafter": "conf",
    "trainer": "conf",
    "strategy": "conf",
    "suite": "eval",
    "logger": "conf",
    "method": "recipes",
    "hardware": "recipes",
    "launcher": "conf",
}
_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_folder(name: str) -> Path | None:
    """The folder ``name`` that came with spectrain, or None if the installation lacks it."""
    # The wheel's copy first: beside a package in site-packages, anybody's folder `conf` may lie.
    for base in (_PACKAGE / "_share", _PACKAGE.parent):
        if (base / name).is_dir():
            return base / name
    return None


def folders(name: str, working_dir: Path | None = None) -> list[Path]:
    """All folders called ``name``: the user's, then the shipped one; each once."""
    found: list[Path] = []
    for candidate in ((working_dir or Path.cwd()) / name, shipped_folder(name)):
        if (
            candidate is not None
            and candidate.is_dir()
            and candidate.resolve() not in [folder.resolve() for folder in found]
        ):
            found.append(candidate)
    return found


def search_roots(working_dir: Path | None = None) -> list[Path]:
    """Roots of Hydra's search path, first match wins: every folder of the user before every shipped one."""
    working_dir = working_dir or Path.cwd()
    users = [working_dir / name for name in FOLDERS if (working_dir / name).is_dir()]
    known = [folder.resolve() for folder in users]
    shipped = [
        folder for folder in map(shipped_folder, FOLDERS) if folder is not None and folder.resolve() not in known
    ]
    return users + shipped


def group_options(group: str, working_dir: Path | None = None) -> dict[str, Path]:
    """The options of a configuration group and the file behind each, the user's own first."""
    options: dict[str, Path] = {}
    for root in folders(GROUP_FOLDERS[group], working_dir):
        for file in sorted((root / group).glob("*.yaml")):
            options.setdefault(file.stem, file)
    return options


def prompt_roots(working_dir: Path | None = None) -> list[Path]:
    """Folders in which a relative prompt file is looked up, in this order."""
    return [working_dir or Path.cwd(), *(folder / "prompts" for folder in folders("data_gen", working_dir))]
