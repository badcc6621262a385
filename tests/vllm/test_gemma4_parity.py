"""Gemma-4 assistants in the real vLLM: every round that it drafts is our loop's, beyond the sliding window too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gemma4_tools import Gemma4
from parity_tools import DRAFTS, SHAPE, Family, assert_same_rounds, decoded_by_vllm, served_job
from rounds_process import RoundsProcess

from spectrain.data.packing import pack_batch
from spectrain.drafters.autoregressive.gemma4_mtp import Gemma4MTP
from spectrain.drafters.drafter_folder import load_drafter, save_drafter
from spectrain.evaluation.parity import compare

SIZES: dict[str, Any] = {
    **SHAPE,
    "num_hidden_layers": 4,
    "global_head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
}
CASES = {
    "dense, tied head": ("dense", 0, {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "E series, centroids": ("e_series", 16, {}),
}


def trained(gemma: Gemma4, family: Family, centroids: int, steps: int = 35) -> Gemma4MTP:
    """Drafts much of what the target says, not all: it has not seen every fourth answer."""
    drafter = gemma.assistant(centroids, num_layers=2)
    texts = enumerate(zip(family.prompts, family.plain, strict=True))
    batch = pack_batch([gemma.states(prompt, answer.ids, str(i)) for i, (prompt, answer) in texts if i % 4])
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(steps):
        sums = drafter.train_losses(batch)
        (sums.loss / sums.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


@pytest.mark.parametrize("case", CASES)
def test_vllm_drafts_and_accepts_what_our_loop_does(case: str, tmp_path: Path, rounds_process: RoundsProcess) -> None:
    sort, centroids, sizes = CASES[case]
    gemma = Gemma4.make(sort, tmp_path / "target", **{**SIZES, **sizes})
    family = Family(gemma.folder, gemma.target)
    drafter = trained(gemma, family, centroids)
    folder = tmp_path / "assistant"
    names = {"target": str(gemma.folder), "target_architectures": ("Gemma4ForCausalLM",)}
    save_drafter(drafter, folder, num_speculative_tokens=DRAFTS, **names)  # type: ignore[arg-type]
    work = served_job(case, family, folder, num_drafts=None)
    assert work["args"]["speculative_config"] == {"model": str(folder), "num_speculative_tokens": DRAFTS}
    theirs = decoded_by_vllm(family, rounds_process.run([work])[case])
    beyond = [one for one in theirs if len(one.prompt) + len(one.answer) > SIZES["sliding_window"] + 8]
    assert len(beyond) > len(theirs) / 2
    served = load_drafter(folder).attach(gemma.head)
    report = compare(gemma.target, served, family.ours(served), theirs, DRAFTS)
    assert_same_rounds(report, 60)
    assert 0.05 < report.theirs.acceptance_rate < 1
    assert len({round_.drafts for one in theirs for round_ in one.rounds}) >= 10
