"""30 of the kills of ``random_kills.py``, other ones each time; the seed is printed, and can be given there."""

import random
import sys

import pytest
from random_kills import SHARES, Workplace, all_kinds

KILLS = 30


@pytest.mark.slow
def test_killed_at_random_every_command_ends_as_if_undisturbed(tmp_path, capsys):
    seed = random.randrange(1 << 31)
    with capsys.disabled():
        sys.stdout.write(f"\n{KILLS} kills: python tests/faults/random_kills.py --kills {KILLS} --seed {seed}\n")
    found = all_kinds(Workplace(tmp_path), KILLS, seed)
    assert found.keys() == SHARES.keys()
    assert sum(tally.kills for tally in found.values()) >= KILLS
    assert all(tally.runs for tally in found.values())
