"""What must not leave this machine is found, wherever in a folder it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from markupsafe import escape
from safetensors.torch import save_file

from spectrain.errors import RunError
from spectrain.hub.published_folder import public_config, refuse_private

PLACE = {"/home/me/runs/mine": "a path of this machine", "hf_secret": "a secret"}
PROMPT = 'Tell me, please, what the "river" said.'
CONFIG = {
    "speculators_config": {"verifier": {"name_or_path": "/home/me/target", "architectures": ["A"]}},
    "spectrain": {"coverage": 0.5, "host": "mine", "target_revision": "abc", "digests": {"config.json": "old"}},
}


@pytest.fixture
def folder(tmp_path: Path):
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "README.md").write_text("a card of the river\n")
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "record.json").write_text("{}")
    return tmp_path


def test_a_folder_with_nothing_private_passes(folder: Path):
    refuse_private(folder, PLACE, ["river", PROMPT])


def test_the_end_of_an_address_is_no_path(folder: Path):
    (folder / "README.md").write_text("https://hub/work and /work-flows and a/work, ./work")
    refuse_private(folder, {"/work": "a path of this machine"})


@pytest.mark.parametrize("file", ["README.md", "eval/record.json"])
@pytest.mark.parametrize("text", [*PLACE, PROMPT, json.dumps(PROMPT), str(escape(PROMPT))])
def test_a_text_is_found_wherever_it_is(folder: Path, file: str, text: str):
    (folder / file).write_text(f"before {text} after")
    with pytest.raises(RunError, match="nothing was uploaded"):
        refuse_private(folder, PLACE, [PROMPT])


def test_the_header_of_weights_is_searched_too(folder: Path):
    save_file({"x": torch.zeros(2)}, folder / "model.safetensors", metadata={"from": "/home/me/runs/mine"})
    with pytest.raises(RunError, match=r"model.safetensors .*a path of this machine"):
        refuse_private(folder, PLACE)


def test_kinds_of_files_that_nobody_looks_into_stay_here(folder: Path):
    (folder / "state.bin").write_bytes(b"x")
    with pytest.raises(RunError, match=r"state\.bin"):
        refuse_private(folder, {})


def test_the_configuration_names_the_target_by_its_id_and_drops_what_is_not_for_others(folder: Path):
    public = public_config(CONFIG, "org/target", folder)
    assert public["speculators_config"]["verifier"] == {"name_or_path": "org/target", "architectures": ["A"]}
    assert set(public["spectrain"]) == {"coverage", "target_revision", "digests"}
    assert public["spectrain"]["digests"]["config.json"] != "old"


@pytest.mark.parametrize("path", ["/somewhere", "~/x", "C:\\models", "file:///x"])
def test_a_path_in_any_field_is_an_error_that_names_it(folder: Path, path: str):
    with pytest.raises(RunError, match=r"a\.b\[1\]"):
        public_config({**CONFIG, "a": {"b": ["fine/relative", path]}}, "org/target", folder)
