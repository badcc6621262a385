"""Code of answers, run with its tests: what passes, what does not, and what it cannot do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spectrain.config.evaluation_schema import SuiteConfig
from spectrain.evaluation import code_execution
from spectrain.evaluation.code_execution import answer_code, docstring_tests, passes_tests, prompt_code
from spectrain.evaluation.suites import right_answers

PROMPT = '''Complete this:
```python
from typing import List


def double(numbers: List[int]) -> List[int]:
    """ Twice each.
    >>> double([1, 2])
    [2, 4]
    >>> double([])
    []
    """

```'''
TESTS = "def check(candidate):\n    assert candidate([3]) == [6]\n    assert candidate([]) == []\n\ncheck(double)"
RIGHT = (
    "Here:\n```python\ndef double(numbers: List[int]) -> List[int]:\n    return [2 * n for n in numbers]\n```\nDone."
)
DEFINITION = "def double(numbers):\n    return [2 * n for n in numbers]\n"


def test_a_right_answer_passes_and_a_wrong_one_does_not():
    assert passes_tests(PROMPT, RIGHT, TESTS)
    assert not passes_tests(PROMPT, RIGHT.replace("2 * n", "3 * n"), TESTS)
    assert not passes_tests(PROMPT, "I cannot.", TESTS)
    assert not passes_tests(PROMPT, "```python\ndef double(:\n```", TESTS)
    assert not passes_tests("Write it.", RIGHT, TESTS)  # List comes from the prompt
    assert passes_tests("Write it.", DEFINITION, TESTS)  # code without a fence
    assert passes_tests(PROMPT, RIGHT.partition("\n```\nDone")[0], TESTS)  # cut off behind the code


@pytest.mark.parametrize(
    "before",
    [
        "while True:\n    pass",
        "kept = [bytes(1 << 20) for _ in range(1 << 20)]",
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.fork()",
        "import os\nos.system('true')",
        "import os\nos.kill(os.getppid(), 0)",
        "import socket\nsocket.socket()",
        "import ctypes\nctypes.CDLL(None)",
        "open('big', 'wb').write(bytes(1 << 21))",
    ],
    ids=lambda code: code.splitlines()[-1][:24],
)
def test_what_no_task_needs_ends_the_answer(before, monkeypatch):
    monkeypatch.setattr(code_execution, "CPU_S", 1)
    monkeypatch.setattr(code_execution, "MEMORY_BYTES", 200 << 20)
    assert passes_tests("", f"{DEFINITION}", TESTS)
    assert not passes_tests("", f"{before}\n{DEFINITION}", TESTS)


def test_an_answer_that_sleeps_is_ended(monkeypatch):
    monkeypatch.setattr(code_execution, "WALL_S", 1.0)
    assert not passes_tests("", f"import time\ntime.sleep(60)\n{DEFINITION}", TESTS)


def test_files_are_written_in_a_folder_of_its_own_alone(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    inside = "open('mine', 'w').write('x')\nassert open('mine').read() == 'x'\nimport os\nos.remove('mine')\n"
    assert passes_tests("", inside + DEFINITION, TESTS)
    for line in (
        f"open({str(outside)!r}, 'w')",
        f"import os; os.open({str(outside)!r}, os.O_WRONLY)",
        f"import os; os.remove({str(outside)!r})",
        f"import os; os.rename({str(outside)!r}, 'mine')",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        "open('../escaped', 'w')",
    ):
        assert not passes_tests("", f"{line}\n{DEFINITION}", TESTS), line
        assert outside.read_text() == "kept"


def test_it_sees_nothing_of_our_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = f"import os\nassert 'HF_TOKEN' not in os.environ and os.getcwd() != {os.getcwd()!r}\n"
    assert passes_tests("", code + DEFINITION, TESTS)


def test_code_is_found_in_answers_and_prompts():
    assert answer_code("```\nprint(1)\n```\nthen\n```python\ndef f():\n    pass\n```").startswith("def f")
    assert answer_code("```text\nno code\n```\n```py\nx = 1\n```") == "x = 1"
    assert answer_code("x = 1") == "x = 1"
    assert prompt_code(PROMPT).startswith("from typing import List")
    assert prompt_code("Tests:\n```python\nassert f(1) == 2\n```") == ""
    assert prompt_code("```python\ndef broken(:\n```") == ""


def test_examples_of_docstrings_grade_where_there_are_no_tests(tmp_path):
    examples = docstring_tests(PROMPT)
    assert examples is not None
    assert passes_tests(PROMPT, RIGHT, examples)
    assert not passes_tests(PROMPT, RIGHT.replace("2 * n", "2 * n + 1"), examples)
    assert docstring_tests('def f():\n    """No example."""') is None


def test_nothing_is_graded_by_tests_unless_code_may_be_run(tmp_path: Path):
    import json

    file = tmp_path / "prompts.jsonl"
    tested = {"messages": [{"role": "user", "content": "Write double."}, {"role": "assistant", "content": TESTS}]}
    lines = [tested, {"turns": [PROMPT]}, {"turns": ["Write anything."]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    suite = SuiteConfig(name="code", path=str(file), grading="tests")
    assert right_answers(suite, ()) == {}
    allowed = SuiteConfig(name="code", path=str(file), grading="tests", execute_code=True)
    found = list(right_answers(allowed, ()).values())
    assert found == [TESTS, docstring_tests(PROMPT)]
