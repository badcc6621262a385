"""The order of the packages, and what keeps a newcomer from getting lost: one name a module, files of a readable
length, help for every key.

docs/architecture.md says why the order is what it is.
"""

from __future__ import annotations

import ast
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import get_args

import pytest

from spectrain.config.help_text import help_of
from spectrain.config.overrides import all_keys, sections

PACKAGE = Path(__file__).parents[2] / "spectrain"
# An import may only point to the left.
ORDER = (
    *("errors", "masking", "files", "reading", "processes", "signals", "console", "copies", "config", "target", "data"),
    *("decoding", "drafters", "engines", "training", "evaluation", "hub", "stages", "cli"),
)
LONGEST = 400
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def package_of(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def imported(path: Path) -> set[tuple[str, ...]]:
    """Parts of every module of ours that a module imports, at the top or inside a function."""
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "spectrain":
            parts = tuple(node.module.split(".")[1:])
            found |= {parts} if parts else {(alias.name,) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {tuple(a.name.split(".")[1:]) for a in node.names if a.name.startswith("spectrain.")}
    return found


def test_every_package_has_its_place_in_the_order():
    assert {package_of(path.parts) for path in MODULES} - {"__init__", "__main__"} <= set(ORDER)


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.parts[0] not in ("__init__.py", "__main__.py")], ids=str
)
def test_imports_point_to_the_left(path):
    own = package_of(path.parts)
    allowed = {*takewhile(lambda name: name != own, ORDER), own}
    assert {package_of(parts) for parts in imported(path)} <= allowed


def test_no_module_name_stands_for_two_things():
    names = Counter(path.stem for path in MODULES if path.stem not in ("__init__", "__main__"))
    assert [name for name, count in names.items() if count > 1] == []
    packages = {path.name for path in PACKAGE.rglob("*") if (path / "__init__.py").is_file()}
    assert packages & set(names) == set()


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_can_be_read_in_one_sitting(path):
    assert len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) <= LONGEST


@pytest.mark.parametrize("key", [key for key in all_keys() if key not in sections()])
def test_every_key_has_help(key):
    """A sentence that says more than the key itself."""
    assert len(help_of(key).split()) >= 3
    assert help_of(key).strip(" .") == help_of(key)
    if type(None) in get_args(all_keys()[key]):
        assert "null" in help_of(key)


NUMBERS = [key for key, kind in all_keys().items() if {int, float} & {kind, *get_args(kind)}]


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_a_bound_above(key):
    """What lies beyond is a slip, and would be met after hours, or by allocating without end."""
    section, _, name = key.rpartition(".")
    assert {"at_most", "below"} & sections()[section].__dataclass_fields__[name].metadata.keys()


@pytest.mark.parametrize("section", sections())
def test_every_section_says_what_it_is_for(section):
    assert sections()[section].__doc__
    assert not sections()[section].__doc__.startswith(sections()[section].__name__)  # as dataclasses write it
