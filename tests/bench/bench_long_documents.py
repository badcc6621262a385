"""Memory of one training step, forward and backward, as a packed sequence of one document grows to 32,768 tokens.

    python tests/bench/bench_long_documents.py [--tokens 1024 4096 16384 32768]

Nothing is computed: torch follows the shapes (its fake tensors), and every storage is counted while it is alive. So the
figures are exact, the same on every machine, and take seconds; what is counted is what attention, layers and losses
make beyond weights and hidden states. A drafter of a small target (hidden size 256, vocabulary of 2,000), float32.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tensor_memory import TensorMemory
from training_step import TargetSize, Text, TrainingStep

SIZE = TargetSize(hidden=256, intermediate=768, heads=4, kv_heads=2, head_dim=64, vocab=2000)
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
    step.batch.host_tokens = step.batch.host  # real, for the host works with it
    with FakeTensorMode(allow_non_fake_inputs=True), TensorMemory() as memory:
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
