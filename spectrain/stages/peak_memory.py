"""The most memory at once, on the device that holds the target: all that the process had there, weights included.

Stands alone because a sweep forgets the peak before each of its cells, which would else show the greatest one so far.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_KIB = 1024


def forget_peak(device: torch.device) -> None:
    """Count from here. Where the system cannot, the peak stays that of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Linux: the resident set's high-water mark


def peak_memory_bytes(device: torch.device) -> int:
    """Since ``forget_peak``."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * _KIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * _KIB
