"""A tuned head beside quantised layers in the real vLLM: the overlay's configuration has it loaded as it is stored, in
16 bits. Without its entries vLLM takes the weights for codes of 8 bits, without a word, and accepts nothing: the parity
gate says so. (GPTQ with groups of 32, as ``"gptq 32"``, was green by hand.)

The target has learned to answer in periods, so that vLLM's rounding of activations to 8 bits, which our loop does not
do, changes no token.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_tools import MtpTarget, questions, taught_target
from parity_tools import DRAFTS, ENGINE, SHAPE, TARGET, Family, assert_same_rounds, decoded_by_vllm
from quantised_targets import quantise
from rounds_process import RoundsProcess
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM

from spectrain.data.packing import pack_batch
from spectrain.drafters.autoregressive.mtp import Mtp
from spectrain.drafters.drafter_folder import load_drafter, save_drafter
from spectrain.drafters.serving_config import read_serving_config
from spectrain.engines.vllm.args import engine_args
from spectrain.evaluation.parity import ParityReport, compare
from spectrain.target.families import head_math
from spectrain.target.model import TargetModel

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


class Asked(Family):
    """Asked in words."""

    prompts = questions(range(40, 48))


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mimo") / "plain"
    return taught_target("mimo", folder, **{**SHAPE, "num_hidden_layers": 4})


@pytest.fixture(scope="module")
def quantised(
    taught: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Family, MtpTarget]:
    """A MiMo in one of the schemes, head included; our side computes with its twin of the same weights."""
    target = MtpTarget("mimo", quantise(request.param, taught, tmp_path_factory.mktemp("q") / "q"), torch.float32)
    model = AutoModelForCausalLM.from_pretrained(target.folder / "twin", dtype=torch.float32)
    return Asked(target.folder, TargetModel(model, tiny_tokenizer(), target.spec, head_math(model.config))), target


@pytest.fixture(scope="module")
def overlay(quantised: tuple[Family, MtpTarget], tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, target = quantised
    tuned, batch = target.drafter(DRAFTS), pack_batch(family.states_of(()))
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=4e-3)
    for _ in range(150):
        sums = tuned.train_losses(batch)
        (sums.loss / sums.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("overlay") / "tuned"
    facts: dict[str, Any] = {"target": str(target.folder), "target_architectures": target.spec.architectures}
    save_drafter(tuned, folder, **facts, num_speculative_tokens=DRAFTS)
    return folder


def gate(quantised: tuple[Family, MtpTarget], overlay: Path, process: RoundsProcess) -> ParityReport:
    """What the parity gate finds of vLLM that serves ``overlay``."""
    family, target = quantised
    extra = {"per_request_spec_decode_metrics": "detailed", "skip_tokenizer_init": True}
    extra |= {"async_scheduling": False, "disable_log_stats": False}
    extra |= read_serving_config(str(overlay)).engine_args(DRAFTS)
    request = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None, "states": None, "max_tokens": 24}
    requests = [
        {**request, "id": str(number), "prompt_ids": prompt, "stop_ids": list(family.eos_ids)}
        for number, prompt in enumerate(family.prompts)
    ]
    args = engine_args(ENGINE, TARGET, family.folder, extra)
    reports = process.run([{"name": str(overlay), "args": args, "requests": requests}])
    drafter = load_drafter(overlay).attach(target.head)
    assert isinstance(drafter, Mtp)
    theirs = decoded_by_vllm(family, reports[str(overlay)])
    return compare(family.model, drafter, family.ours(drafter), theirs, DRAFTS)


@pytest.mark.parametrize("quantised", ["compressed-tensors int8", "awq 32"], indirect=True)
def test_the_overlay_is_served_as_our_loop_drafts(
    quantised: tuple[Family, MtpTarget], overlay: Path, rounds_process: RoundsProcess
) -> None:
    report = gate(quantised, overlay, rounds_process)
    assert_same_rounds(report, 40)
    assert report.theirs.acceptance_rate > 0.5


@pytest.mark.parametrize("quantised", ["compressed-tensors int8"], indirect=True)
def test_without_its_entries_in_the_configuration_the_gate_is_red(
    quantised: tuple[Family, MtpTarget], overlay: Path, rounds_process: RoundsProcess, tmp_path: Path
) -> None:
    spoiled = shutil.copytree(overlay, tmp_path / "spoiled", symlinks=False)
    config = json.loads((spoiled / "config.json").read_text())
    assert "model.layers.4.self_attn.q_proj" in config["quantization_config"]["ignore"]
    config["quantization_config"]["ignore"] = ["lm_head"]
    (spoiled / "config.json").write_text(json.dumps(config))
    report = gate(quantised, spoiled, rounds_process)
    assert not report.passed and report.different
    assert report.theirs.acceptance_rate < 0.02 < 0.5 < report.ours.acceptance_rate
