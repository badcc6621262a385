"""Memory of one training step, forward and backward, as a packed sequence of one document grows to 32,768 tokens.

    python tests/bench/bench_long_documents.py [--tokens 1024 4096 16384 32768]

Every storage is counted while it is alive, so the figures are exact and the same on every machine: what attention,
layers and losses make beyond weights and hidden states. A drafter of a tiny target (hidden size 64, 2 heads, vocabulary
of 500), float32; the longest takes a minute.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tensor_memory import TensorMemory
from training_step import TargetSize, Text, TrainingStep

SIZE = TargetSize(hidden=64, intermediate=192, heads=2, kv_heads=1, head_dim=32, vocab=500)
BLOCKS = ("drafter.block.block_size=8", "drafter.block.anchors=512")
KINDS = {
    "eagle3": ("drafter=eagle3",),
    "eagle3 sdpa": ("drafter=eagle3", "drafter.attention=sdpa"),
    "peagle": ("drafter=peagle",),
    "dflash": ("drafter=dflash", *BLOCKS),
    "dflash window 1024": ("drafter=dflash", "drafter.block.sliding_window=1024", *BLOCKS),
    "dspark": ("drafter=dspark", *BLOCKS),
}


def step_bytes(arguments: tuple[str, ...], tokens: int) -> int:
    """Peak of a step, less what was there before it."""
    step = TrainingStep(arguments, SIZE, Text(tokens, 1))
    with TensorMemory() as memory:
        step.forward().loss.backward()
    return memory.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    print(f"{'tokens of one document':<26}" + "".join(f"{tokens:>12,}" for tokens in options.tokens))
    for kind in options.kinds:
        found = [step_bytes(KINDS[kind], tokens) for tokens in options.tokens]
        print(f"{kind:<26}" + "".join(f"{peak / 1e6:>9,.0f} MB" for peak in found), flush=True)
    print("MB of a step beyond weights and hidden states; twice the tokens, at most twice the memory")


if __name__ == "__main__":
    main()
