"""Attention kernels: numbers, and how many graphs are compiled for them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from attention_shapes import run_random_shape
from gpu_table import FAILED, OK, Row, judged

from spectrain.stages.attention_check import check_attention_kernels

_LEVELS = {"ok": OK, "warning": FAILED, "failure": FAILED}
MOST_GRAPHS = 8  # of any number of shapes: both kinds of drafters, with and without gradients


def check_attention(device: str) -> Iterator[Row]:
    """Forward and backward of every backend against plain products, each kind of drafter, each device."""
    for finding in check_attention_kernels():
        if f" on {device}" in finding.name:
            yield Row(finding.name, _LEVELS[finding.level], finding.text)


def check_graphs(device: str) -> Iterator[Row]:
    """Batches of many shapes share a few compiled graphs."""
    from torch._dynamo.utils import counters

    shapes, number = random.Random(0), 100 if device == "cuda" else 5
    torch._dynamo.reset()
    counters.clear()
    for _ in range(number):
        run_random_shape(shapes, device)
    graphs = counters["stats"]["unique_graphs"]
    yield judged("graphs of flex attention", graphs <= MOST_GRAPHS, f"{graphs} for {number} shapes of batches")
