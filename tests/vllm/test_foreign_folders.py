"""Folders in the layouts of other projects, run by the real vLLM as they are: what we read is what it reads, ids of
layers included.

Two reference implementations: vLLM itself drafts from the folder what our loop drafts with the drafter that was read
from it; and its readers of configurations give the same taps, switches and kinds of attention.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from block_tools import DSPARK, BlockOptions, random_block_drafter
from drafter_tools import Options, random_drafter
from foreign_layouts import deepspec_dspark, eagle3, write, zlab_dflash
from parity_tools import DRAFTS, Family, assert_same_rounds, decoded_by_vllm, served_job, train
from rounds_process import RoundsProcess
from test_block_parity import trained

from spectrain.config.drafter_schema import BlockConfig, DrafterConfig
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.drafter_folder import load_drafter, read_shape, save_drafter
from spectrain.evaluation.parity import compare
from spectrain.target.head import TargetHead

USUAL = (2, 3, 4)  # what vLLM takes of a target with seven layers where a drafter does not say
Bench = tuple[Family, dict[str, Drafter], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, rounds_process: RoundsProcess) -> Bench:
    folder: Path = tmp_path_factory.mktemp("layouts")
    family = Family.make("llama", folder / "target")
    dflash = DrafterConfig("dflash", taps=(1, 4, 7), num_layers=2, block=BlockConfig(block_size=DRAFTS + 1))
    folders = {
        "eagle3": write(
            eagle3,
            train(family, Options(taps=USUAL, reduced=True)),
            folder / "a",
            eagle_aux_hidden_state_layer_ids=None,
        ),
        "eagle3 with ids": write(
            eagle3, train(family, Options(taps=(1, 4, 6), norm_before_residual=True)), folder / "b"
        ),
        "dflash": write(zlab_dflash, trained(family, dflash), folder / "c"),
    }
    jobs = [served_job(name, family, path) for name, path in folders.items()]
    head = TargetHead.from_checkpoint(family.folder)
    drafters = {
        name: load_drafter(path, family.model.spec.default_taps()).attach(head) for name, path in folders.items()
    }
    return family, drafters, rounds_process.run(jobs)


@pytest.mark.parametrize("name", ["eagle3", "eagle3 with ids", "dflash"])
def test_vllm_drafts_from_the_folder_what_our_loop_does(bench: Bench, name: str) -> None:
    family, drafters, reports = bench
    theirs = decoded_by_vllm(family, reports[name])
    report = compare(family.model, drafters[name], family.ours(drafters[name]), theirs, DRAFTS)
    assert_same_rounds(report, 40)
    assert 0.1 < report.theirs.acceptance_rate < 1


# --- vLLM's readers of configurations ------------------------------------------------------------------------------


def taps_by_vllm(config: Any) -> tuple[int, ...] | None:
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    return get_eagle3_aux_layers_from_config(SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config)))


def attention_by_vllm(config: Any) -> set[tuple[int | None, bool]]:
    from vllm.model_executor.models.qwen3_dflash import _resolve_layer_attention

    return {_resolve_layer_attention(config, index) for index in range(config.num_hidden_layers)}


def check_block(folder: Path, config: Any) -> None:
    shape: Any = read_shape(folder)
    nested = getattr(config, "dflash_config", None) or {}
    assert taps_by_vllm(config) == shape.taps
    assert attention_by_vllm(config) == {(shape.sliding_window, shape.causal)}
    assert nested.get("mask_token_id", getattr(config, "mask_token_id", None)) == shape.mask_token_id
    assert {key: value for key, value in config.rope_parameters.items() if key != "type"} == shape.layer.rope_parameters
    if shape.method == "dspark":
        assert getattr(config, "sample_from_anchor", True) == shape.sample_from_anchor
        assert config.block_size == shape.block_size
        assert (config.markov_rank, config.enable_confidence_head) == (shape.markov.rank, shape.confidence)


NATIVE: list[tuple[Any, BlockOptions, dict[str, Any]]] = [
    (zlab_dflash, BlockOptions(taps=(0, 2)), {}),
    (zlab_dflash, BlockOptions(window=4), {}),
    (zlab_dflash, BlockOptions(window=4, causal=True), {}),
    (zlab_dflash, BlockOptions(), {"is_causal": True}),
    (
        zlab_dflash,
        BlockOptions(),
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7, "use_sliding_window": True},
    ),
    (
        zlab_dflash,
        BlockOptions(),
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    ),
    (
        zlab_dflash,
        BlockOptions(),
        {"layer_types": None, "use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0},
    ),
    (zlab_dflash, BlockOptions(), {"eagle_aux_hidden_state_layer_ids": [2, 5]}),
    (zlab_dflash, BlockOptions(), {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    (deepspec_dspark, DSPARK, {}),
    (deepspec_dspark, DSPARK, {"sample_from_anchor": False, "confidence_head_with_markov": None}),
]


@pytest.mark.parametrize(("layout", "options", "changes"), NATIVE)
def test_flat_configurations_as_vllm_reads_them(
    tmp_path: Path, layout: Any, options: BlockOptions, changes: dict[str, Any]
) -> None:
    from transformers import Qwen3Config

    folder = write(layout, random_block_drafter(options), tmp_path / "d", **changes)
    check_block(folder, Qwen3Config.from_pretrained(folder))


EXPORTED: list[tuple[Any, tuple[str, ...]]] = [
    (BlockOptions(taps=(1, 4)), ()),
    (BlockOptions(window=4, causal=True), ()),
    (BlockOptions(window=4), ()),
    (BlockOptions(), ("sliding_window_non_causal", "sample_from_anchor")),
    (DSPARK, ()),
    (BlockOptions("dspark", markov="vanilla", window=6, causal=True, confidence=True), ("sample_from_anchor",)),
    (Options(norm_before_residual=True, norm_output=True, taps=(0, 2)), ()),
    (Options(fc_norm=True, norm_before_fc=True), ()),
    (Options(), ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")),
]


@pytest.mark.parametrize(("options", "missing"), EXPORTED)
def test_the_speculators_layout_as_vllm_reads_it(tmp_path: Path, options: Any, missing: tuple[str, ...]) -> None:
    """Also where a field is missing: its defaults are ours."""
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    drafter = random_drafter(options) if isinstance(options, Options) else random_block_drafter(options)
    save_drafter(drafter, tmp_path / "d", target="t", target_architectures=(), num_speculative_tokens=2)
    file = tmp_path / "d/config.json"
    file.write_text(
        json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key not in missing})
    )
    config = SpeculatorsConfig.from_pretrained(tmp_path / "d")
    if isinstance(options, BlockOptions):
        check_block(tmp_path / "d", config)
        return
    shape: Any = read_shape(tmp_path / "d")
    assert taps_by_vllm(config) == shape.taps
    for switch in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert getattr(config, switch) == getattr(shape, switch)
