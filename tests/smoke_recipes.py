"""Runs recipes from end to end on tiny targets (``run.smoke=true``) and says of each what came of it.

    python tests/smoke_recipes.py [--sample N] [PART]

PART: only recipes whose name contains it. ``--sample N``: N of them, others at every commit. ``make smoke`` runs all.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from spectrain import cli
from spectrain.config.folders import group_options
from spectrain.console import say

ROOT = Path(__file__).resolve().parent.parent


def sampled(names: Sequence[str], count: int) -> list[str]:
    """``count`` of ``names``, chosen by the commit; without git, by nothing."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return sorted(random.Random(asked.stdout.strip()).sample(sorted(names), min(count, len(names))))


def smoke(recipe: str, folder: Path, *more: str) -> str:
    """What is wrong after a smoke run of a recipe in ``folder``; empty if nothing is."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = cli.main(["run", f"recipe={recipe}", "run.smoke=true", f"run.dir={folder}", *more])
    if code:
        errors = [line for line in printed.getvalue().splitlines() if line.startswith("error: ")]
        return f"exit code {code}: {errors[-1] if errors else printed.getvalue()[-400:]}"
    return _wrong_records(folder)


def _wrong_records(folder: Path) -> str:
    """The drafter is there, and with it the target answers as without, as many tokens a round as simulated."""
    if not any((folder / "drafter").glob("*.safetensors")):
        return "no drafter was written"
    records = [json.loads(path.read_text()) for path in sorted((folder / "eval").glob("*.json"))]
    measured = [record for record in records if record.get("method") not in ("none", "ngram")]
    if not measured:
        return "the drafter was not measured"
    for record in measured:
        if record["output_identical"] is not True:
            return "with the drafter the target answers otherwise than without"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="")
    parser.add_argument("--sample", type=int)
    arguments = parser.parse_args()
    names = [name for name in group_options("recipe") if arguments.part in name]
    names = names if arguments.sample is None else sampled(names, arguments.sample)
    failed = 0
    for name in names:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            wrong = smoke(name, Path(folder) / "run")
        failed += bool(wrong)
        say(f"{name:32} {time.monotonic() - start:5.1f} s  {wrong or 'ok'}")
    say(f"{len(names) - failed} of {len(names)} recipes ran from end to end")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
