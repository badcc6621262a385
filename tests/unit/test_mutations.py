"""The list of mutations keeps up with the package: each still applies, and names tests that exist. (Whether the tests
see them is what ``make mutations`` finds out.)
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def listed(*arguments: str) -> list[str]:
    command = [sys.executable, "tests/mutations", "--list", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if "STALE" in line)
    return done.stdout.splitlines()


def test_every_mutation_still_applies():
    assert len(listed()) > 100


def test_a_sample_is_the_same_each_time_and_of_the_size_asked_for():
    assert len(set(listed("--sample", "7"))) == 7
    assert listed("--sample", "7") == listed("--sample", "7")


def test_a_part_is_an_area_or_a_piece_of_a_path():
    assert 0 < len(listed("engines")) < len(listed())
    assert listed("engines/vllm/requests.py") and set(listed("engines/vllm/requests.py")) < set(listed("engines"))
