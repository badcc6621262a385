"""How a block drafter begins: shape by method, taps, mask token, parts of the target; and what its configuration
refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_target

from spectrain.config.commands import COMMANDS
from spectrain.config.drafter_schema import BlockConfig, DFlash2Config, DrafterConfig, DSparkConfig
from spectrain.config.schema import SpectrainConfig
from spectrain.data.vocab import DraftVocab, full_vocab
from spectrain.drafters.block.block_drafter import BlockDrafter
from spectrain.drafters.block.block_shape import BlockShape
from spectrain.drafters.build import build_drafter, continue_drafter
from spectrain.drafters.drafter_folder import save_drafter
from spectrain.drafters.mask_token import choose_mask_token
from spectrain.drafters.registry import find_method
from spectrain.errors import ConfigError
from spectrain.stages.drafter_checks import check_kind
from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target("qwen3", tmp_path_factory.mktemp("target"), num_hidden_layers=9)


@pytest.fixture(scope="module")
def spec(folder: Path) -> TargetSpec:
    return TargetSpec.from_folder(folder)


def shape(spec: TargetSpec, method: str, block: BlockConfig | None = None, **fields: Any) -> BlockShape:
    block = block or BlockConfig(mask_token_id=7)
    found = find_method(method).shape(DrafterConfig(method=method, block=block, **fields), spec)
    assert isinstance(found, BlockShape)
    return found


def test_methods_are_settings_of_one_shape(spec: TargetSpec) -> None:
    dflash, dspark, dflash2 = (shape(spec, method) for method in ("dflash", "dspark", "dflash2"))
    assert (dflash.num_drafts, dspark.num_drafts, dflash2.num_drafts) == (7, 8, 7)
    assert [dflash.slots(3), dspark.slots(3)] == [4, 3]
    assert dflash.markov is dflash.conv is dflash.selector is None and not dflash.confidence
    assert (
        dspark.markov is not None
        and dspark.markov.kind == "vanilla"
        and dspark.confidence
        and dspark.confidence_with_markov
    )
    assert dflash2.conv is not None and spec.hidden_size % dflash2.conv.group_size == 0 and dflash2.selector is not None
    assert all(one.layer.layer_type == "qwen3" and one.mask_token_id == 7 for one in (dflash, dspark, dflash2))
    assert not shape(spec, "dflash").causal and shape(spec, "dflash", BlockConfig(sliding_window=9)).causal
    assert not shape(spec, "dflash", BlockConfig(sliding_window=9, causal=False)).causal
    plain = shape(spec, "dspark", dspark=DSparkConfig(markov="none", confidence=False, sample_from_anchor=False))
    assert plain.markov is None and not plain.confidence and plain.num_drafts == 7
    for method in ("dflash", "dspark", "dflash2"):
        assert find_method(method).max_drafts(DrafterConfig(method=method)) == shape(spec, method).num_drafts
    assert find_method("eagle3").max_drafts(DrafterConfig()) is None


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(36, (2, 10, 18, 26, 34)), (30, (2, 8, 15, 22, 28)), (9, (2, 3, 4, 6, 7)), (4, (1, 2, 3)), (2, (1,)), (1, (0,))],
)
def test_taps_are_spread_evenly(spec: TargetSpec, layers: int, expected: tuple[int, ...]) -> None:
    from dataclasses import replace

    assert replace(spec, num_layers=layers).spread_taps() == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"method": "dflash", "block": lambda: BlockConfig(d_pace=True, decay=2.0)},
        r"block\.decay has no effect with drafter\.block\.d_pace=True",
    ),
    (
        {"method": "dflash", "block": lambda: BlockConfig(d_pace_smoothing=0.1)},
        r"d_pace_smoothing has no effect with drafter\.block\.d_pace=False",
    ),
    (
        {"method": "dspark", "dspark": lambda: DSparkConfig(markov="none", markov_rank=8)},
        r"markov_rank has no effect with drafter\.dspark\.markov=none",
    ),
    (
        {"method": "dspark", "dspark": lambda: DSparkConfig(confidence=False, confidence_weight=2.0)},
        "confidence_weight has no effect",
    ),
    ({"method": "dflash", "layer_type": "llama"}, "layer_type=llama"),
    ({"method": "dspark", "block": lambda: BlockConfig(sliding_window=64, causal=False)}, "causal=false"),
    ({"method": "dflash2", "draft_vocab_size": 100}, "whole vocabulary"),
    ({"method": "medusa"}, "use one of eagle3, .*dspark, dflash2"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_method_does_not_have_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_kind(
            SpectrainConfig(
                drafter=DrafterConfig(**{name: value() if callable(value) else value for name, value in fields.items()})
            ),
            COMMANDS["fit"],
        )


OTHERS = [
    ("dflash", "autoregressive.ttt_steps"),
    ("dspark", "eagle3.norm_output"),
    ("eagle3", "block.block_size"),
    ("dflash", "dspark.markov"),
    ("dspark", "dflash2.conv_kernel_size"),
]


@pytest.mark.parametrize(("method", "key"), OTHERS)
def test_a_key_of_another_kind_is_refused_where_the_command_line_sets_it(method: str, key: str) -> None:
    config = SpectrainConfig(drafter=DrafterConfig(method=method))
    check_kind(config, COMMANDS["fit"])
    section = key.partition(".")[0]
    with pytest.raises(ConfigError, match=f"{method} does not read drafter.{section}: leave it out"):
        check_kind(config, COMMANDS["fit"], {f"drafter.{key}"})


@pytest.mark.parametrize(
    ("section", "name"),
    [
        (BlockConfig, "block_size"),
        (BlockConfig, "anchors"),
        (BlockConfig, "sliding_window"),
        (BlockConfig, "decay"),
        (BlockConfig, "mask_token_id"),
        (DSparkConfig, "markov_rank"),
        (DFlash2Config, "conv_group_size"),
    ],
)
def test_numbers_out_of_range_are_refused(section: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        section(**{name: -1})


def test_what_does_not_fit_the_target_is_refused(spec: TargetSpec) -> None:
    with pytest.raises(ConfigError, match="must divide the target's width of 32"):
        shape(spec, "dflash2", dflash2=DFlash2Config(conv_group_size=5))
    with pytest.raises(ConfigError, match="outside the target's vocabulary"):
        shape(spec, "dflash", BlockConfig(mask_token_id=304))


def test_mask_token_is_one_that_never_occurs() -> None:
    embedding = torch.ones(8, 4)
    used = np.array([1, 0, 5, 0, 2, 0, 3, 1])
    assert choose_mask_token(used, embedding) == 5
    embedding[5] = 0.01  # never trained: its queries would be nothing
    assert choose_mask_token(used, embedding) == 3
    embedding[[1, 3]] = 0.01
    assert choose_mask_token(used, embedding) == 5  # better than none
    assert choose_mask_token(np.ones(8), embedding) is None


def built(folder: Path, spec: TargetSpec, config: DrafterConfig, seed: int = 0) -> tuple[BlockDrafter, TargetHead]:
    head = TargetHead.from_checkpoint(folder)
    size = config.draft_vocab_size
    vocab = full_vocab(spec.vocab_size) if size is None else DraftVocab(torch.arange(3, 3 + size), spec.vocab_size, 0.5)
    drafter = build_drafter(config, spec, vocab, head, folder, seed)
    assert isinstance(drafter, BlockDrafter)
    return drafter, head


def test_it_starts_from_the_targets_last_layers(folder: Path, spec: TargetSpec) -> None:
    drafter, head = built(folder, spec, DrafterConfig(method="dspark", num_layers=2, draft_vocab_size=40))
    reader = CheckpointReader(folder)
    for index, layer in enumerate(drafter.body.layers):
        names = [
            "self_attn.q_proj",
            "self_attn.o_proj",
            "self_attn.k_norm",
            "mlp.up_proj",
            "input_layernorm",
            "post_attention_layernorm",
        ]
        for name in names:
            assert torch.equal(
                layer.get_submodule(name).weight, reader.get(f"model.layers.{7 + index}.{name}.weight")
            ), name
    assert torch.equal(drafter.body.norm.weight, head.norm_weight)
    assert torch.equal(drafter.body.hidden_norm.weight, reader.get("model.layers.8.input_layernorm.weight"))
    assert torch.equal(drafter.body.lm_head.weight, head.lm_head_weight[3:43])
    deepest = torch.randn(5, 5, 32) * torch.tensor([0.0, 0, 0, 0, 1])[:, None]
    assert torch.nn.functional.cosine_similarity(drafter.body.fc(deepest.flatten(-2)), deepest[:, 4]).min() > 0.98


def test_gains_of_a_one_plus_family_are_converted(tmp_path: Path) -> None:
    folder = tiny_target("gemma3_text", tmp_path)
    spec = TargetSpec.from_folder(folder)
    drafter, head = built(folder, spec, DrafterConfig(method="dflash"))
    reader = CheckpointReader(folder)
    layer = drafter.body.layers[0]
    assert torch.equal(drafter.body.norm.weight, 1 + head.norm_weight)
    assert torch.equal(layer.input_layernorm.weight, 1 + reader.get("model.layers.3.input_layernorm.weight"))
    assert torch.equal(
        layer.post_attention_layernorm.weight, 1 + reader.get("model.layers.3.pre_feedforward_layernorm.weight")
    )
    assert torch.equal(layer.self_attn.q_norm.weight, 1 + reader.get("model.layers.3.self_attn.q_norm.weight"))


def test_other_shapes_and_random_starts_leave_the_target_alone(folder: Path, spec: TargetSpec) -> None:
    narrow, head = built(folder, spec, DrafterConfig(method="dflash", head_dim=16, intermediate_size=24))
    assert torch.equal(narrow.body.norm.weight, head.norm_weight)
    assert torch.equal(narrow.body.layers[0].input_layernorm.weight, torch.ones(32))
    random, _ = built(folder, spec, DrafterConfig(method="dflash", init="random"))
    assert torch.equal(random.body.norm.weight, torch.ones(32))
    again, _ = built(folder, spec, DrafterConfig(method="dflash", init="random"))
    other, _ = built(folder, spec, DrafterConfig(method="dflash", init="random"), seed=1)
    assert torch.equal(random.body.fc.weight, again.body.fc.weight) and not torch.equal(
        random.body.fc.weight, other.body.fc.weight
    )


def test_training_goes_on_from_a_folder(folder: Path, spec: TargetSpec, tmp_path: Path) -> None:
    drafter, head = built(
        folder,
        spec,
        DrafterConfig(method="dspark", block=BlockConfig(block_size=6), dspark=DSparkConfig(markov_rank=4)),
    )
    save_drafter(drafter.bfloat16(), tmp_path / "d", target="t", target_architectures=(), num_speculative_tokens=3)
    found = continue_drafter(
        DrafterConfig(method="dspark", path=str(tmp_path / "d"), block=BlockConfig(anchors=9, decay=2.0)), head
    )
    assert isinstance(found, BlockDrafter) and found.training and found.body.fc.weight.dtype == torch.float32
    assert found.shape == drafter.shape and (found.config.block.anchors, found.config.block.decay) == (9, 2.0)
    assert found.loss_terms == ["ce", "tv", "confidence"] and found.training_steps == 6
