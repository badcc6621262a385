"""SIGKILL at random moments of every command, then the same command again, until it ends: as if nothing had happened.

The moments are drawn from the whole time that the command takes undisturbed, so they lie inside library calls, between
them, and while files are written. As a program it does as many kills as one likes, and prints what came of them:

    python tests/faults/random_kills.py --kills 64 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from contents import assert_equal, leftovers  # noqa: E402
from forked import ended, run, start  # noqa: E402
from workplace import make  # noqa: E402

# Of the kills in 64: how many each command gets.
SHARES = {"generate": 12, "capture": 12, "fit": 14, "eval": 12, "a rank of two": 7, "the launcher of two": 7}
PATIENCE_S = 240.0


@dataclass
class Workplace:
    """Finished runs, as the commands find them and leave them, in one folder."""

    folder: Path
    arguments: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arguments = [*make(self.folder), "trainer.epochs=3", "trainer.checkpoint_every_steps=1"]
        begin = self.folder / "before generate"
        begin.mkdir()
        for command, after in (("generate", "capture"), ("capture", "fit"), ("fit", "eval"), ("eval", "nothing")):
            self._copy_and_run(f"before {command}", f"before {after}", self.command(command))

    def _copy_and_run(self, before: str, after: str, command: list[str]) -> None:
        path = Path(shutil.copytree(self.folder / before, self.folder / after))
        assert run([*command, f"run.dir={path}"]) == 0, command

    def command(self, kind: str) -> list[str]:
        if kind.endswith("of two"):
            # Half a sequence a rank: as many steps as one rank makes.
            return ["fit", *self.arguments, "trainer.packed_length=128", "trainer.devices=2"]
        # An evaluation goes on from the settings of the drafter that it finds.
        return [kind, *self.arguments]

    def before(self, kind: str) -> Path:
        return self.folder / ("before fit" if kind.endswith("of two") else f"before {kind}")

    def after(self, kind: str) -> Path:
        following = {"generate": "capture", "capture": "fit", "fit": "eval", "eval": "nothing"}
        if kind in following:
            return self.folder / f"before {following[kind]}"
        if not (self.folder / "two ranks").exists():
            self._copy_and_run("before fit", "two ranks", self.command(kind))
        return self.folder / "two ranks"


@dataclass
class Tally:
    """Of one command."""

    kills: int = 0
    runs: int = 0  # from the beginning to the end, with kills in between
    attempts: int = 0


def disturb(place: Workplace, kind: str, kills: int, draw: random.Random) -> Tally:
    """Kill a command so often, and let it end; whenever it ends, what it leaves is compared."""
    attempt = _attempt_on_ranks if kind.endswith("of two") else _attempt
    tally, path, takes_s = Tally(), _fresh(place, kind), 0.0
    while tally.kills < kills:
        after_s = draw.uniform(0, takes_s or 3.0)
        began = time.monotonic()
        tally.attempts += 1
        if attempt([*place.command(kind), f"run.dir={path}"], path, kind, after_s, draw):
            tally.kills += 1
            continue
        takes_s = time.monotonic() - began  # it has ended undisturbed
        path = _compared(place, kind, path, tally)
    assert run([*place.command(kind), f"run.dir={path}"]) == 0
    _compared(place, kind, path, tally)
    return tally


def _fresh(place: Workplace, kind: str) -> Path:
    path = place.folder / "disturbed"
    shutil.rmtree(path, ignore_errors=True)
    return Path(shutil.copytree(place.before(kind), path))


def _compared(place: Workplace, kind: str, path: Path, tally: Tally) -> Path:
    assert_equal(path, place.after(kind))
    tally.runs += 1
    return _fresh(place, kind)


def _attempt(command: list[str], path: Path, kind: str, after_s: float, draw: random.Random) -> bool:
    """Whether the command was killed before it ended."""
    process = start(command)
    process.join(after_s)
    process.kill()
    code = ended(process)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def _attempt_on_ranks(command: list[str], path: Path, kind: str, after_s: float, draw: random.Random) -> bool:
    """The same of a rank, or of the launcher, so long after training has made its first new step."""
    process = subprocess.Popen(
        [sys.executable, "-m", "spectrain", *command],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline, metrics = time.monotonic() + PATIENCE_S, path / "metrics.jsonl"
    seen = metrics.stat().st_size if metrics.is_file() else 0
    while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size != seen):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(min(after_s, 2.0))
    victims = [process.pid] if kind.startswith("the launcher") else _children(process.pid)
    if victims and process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it may end just now
            os.kill(draw.choice(victims), signal.SIGKILL)
    process.wait(PATIENCE_S)
    _wait_until_alone(path)
    return process.returncode != 0


def _children(pid: int) -> list[int]:
    """None of a process that has ended meanwhile."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _wait_until_alone(path: Path) -> None:
    """Ranks end with the one who started them, and with each other."""
    deadline = time.monotonic() + PATIENCE_S
    while any(str(path) in command for command in _running()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _running() -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid():
                found.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return found


def all_kinds(
    place: Workplace, kills: int, seed: int, kinds: Collection[str] = SHARES, say: Callable[[str], object] = print
) -> dict[str, Tally]:
    """``kills`` in proportion to SHARES, at least one of each; of these, those of ``kinds``."""
    found, total = {}, sum(SHARES.values())
    for kind, share in SHARES.items():
        if kind not in kinds:
            continue
        began = time.monotonic()
        wanted = max(1, round(kills * share / total))
        found[kind] = tally = disturb(place, kind, wanted, random.Random(f"{seed} {kind}"))
        assert leftovers(place.folder / "disturbed") == []
        say(
            f"{kind}: {tally.kills} kills in {tally.attempts} attempts, {tally.runs} runs ended as if undisturbed, "
            f"{time.monotonic() - began:.0f} s"
        )
    return found


def main() -> None:
    global PATIENCE_S
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=64)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", nargs="+", choices=tuple(SHARES), default=tuple(SHARES), help="of all kills, these")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds to wait for a step")
    options = parser.parse_args()
    PATIENCE_S = options.patience
    seed = random.randrange(1 << 31) if options.seed is None else options.seed
    print(f"seed {seed}")  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        found = all_kinds(Workplace(Path(folder)), options.kills, seed, options.only)
    print(f"{sum(tally.kills for tally in found.values())} kills, all ended as if undisturbed")  # noqa: T201


if __name__ == "__main__":
    main()
