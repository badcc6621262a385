"""Whether code that a model wrote passes its tests: it is run, in a process of its own with limits (``run_answer.py``).

The code of an answer is its fenced block that defines something; before it comes what the prompt already defines
(imports, helper functions), behind it come the tests. HumanEval and MBPP bring theirs. A prompt of a file that brings
none is graded by the examples in its docstrings, as ``doctest`` reads them, which are fewer and easier.

This is no sandbox for hostile code, and is off unless the user says otherwise (``suite.execute_code``).
"""

from __future__ import annotations

import doctest
import json
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import lru_cache
from importlib import resources
from os import killpg

CPU_S = 5
WALL_S = 20.0  # of waiting, too: a program that sleeps uses no CPU
MEMORY_BYTES = 1 << 30

_BLOCK = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_DEFINES = re.compile(r"^(?:async def|def|class)\s+\w", re.MULTILINE)
_DOCSTRING = re.compile(r'"""(.*?)"""|' r"'''(.*?)'''", re.DOTALL)


def passes_tests(prompt: str, answer: str, tests: str) -> bool:
    """Whether ``answer``, put into ``prompt``, passes ``tests``, a program. Each program is run once."""
    return _runs("\n\n".join(part for part in (prompt_code(prompt), answer_code(answer), tests) if part))


def answer_code(answer: str) -> str:
    """The first fenced block that defines a function or a class, else the first of all, else the whole answer. A block
    that the length limit cut off ends with the text.
    """
    blocks = [code for language, code in _BLOCK.findall(answer) if language.lower() in ("", "py", "python", "python3")]
    return next((code for code in blocks if _DEFINES.search(code)), blocks[0] if blocks else answer)


def prompt_code(prompt: str) -> str:
    """What a prompt defines that an answer may leave out. Empty where it holds no code that can be run by itself, as
    where it shows tests alone.
    """
    for _, code in _BLOCK.findall(prompt):
        if _DEFINES.search(code):
            with suppress(SyntaxError, ValueError), warnings.catch_warnings(action="ignore"):
                compile(code, "prompt", "exec", dont_inherit=True)
                return str(code)
    return ""


def docstring_tests(prompt: str) -> str | None:
    """A program that checks the examples (``>>>``) in the docstrings of a prompt; None where there are none."""
    texts = [one or other for one, other in _DOCSTRING.findall(prompt)]
    parser = doctest.DocTestParser()
    found = []
    for text in texts:
        with suppress(ValueError):  # examples that no doctest could read
            found += [(example.source, example.want) for example in parser.get_examples(text)]
    if not any(want for _, want in found):
        return None
    return (
        "import doctest as _doctest\n"
        f"_examples = [_doctest.Example(*pair) for pair in {found!r}]\n"
        "_test = _doctest.DocTest(_examples, globals(), 'examples', None, 0, None)\n"
        "assert not _doctest.DocTestRunner(verbose=False).run(_test, out=lambda text: None).failed\n"
    )


@lru_cache(maxsize=4096)
def _runs(program: str) -> bool:
    """Whether a program ends in order within its limits."""
    word = secrets.token_hex(16)
    asked = {"program": program, "word": word, "cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES}
    runner = resources.files(__package__).joinpath("run_answer.py")
    with resources.as_file(runner) as file, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder},  # nothing of ours: no tokens, no proxies
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(json.dumps(asked).encode(), timeout=WALL_S)
        except subprocess.TimeoutExpired:
            killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
    return said == word.encode()
