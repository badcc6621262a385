"""Small disks that a test fills, grows or makes read-only; skipped where this user may mount none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(disk: Path, size: str) -> Iterator[Path]:
    """A new disk of ``size`` (1m, 300k) at ``disk``."""
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this user may not mount a disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def remount(disk: Path, options: str) -> None:
    """Change it: ``size=2m``, ``ro``, ``rw``."""
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)
