"""What goes into files: values that JSON has, digests, what a removal leaves; and the order in which a file reaches the
disk.
"""

import hashlib
import json
import math
import os
import time

import pytest

from spectrain import files
from spectrain.errors import InputError
from spectrain.files import (
    append_line,
    bytes_text,
    check_digest,
    file_digest,
    finite_or_none,
    plain,
    read_json_lines,
    recover_folder,
    remove,
    with_digest,
    write_atomically,
)


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


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (1300, "1.3 kB"), (999_400, "999 kB")),
        *((999_600, "1.0 MB"), (24_000_000, "24 MB"), (1.5e9, "1.5 GB"), (1.04e13, "10 TB"), (-2000, "-2.0 kB")),
    ],
)
def test_sizes_come_in_units_that_fit(size, text):
    assert bytes_text(size) == text


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, '{"step": 1}')
    with path.open("ab") as file:
        file.write('{"step": 2, "note": "ü'.encode()[:-1])  # killed in the midst of a character
    append_line(path, '{"step": 3}')
    with path.open("ab") as file:
        file.write(b'{"st')
    assert read_json_lines(path) == [{"step": 1}, {"step": 3}]
    assert read_json_lines(tmp_path / "none") == []


def test_no_changed_bit_of_a_json_file_goes_unnoticed(tmp_path):
    """Where the change is one of space or of an escape, the content is the same."""
    content = {"taps": [2, 15, 27], "name": "tiny ü", "share": 0.25, "none": None, "on": True, "in": {"a": 1e-9}}
    text = json.dumps(with_digest(content), indent=1).encode()
    check_digest(json.loads(text), tmp_path, "")
    noticed = 0
    for bit in range(8 * len(text)):
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = json.loads(changed.decode())
        except ValueError:
            noticed += 1
            continue
        if {name: found.get(name) for name in content} == content and found.get("digest") and len(found) == 7:
            continue
        if "digest" not in found:  # its name was hit: whoever reads such a file knows its fields
            assert len(found) == 7
            continue
        noticed += 1
        with pytest.raises(InputError, match="has changed since it was written"):
            check_digest(found, tmp_path, "make it again")
    assert noticed > 1000


def test_one_that_has_no_digest_is_believed(tmp_path):
    check_digest({"a": 1}, tmp_path, "")


def test_digests_do_not_depend_on_the_order_of_fields():
    assert (
        with_digest({"a": 1, "b": {"c": 2, "d": 3}})["digest"] == with_digest({"b": {"d": 3, "c": 2}, "a": 1})["digest"]
    )


def test_a_file_that_changed_is_read_again(tmp_path, monkeypatch):
    """Even where size and time of the last change are the same, as they are when one write follows another at once."""
    path, read = tmp_path / "a", []
    monkeypatch.setattr(
        files, "_read_digest", lambda path: read.append(path) or hashlib.sha256(path.read_bytes()).hexdigest()
    )
    path.write_bytes(b"one")
    state = files.FileState.of(path)
    first = file_digest(path)
    path.write_bytes(b"two")
    monkeypatch.setattr(files.FileState, "of", lambda _: state)
    assert file_digest(path) == hashlib.sha256(b"two").hexdigest() != first
    assert len(read) == 2
    later = time.time_ns() + 10**10
    monkeypatch.setattr("time.time_ns", lambda: later)  # the last change is long ago: read once more, and no more
    assert {file_digest(path) for _ in range(3)} == {hashlib.sha256(b"two").hexdigest()}
    assert len(read) == 3


def test_a_folder_that_is_removed_is_never_half_there(tmp_path, monkeypatch):
    folder = tmp_path / "hidden_states"
    folder.mkdir()
    (folder / "index.json").touch()
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed before it has removed anything
    remove(folder)
    assert not folder.exists()
    monkeypatch.undo()
    recover_folder(folder)
    assert list(tmp_path.iterdir()) == []
    remove(folder)  # one that is not there
    (tmp_path / "file").touch()
    remove(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
