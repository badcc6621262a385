"""How a command refuses what it is given, and contents that no file of JSON may have."""

from spectrain import cli

DEEP = "[" * 100_000
BROKEN = {
    "empty": "",
    "cut": '{"model_type": "llama", ',
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "not UTF-8": b'{"model_type": "\xff\xfe"}',
    "nested too deep": DEEP,
    "too large": None,
}


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def refused(capsys, arguments, command="run", dry=True):
    """The line with which a command refuses."""
    code = cli.main([command, *arguments, *(["--dry-run"] if dry else [])])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    assert "(unexpected;" not in err
    assert "Traceback" not in err
    return err
