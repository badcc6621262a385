"""What P-EAGLE has beside EAGLE-3: a mask token, what stands for its taps, and what vLLM is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_tools import HIDDEN, Options, packed, random_document, random_drafter, random_head, save
from safetensors.torch import load_file

from spectrain.config.drafter_schema import AutoregressiveConfig, DrafterConfig, Eagle3Config, PEagleConfig
from spectrain.drafters.autoregressive.peagle import PEagle
from spectrain.drafters.autoregressive.unroll import Columns
from spectrain.drafters.drafter_folder import load_drafter
from spectrain.drafters.registry import Corpus, find_method
from spectrain.drafters.serving_config import read_serving_config
from spectrain.errors import ConfigError, InputError

METHOD = find_method("peagle")


def test_the_folder_is_what_vllm_reads(tmp_path: Path) -> None:
    folder = save(random_drafter(Options(mask_token=5, num_layers=2, norm_before_fc=True)), tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "peagle"
    assert (config["mask_token_id"], config["norm_before_fc"], config["norm_before_residual"]) == (5, True, False)
    assert "fc_norm" not in config and "norm_output" not in config  # vLLM reads neither of P-EAGLE
    assert load_file(folder / "model.safetensors")["mask_hidden"].shape == (1, 1, 3 * HIDDEN)
    told = read_serving_config(str(folder)).speculative_config(3)
    assert told == {"model": str(folder), "method": "eagle3", "parallel_drafting": True, "num_speculative_tokens": 3}
    found = load_drafter(folder)
    assert isinstance(found, PEagle) and found.training_steps == 3
    assert METHOD.settings(found.shape) == {
        "peagle.mask_token_id": 5,
        "peagle.sliding_window": None,
        "peagle.norm_before_residual": False,
        "peagle.norm_before_fc": True,
    }


@pytest.mark.parametrize(("token", "told"), [(None, "mask_token_id"), (23, "outside"), (-1, "at least 0")])
def test_a_folder_with_a_mask_token_that_makes_no_sense_is_refused(
    tmp_path: Path, token: int | None, told: str
) -> None:
    folder = save(random_drafter(Options(mask_token=5)), tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    config["mask_token_id"] = token
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(InputError, match=told):
        load_drafter(folder)


def test_the_mask_token_is_one_that_the_text_never_uses() -> None:
    head = random_head()
    used = np.ones(len(head.embed_weight), dtype=np.int64)
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"drafter\.peagle\.mask_token_id"):
        METHOD.resolve(DrafterConfig("peagle"), Corpus(lambda: used, head), said.append)
    used[[4, 9]] = 0
    found = METHOD.resolve(DrafterConfig("peagle"), Corpus(lambda: used, head), said.append)
    assert found.peagle.mask_token_id == 9 and "token 9" in said[0]
    given = DrafterConfig("peagle", peagle=PEagleConfig(mask_token_id=3))
    assert METHOD.resolve(given, Corpus(lambda: used, head), said.append) is given
    assert "the mask token 3 occurs 1 times" in said[1]


def test_one_step_has_no_mask_slots_to_train() -> None:
    config = DrafterConfig("peagle", autoregressive=AutoregressiveConfig(ttt_steps=1))
    with pytest.raises(ConfigError, match="ttt_steps"):
        METHOD.check(config)
    METHOD.check(replace(config, autoregressive=AutoregressiveConfig(ttt_steps=2)))


def test_switches_of_eagle3_are_not_read() -> None:
    assert METHOD.norms_taps(DrafterConfig("peagle", eagle3=Eagle3Config(fc_norm=True))) is False
    assert METHOD.norms_taps(DrafterConfig("peagle", peagle=PEagleConfig(norm_before_fc=True))) is True


def test_mask_slots_begin_with_the_mean_taps_of_columns_that_count() -> None:
    drafter = random_drafter(Options(mask_token=5), dtype=torch.float32)
    documents = [random_document("0001111", 3, seed=0), random_document("0011", 3, seed=1)]
    batch = packed(documents)
    batch.taps_TAH = batch.taps_TAH.float()
    # Columns whose token and next token were generated: 2, 3, 4 of the first document, 1 of the second.
    wanted = torch.cat([documents[0].taps[2:5], documents[1].taps[1:2]]).mean(0)
    torch.testing.assert_close(drafter._mean_taps(lambda: [batch]), wanted.float(), rtol=1e-5, atol=1e-6)


def test_slots_do_not_depend_on_what_was_drafted_before_them() -> None:
    """The text behind the anchor changes: outputs stay, bit for bit, while EAGLE-3's do not."""
    for options, same in ((Options(mask_token=5, steps=3), True), (Options(steps=3), False)):
        drafter = random_drafter(options)
        states = random_document("00111111", 3, seed=3)
        other = replace(states, input_ids=states.input_ids.clone())
        other.input_ids[3:] = (other.input_ids[3:] + 1) % 23
        found = []
        for text in (states, other):
            batch = packed([text])
            columns = Columns.build(batch, 3)
            found.append(drafter.unroll(batch, columns)[:, list(columns.query_M).index(1)])
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1:], found[1][1:]) is same
