"""What goes into files: values that JSON has; and the order in which a file reaches the disk."""

import json
import math
import os

import pytest

from spectrain.files import finite_or_none, plain, write_atomically


def test_plain_values_are_what_json_has():
    written = plain({"a": (1, [math.nan, {"b": math.inf}]), "c": "text", "d": True, "e": None, "f": 0.5})
    assert written == {"a": [1, [None, {"b": None}]], "c": "text", "d": True, "e": None, "f": 0.5}
    assert json.loads(json.dumps(written, allow_nan=False)) == written


def test_a_figure_is_finite_or_none():
    assert (finite_or_none(0.5), finite_or_none(math.nan), finite_or_none(-math.inf)) == (0.5, None, None)


def test_a_file_is_on_disk_before_it_takes_its_place_and_the_folder_after(tmp_path, monkeypatch):
    """Else a crash of the machine could leave an empty file under the final name, or the old one."""
    path, steps = tmp_path / "a.json", []

    def fsync(descriptor):
        steps.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    replace = os.replace
    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("os.replace", lambda *names: (steps.append(("replace", str(names[1]))), replace(*names)))
    write_atomically(path, "new")
    assert steps == [("sync", str(tmp_path / ".a.json.partial")), ("replace", str(path)), ("sync", str(tmp_path))]
    assert path.read_text() == "new"


@pytest.mark.parametrize("text", ["", "ünïcødé\n"])
def test_text_is_written_as_it_is(tmp_path, text):
    write_atomically(tmp_path / "folder/a", text)
    assert (tmp_path / "folder/a").read_text(encoding="utf-8") == text
