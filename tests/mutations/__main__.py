"""Do the tests see the classic bugs? Breaks a copy of the package in one place at a time and runs the tests that should
notice.

    python tests/mutations [PART]          those with PART in their name, in the path of the file they break or in the
                                           name of their module in this folder
    python tests/mutations --sample N      N of them, chosen by the commit: the same ones for everybody who checks it,
                                           other ones for the next
    python tests/mutations --jobs 2        two at a time
    python tests/mutations --list          only their names and files, and whether they still apply

Prints one line a mutation; exit status 1 if any survives or no longer applies, 2 if there is none to try. Each is a bug
that a trainer or server of drafters has shipped, or one that is easily written.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autoregressive
import batches
import block
import config
import data
import decoding
import drafters
import engines
import evaluation
import gemma4
import generic
import mtp
import publishing
import signals
import stages
import states
import targets
import training
from mutation import Mutation

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COPIED, LINKED = ("spectrain", "tests"), ("conf", "data_gen", "recipes", "eval", "docs", "README.md", "pyproject.toml")
TIMEOUT_S = 600
AREAS = (
    autoregressive,
    mtp,
    block,
    drafters,
    decoding,
    data,
    batches,
    engines,
    training,
    evaluation,
    stages,
    states,
    config,
    targets,
    gemma4,
    generic,
    publishing,
    signals,
)
BY_AREA = {area.__name__: area.MUTATIONS for area in AREAS}


@dataclass(frozen=True)
class Outcome:
    """Of one mutation. ``killer``: the test that failed, if one did; ``text``: what became of it, for the user."""

    mutation: Mutation
    text: str
    killer: str = ""
    killed: bool = False
    seconds: float = 0.0


class FirstFailure:
    """A plugin of pytest: leaves the name of the first test that fails in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self._file.exists():
            self._file.write_text(report.nodeid, encoding="utf-8")


def run_tests(folder: Path, tests: Sequence[str], first_failure: Path) -> None:
    """In a forked process: pytest in ``folder``. The heavy libraries came with the fork, the package and the tests did
    not.
    """
    descriptor = os.open(folder / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    ours = ("", str(ROOT), str(ROOT / "tests"), str(HERE))
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry not in ours)]
    for area in (*BY_AREA, "mutation"):  # their names are free for the tests
        del sys.modules[area]
    os.environ["PYTHONPATH"] = str(folder)  # for the processes that tests start
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    import pytest

    os._exit(pytest.main([*options, *tests], plugins=[FirstFailure(first_failure)]))


def pytest_in(folder: Path, tests: Sequence[str]) -> tuple[int | None, str, str]:
    """Exit status of pytest in a forked process (None: it hung and was ended), the first test that failed (empty if
    none did), and its output.
    """
    first_failure = folder / "first_failure"
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, tests, first_failure))
    process.start()
    process.join(TIMEOUT_S)
    hung = process.is_alive()
    if hung:
        process.kill()
        process.join()
    log = folder / "pytest.log"
    output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    failed = first_failure.read_text(encoding="utf-8") if first_failure.exists() else ""
    return None if hung else process.exitcode, failed, output


def copy_into(folder: Path) -> None:
    for tree in COPIED:
        shutil.copytree(ROOT / tree, folder / tree, ignore=shutil.ignore_patterns("__pycache__", "mutations"))
    for tree in LINKED:
        (folder / tree).symlink_to(ROOT / tree)


def why_stale(mutation: Mutation) -> str:
    """Why it no longer applies; empty if it does."""
    file = ROOT / mutation.file
    if not file.is_file():
        return f"STALE: there is no {mutation.file}"
    missing = [test for test in mutation.tests if not (ROOT / test.partition("::")[0]).is_file()]
    if missing:
        return f"STALE: there is no {missing[0]}"
    count = file.read_text(encoding="utf-8").count(mutation.old)
    return "" if count == 1 else f"STALE: its text occurs {count} times in {mutation.file}"


def try_out(mutation: Mutation) -> Outcome:
    """Break a copy and see what the tests say."""
    stale = why_stale(mutation)
    if stale:
        return Outcome(mutation, stale)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        copy_into(folder)
        file = folder / mutation.file
        file.write_text(file.read_text(encoding="utf-8").replace(mutation.old, mutation.new), encoding="utf-8")
        status, killer, output = pytest_in(folder, mutation.tests)
    seconds = time.monotonic() - started
    if status is None:
        return Outcome(mutation, "killed by hanging", killed=True, seconds=seconds)
    if status == 0:
        return Outcome(mutation, "SURVIVED", seconds=seconds)
    if not killer:  # an error at import proves nothing
        return Outcome(mutation, f"BROKEN: {output[-300:]}", seconds=seconds)
    return Outcome(mutation, f"killed by {killer}", killer, True, seconds)


def fails_anyway(tests: Sequence[str]) -> str:
    """The first of these tests that fails with nothing broken, and why; empty if all pass."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        copy_into(Path(name))
        status, failed, output = pytest_in(Path(name), tests)
    return "" if status == 0 else f"{failed or 'pytest'} fails with nothing broken:\n{output[-3000:]}"


def chosen_by(part: str) -> list[Mutation]:
    return [m for area, ms in BY_AREA.items() for m in ms if part in m.name or part in m.file or part == area]


def commit() -> str:
    """What the sample is drawn by: the commit that is checked out; without git, the files themselves."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        digest = hashlib.sha256()
        for path in sorted(path for tree in COPIED for path in (ROOT / tree).rglob("*.py")):
            digest.update(path.read_bytes())
        return digest.hexdigest()


def prepare_process() -> None:
    """What all test runs share is imported once: each is forked from here."""
    import accelerate  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers

    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    # Modules that transformers loads when they are first asked for.
    for name in ("AutoModelForCausalLM", "LlamaForCausalLM", "PreTrainedTokenizerFast"):
        getattr(transformers, name)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("mutations", description="Do the tests see the classic bugs?")
    parser.add_argument("part", nargs="?", default="", help="of a mutation's name or file, or the name of an area")
    parser.add_argument("--sample", type=int, metavar="N", help="try N, chosen by the commit")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="try J at a time")
    parser.add_argument("--list", action="store_true", help="only list them, and say which no longer apply")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    chosen = chosen_by(arguments.part)
    if not chosen:
        print(f"no mutation has {arguments.part!r} in its name or file; the areas are {', '.join(BY_AREA)}")
        return 2
    if arguments.sample is not None:
        chosen = random.Random(commit()).sample(chosen, min(arguments.sample, len(chosen)))
    if arguments.list:
        for mutation in chosen:
            print(f"{mutation.name:78} {why_stale(mutation) or mutation.file}")
        return 1 if any(map(why_stale, chosen)) else 0
    prepare_process()
    outcomes = []
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("fork")) as pool:
        for outcome in pool.map(try_out, chosen):
            outcomes.append(outcome)
            print(f"{outcome.mutation.name:78} {outcome.text}  ({outcome.seconds:.0f} s)", flush=True)
    killed = sum(outcome.killed for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} killed")
    # A test that fails on the whole package, too, has killed nothing.
    wrong = fails_anyway(sorted({outcome.killer for outcome in outcomes} - {""}))
    if wrong:
        print(wrong)
    return 1 if wrong or killed < len(outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
