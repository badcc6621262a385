"""What waiting threads cost: OpenMP's that spin (its default) and that sleep (``OMP_WAIT_POLICY=PASSIVE``, ours).

    python tests/bench/bench_wait_policy.py [--busy 0 1] [--repeats 3]

On two cores, alone and beside processes that keep one of them busy each: a matrix product, and a training step of a
layer as wide as that of the demo's drafter. Each figure is the best of ``--repeats`` processes, policies in turn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time

THREADS, SECONDS = 2, 2.0
POLICIES = {"sleeps (PASSIVE)": {"OMP_WAIT_POLICY": "PASSIVE"}, "spins (default)": {}}


def measure() -> None:
    """In a process of its own, whose policy was chosen before torch is imported. Prints milliseconds of each."""
    import torch
    from torch import nn

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    a, b = torch.randn(256, 1152), torch.randn(1152, 3072)
    layer = nn.TransformerEncoderLayer(576, 9, 1536, batch_first=True, dropout=0.0)
    x = torch.randn(4, 256, 576)
    optimizer = torch.optim.AdamW(layer.parameters())

    def step() -> None:
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for work in (lambda: a @ b, step):
        work()
        count, start_s = 0, time.perf_counter()
        while time.perf_counter() - start_s < SECONDS:
            work()
            count += 1
        print(1000 * (time.perf_counter() - start_s) / count)


def run(variables: dict[str, str]) -> list[float]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")} | variables
    command = [sys.executable, __file__, "--measure"]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return [float(line) for line in output.split()]


def spin() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--busy", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args()
    if options.measure:
        measure()
        return
    for busy in options.busy:
        others = [multiprocessing.Process(target=spin, daemon=True) for _ in range(busy)]
        for other in others:
            other.start()
        found: dict[str, list[list[float]]] = {name: [] for name in POLICIES}
        for _ in range(options.repeats):
            for name, variables in POLICIES.items():
                found[name].append(run(variables))
        for name, runs in found.items():
            product, step = (min(column) for column in zip(*runs, strict=True))
            print(f"{busy} busy beside  {name:<18} product {product:7.2f} ms   training step {step:7.1f} ms")
        for other in others:
            other.kill()
    print(f"load average {os.getloadavg()[0]:.1f}, of which {max(options.busy)} ours at the end")


if __name__ == "__main__":
    main()
