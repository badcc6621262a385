"""Optimisers and schedule: Muon against its definition by singular values, the groups, and the learning rate at every
step.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from block_tools import DFLASH2, DSPARK, BlockOptions, random_block_drafter
from drafter_tools import Options, random_drafter, tensors_of

from spectrain.config.trainer_schema import TrainerConfig
from spectrain.drafters.drafter import Drafter
from spectrain.training.optim import Muon, build_optimizers, lr_factor, orthogonalise, set_learning_rates


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (1, 7)])
def test_orthogonalise_keeps_singular_vectors_and_levels_singular_values(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    rank = min(shape)
    u, _ = torch.linalg.qr(torch.randn(shape[0], rank, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(shape[1], rank, generator=generator, dtype=torch.float64))
    found = u.T @ orthogonalise(7.0 * u @ torch.diag(torch.logspace(0, -1, rank, dtype=torch.float64)) @ v.T) @ v
    values = found.diagonal()
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    assert float((found - torch.diag(values)).abs().max()) < 1e-10


def test_orthogonalise_does_not_know_scale_and_survives_zero() -> None:
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(orthogonalise(matrix), orthogonalise(1e4 * matrix), rtol=1e-6, atol=1e-8)
    assert float(orthogonalise(torch.zeros(4, 5)).abs().max()) == 0


def test_muon_steps_are_nesterov_momentum_orthogonalised() -> None:
    generator = torch.Generator().manual_seed(2)
    parameter = torch.nn.Parameter(torch.randn(6, 10, generator=generator, dtype=torch.float64))
    expected, momentum = parameter.detach().clone(), torch.zeros_like(parameter)
    optimizer = Muon([parameter], lr=0.02, weight_decay=0.1)
    for _ in range(3):
        gradient = torch.randn(6, 10, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonalise(0.05 * gradient + 0.95 * momentum)
        expected = expected * (1 - 0.02 * 0.1) - 0.02 * 0.2 * math.sqrt(10) * update
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-9, atol=1e-12)


def eagle3() -> Drafter:
    return random_drafter(Options(layer_type="qwen3", reduced=True, num_layers=2, fc_norm=True))


def groups_of(optimizer: str, drafter: Drafter) -> dict[str, tuple[str, float, float]]:
    """Parameter name -> (optimiser class, learning rate, weight decay), of all that are trained."""
    names = {id(p): name for name, p in tensors_of(drafter).items()}
    config = TrainerConfig(optimizer=optimizer, learning_rate=1e-3, muon_learning_rate=0.03, weight_decay=0.1)
    found: dict[str, tuple[str, float, float]] = {}
    for built in build_optimizers(drafter, config):
        for group in built.param_groups:
            for parameter in group["params"]:
                assert names[id(parameter)] not in found  # each parameter once
                found[names[id(parameter)]] = (type(built).__name__, group["lr"], group["weight_decay"])
    trained = {name for name, p in tensors_of(drafter).items() if p.requires_grad}
    assert set(found) == trained  # and none forgotten
    return found


def test_adamw_decays_matrices_only() -> None:
    for name, (kind, lr, decay) in groups_of("adamw", eagle3()).items():
        assert (kind, lr) == ("AdamW", 1e-3)
        assert decay == (0.0 if "norm" in name else 0.1), name


ATTENTION = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
LAYER = ATTENTION | {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
CONV = {f"{name}_conv.kernel_projection.weight" for name in ("attention", "mlp")}


def in_layers(count: int, names: set[str]) -> set[str]:
    return {f"layers.{layer}.{name}" for layer in range(count) for name in names}


@pytest.mark.parametrize(
    ("drafter", "by_muon", "matrices_by_adamw"),
    [
        (eagle3(), {"fc.weight", *in_layers(2, LAYER)}, {"lm_head.weight"}),
        (
            random_block_drafter(replace(DSPARK, reduced=True)),
            {"fc.weight", *in_layers(2, LAYER)},
            {
                *("lm_head.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
                "confidence_head.proj.weight",
            },
        ),
        (
            random_block_drafter(BlockOptions(method="dspark", anchor=True, markov="gated")),
            {"fc.weight", "markov_head.gate_proj.weight", *in_layers(2, LAYER)},
            {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"},
        ),
        (
            random_block_drafter(BlockOptions(method="dspark", anchor=True, markov="rnn")),
            {"fc.weight", "markov_head.joint_proj.weight", *in_layers(2, LAYER)},
            {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"},
        ),
        (
            random_block_drafter(DFLASH2),
            {"fc.weight", "candidate_selector.hidden_projection.weight", *in_layers(2, LAYER | CONV)},
            {
                *("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"),
                *in_layers(2, {"attention_conv.base_kernel", "mlp_conv.base_kernel"}),
            },
        ),
    ],
    ids=["eagle3", "dspark", "dspark gated", "dspark rnn", "dflash2"],
)
def test_muon_takes_matrices_between_hidden_features_only(
    drafter: Drafter, by_muon: set[str], matrices_by_adamw: set[str]
) -> None:
    found = groups_of("muon", drafter)
    assert {name for name, group in found.items() if group == ("Muon", 0.03, 0.1)} == by_muon
    assert {name for name, group in found.items() if group == ("AdamW", 1e-3, 0.1)} == matrices_by_adamw
    vectors = set(found) - by_muon - matrices_by_adamw
    assert vectors and all(found[name] == ("AdamW", 1e-3, 0.0) for name in vectors)
    assert all(parameter.ndim == 1 for name, parameter in tensors_of(drafter).items() if name in vectors)


def test_a_drafter_without_hidden_matrices_is_left_to_adamw() -> None:
    drafter = random_drafter(Options(reduced=True))
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    assert groups_of("muon", drafter) == {"lm_head.weight": ("AdamW", 1e-3, 0.1)}


def test_learning_rates_are_multiples_of_the_initial_ones() -> None:
    optimizers = build_optimizers(
        random_drafter(Options(reduced=True)),
        TrainerConfig(optimizer="muon", learning_rate=1e-3, muon_learning_rate=0.02),
    )
    for factor in (0.5, 0.25):  # of the initial rate, not of the last
        set_learning_rates(optimizers, factor)
        assert [group["lr"] for o in optimizers for group in o.param_groups] == pytest.approx(
            [0.02 * factor, 1e-3 * factor, 1e-3 * factor]
        )


def test_cosine_schedule() -> None:
    config = TrainerConfig(schedule="cosine", warmup_fraction=0.1, final_lr_fraction=0.1)
    factors = [lr_factor(step, 100, config) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10] == 1.0
    assert factors[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert 0.1 <= factors[99] < 0.102
    assert lr_factor(100, 100, config) == pytest.approx(0.1)


def test_wsd_schedule() -> None:
    config = TrainerConfig(schedule="wsd", warmup_fraction=0.1, decay_fraction=0.2, final_lr_fraction=0.0)
    factors = [lr_factor(step, 100, config) for step in range(100)]
    assert factors[9:80] == [1.0] * 71
    assert factors[80:] == pytest.approx([1 - step / 20 for step in range(20)])
    assert lr_factor(100, 100, config) == pytest.approx(0.0)


def test_constant_schedule_and_no_warm_up() -> None:
    config = TrainerConfig(schedule="constant", warmup_fraction=0.0)
    assert {lr_factor(step, 10, config) for step in range(10)} == {1.0}


def test_a_short_training_warms_up_in_one_step() -> None:
    assert lr_factor(0, 3, TrainerConfig(warmup_fraction=0.04)) == 1.0
    assert all(
        math.isfinite(lr_factor(step, 1, TrainerConfig(schedule=s)))
        for s in ("cosine", "wsd", "constant")
        for step in range(2)
    )
