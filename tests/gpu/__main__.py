"""``make gpu-check``: everything that only a GPU can show, in one command of at most ten minutes.

    python tests/gpu [--seconds 600]

Prints a table to paste into an issue, one row a check; what a check prints besides goes to stderr. Exit status 1 where
one failed. Without a GPU it says so in one line, and exits 0.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no further check begins")
    # Tests run the checks on a CPU, with tiny sizes.
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: there is no GPU here (torch.cuda.is_available() is false): nothing was checked")
        return 0
    sys.path[:0] = [str(HERE), str(HERE.parent)]  # equipment that other tests use, too
    from gpu_checks import CHECKS
    from gpu_table import FAILED, markdown, rows_of

    chosen = [(name, check) for name, check in CHECKS if options.only is None or name in options.only]
    rows = list(rows_of(chosen, options.device, options.seconds))
    print(f"{_machine(options.device)}\n\n{markdown(rows)}")
    return 1 if any(row.status == FAILED for row in rows) else 0


def _machine(device: str) -> str:
    import torch

    from spectrain.stages.hardware import cpu_name, hardware

    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    words = (hardware(), runtime) if device == "cuda" else (cpu_name(),)
    return ", ".join([*words, f"torch {torch.__version__}", f"Python {platform.python_version()}"])


if __name__ == "__main__":
    sys.exit(main())
