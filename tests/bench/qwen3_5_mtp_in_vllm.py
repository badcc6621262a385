"""A Qwen3.5 with its own head in the real vLLM, by hand: every round against our loop's, and against the loop's with
the halves of the head's projection swapped.

    python tests/bench/qwen3_5_mtp_in_vllm.py --path FOLDER_WITH_TORCHVISION

vLLM's CPU build runs gated-delta layers in bfloat16 only, slowly, and imports torchvision for them, which has to be
importable beside the CPU build of torch: ``--path`` is put in front of vLLM's PYTHONPATH. A tiny random target: its
logits lie so close together that bfloat16 decides many of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

from mtp_tools import MtpTarget, mtp_target  # noqa: E402
from parity_tools import DRAFTS, SHAPE, Family, decoded_by_vllm  # noqa: E402
from rounds_process import RoundsProcess  # noqa: E402
from test_mtp_parity import Case  # noqa: E402
from vllm_tools import vllm_environment  # noqa: E402

from spectrain.drafters.autoregressive.mtp import Mtp  # noqa: E402
from spectrain.evaluation.parity import ParityReport, compare  # noqa: E402

LINEAR = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", default="", help="folders for vLLM's PYTHONPATH, in front of the tests' repairs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = mtp_target("qwen3_5_text", Path(scratch) / "t", **{**SHAPE, "num_hidden_layers": 4, **LINEAR})
        target = MtpTarget("qwen3_5_text", folder, torch.bfloat16)
        family, native = Family(folder, target.model), target.drafter(DRAFTS)
        case = Case(family, native, native, folder)
        job = case._job("native", {"speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS}})
        job["args"] |= {"dtype": "bfloat16", "enable_prefix_caching": False}
        path = os.pathsep.join(filter(None, [options.path, vllm_environment()["PYTHONPATH"]]))
        with RoundsProcess(Path(scratch) / "log", PYTHONPATH=path) as process:
            theirs = decoded_by_vllm(family, process.run([job])["native"])

        def compared(drafter: Mtp) -> ParityReport:
            return compare(family.model, drafter, case.ours(drafter), theirs, DRAFTS)

        tell("as it is", compared(native))
        swapped = target.drafter(DRAFTS)
        with torch.no_grad():
            weight = dict(swapped.named_parameters())["body.layers.0.projection.weight"]
            weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))
        tell("halves of its projection swapped", compared(swapped))


def tell(name: str, report: ParityReport) -> None:
    gaps = sorted(difference.gap for difference in report.different if difference.gap is not None)
    largest = f", by up to {gaps[-1]:.2f} in logits" if gaps else ""
    print(
        f"{name}: {report.rounds} rounds, {report.equal} equal, {len(report.ties)} ties within rounding, "
        f"{len(report.different)} differ{largest}"
    )


if __name__ == "__main__":
    main()
