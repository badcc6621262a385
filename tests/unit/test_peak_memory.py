"""The peak of memory is that of what came after it was forgotten."""

from __future__ import annotations

import sys

import pytest
import torch

from spectrain.stages.peak_memory import forget_peak, peak_memory_bytes

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_a_peak_is_seen_and_forgotten():
    forget_peak(CPU)
    before = peak_memory_bytes(CPU)
    block = torch.ones(64 << 20, dtype=torch.uint8)  # above what an allocator keeps for itself
    held = peak_memory_bytes(CPU)
    assert held - before > 60 << 20
    del block
    assert peak_memory_bytes(CPU) > held - (4 << 20)  # the system counts in batches
    forget_peak(CPU)
    assert held - peak_memory_bytes(CPU) > 60 << 20
