"""Native heads in the real vLLM: it drafts, and accepts, what our loop does, round by round: with the head that the
target brings along, and with a tuned one, served as an overlay of the target.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_tools import MtpTarget, mtp_target
from parity_tools import DRAFTS, ENGINE, SHAPE, TARGET, Family, assert_same_rounds, decoded_by_vllm
from rounds_process import RoundsProcess

from spectrain.data.packing import pack_batch
from spectrain.drafters.autoregressive.mtp import Mtp
from spectrain.drafters.drafter_folder import load_drafter, save_drafter
from spectrain.drafters.serving_config import read_serving_config
from spectrain.engines.vllm.args import engine_args
from spectrain.evaluation.parity import compare

FAMILIES = ("mimo", "glm4_moe")
ANSWER = 24
OVERRIDES: dict[str, dict[str, Any]] = {"mimo": {}, "glm4_moe": {"use_qk_norm": True}}


@dataclass
class Case:
    """A family's target as both sides see it, and its head: untouched, and tuned on the target's answers."""

    family: Family
    native: Mtp
    tuned: Mtp
    overlay: Path

    @classmethod
    def make(cls, name: str, folder: Path) -> Case:
        path = mtp_target(name, folder / name, **{**SHAPE, **OVERRIDES[name], "num_hidden_layers": 4})
        target = MtpTarget(name, path, torch.float32)
        family = Family(path, target.model)
        native, tuned = target.drafter(DRAFTS), target.drafter(DRAFTS)
        batch = pack_batch(family.states_of(()))
        optimizer = torch.optim.AdamW(tuned.parameters(), lr=5e-3)
        for _ in range(40):
            sums = tuned.train_losses(batch)
            (sums.loss / sums.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        overlay = folder / f"{name}-tuned"
        architectures = tuple(json.loads((path / "config.json").read_text())["architectures"])
        save_drafter(
            tuned, overlay, target=str(path), target_architectures=architectures, num_speculative_tokens=DRAFTS
        )
        found = load_drafter(overlay).attach(target.head)
        assert isinstance(found, Mtp)
        return cls(family, native, found, overlay)

    def jobs(self) -> list[dict[str, Any]]:
        native = {"speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS}}
        tuned = read_serving_config(str(self.overlay)).engine_args(DRAFTS)
        assert tuned == {"model": str(self.overlay), **native}
        return [self._job("native", native), self._job("tuned", tuned)]

    def _job(self, name: str, extra: dict[str, Any]) -> dict[str, Any]:
        extra = {**extra, "per_request_spec_decode_metrics": "detailed", "skip_tokenizer_init": True}
        extra |= {"async_scheduling": False, "disable_log_stats": False}
        request = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None, "states": None, "max_tokens": ANSWER}
        return {
            "name": name,
            "args": engine_args(ENGINE, TARGET, self.family.folder, extra),
            "requests": [
                {**request, "id": str(number), "prompt_ids": prompt, "stop_ids": list(self.family.eos_ids)}
                for number, prompt in enumerate(self.family.prompts)
            ],
        }


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reports(case: Case, rounds_process: RoundsProcess) -> dict[str, Any]:
    return rounds_process.run(case.jobs())


@pytest.mark.parametrize("head", ["native", "tuned"])
def test_vllm_drafts_what_our_loop_does(case: Case, reports: dict[str, Any], head: str) -> None:
    drafter = case.native if head == "native" else case.tuned
    theirs = decoded_by_vllm(case.family, reports[head])
    report = compare(case.family.model, drafter, case.family.ours(drafter), theirs, DRAFTS)
    assert_same_rounds(report, 60)
    assert len({round_.drafts for one in theirs for round_ in one.rounds}) > report.rounds / 3
    if head == "tuned":
        assert 0.1 < report.theirs.acceptance_rate < 0.999
