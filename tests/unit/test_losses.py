"""Distillation losses and their hand-written gradients against autograd through the definitions over the whole
vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from drafter_tools import DRAFT_IDS, HIDDEN, VOCAB, head_reference, random_head
from reference import loss_terms
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spectrain.config.drafter_schema import LossConfig
from spectrain.drafters.losses import draft_loss, reference
from spectrain.drafters.losses import students as losses
from spectrain.drafters.losses.students import Teacher
from spectrain.target.head import TargetHead

K, U = 3, 5
EVERY_LOSS = {"ce": 0.3, "kl": 0.7, "tv": 1.1, "lk": 0.5}


class Case:
    """Random students and teachers. ``ids``: the draft vocabulary; one token lies outside it, one student in three has
    weight 0.
    """

    def __init__(self, family: str = "llama", ids: tuple[int, ...] = DRAFT_IDS, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = list(ids)
        self.head = random_head(family)
        self.hidden_KUH = torch.randn(K, U, HIDDEN, generator=generator, dtype=torch.float64)
        self.matrix_DH = 0.7 * torch.randn(len(ids), HIDDEN, generator=generator, dtype=torch.float64)
        self.last_hidden_UH = torch.randn(U, HIDDEN, generator=generator, dtype=torch.float64)
        self.tokens = [self.ids[3], 1, self.ids[0], self.ids[-1], self.ids[5]]
        counted = torch.tensor([[1.0, 1, 1, 0, 1], [1, 1, 0, 1, 1], [0, 1, 1, 1, 0]])
        self.weight_KU = torch.rand(K, U, generator=generator, dtype=torch.float64) * counted

    def teacher(self, normalised: bool = True) -> Teacher:
        normalizer = self.head.log_normalizer(self.last_hidden_UH) if normalised else None
        rows = self.head.lm_head_weight[self.ids] if len(self.ids) < VOCAB else None
        return Teacher(self.head, self.last_hidden_UH, normalizer, rows)

    def targets(self) -> Tensor:
        return torch.tensor([self.ids.index(token) if token in self.ids else -1 for token in self.tokens])

    def run(
        self, weights: dict[str, float], normalised: bool = True, implementation: Any = "fused"
    ) -> tuple[losses.LossSums, Tensor, Tensor]:
        """Sums, and the gradients of 2.5 times the loss."""
        hidden, matrix = (x.clone().requires_grad_() for x in (self.hidden_KUH, self.matrix_DH))
        loss = LossConfig(weights, implementation)
        sums = draft_loss(hidden, matrix, self.teacher(normalised), self.targets(), self.weight_KU, loss)
        (2.5 * sums.loss).backward()
        assert hidden.grad is not None and matrix.grad is not None
        return sums, hidden.grad, matrix.grad

    def reference(self, weights: dict[str, float]) -> tuple[Tensor, dict[str, list[float]], Tensor, Tensor]:
        hidden, matrix = (x.clone().requires_grad_() for x in (self.hidden_KUH, self.matrix_DH))
        head, total = head_reference(self.head), torch.zeros((), dtype=torch.float64)
        terms = {name: [0.0] * K for name in weights}
        for k in range(K):
            for u in range(U):
                found = loss_terms(
                    matrix @ hidden[k, u], self.ids, head.sampling(self.last_hidden_UH[u]), self.tokens[u]
                )
                for name, coefficient in weights.items():
                    term = getattr(found, name)
                    if term is not None and self.weight_KU[k, u] > 0:
                        total = total + float(self.weight_KU[k, u]) * coefficient * term
                        terms[name][k] += float(term.detach())
        (2.5 * total).backward()
        assert hidden.grad is not None and matrix.grad is not None
        return total.detach(), terms, hidden.grad, matrix.grad


@pytest.mark.parametrize("normalised", [True, False], ids=["stored normaliser", "computed here"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("ids", [DRAFT_IDS, tuple(range(VOCAB))], ids=["reduced", "full"])
@pytest.mark.parametrize("implementation", ["fused", "reference"])
def test_values_and_gradients(implementation: str, ids: tuple[int, ...], family: str, normalised: bool) -> None:
    case = Case(family, ids)
    sums, d_hidden, d_matrix = case.run(EVERY_LOSS, normalised, implementation)
    total, terms, reference_d_hidden, reference_d_matrix = case.reference(EVERY_LOSS)
    torch.testing.assert_close(sums.loss.detach(), total, rtol=1e-9, atol=0)
    for name, values in terms.items():
        assert sums.terms_K[name].tolist() == pytest.approx(values, rel=1e-9), name
    torch.testing.assert_close(d_hidden, reference_d_hidden, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(d_matrix, reference_d_matrix, rtol=1e-5, atol=1e-7)
    assert bool((d_hidden[case.weight_KU == 0] == 0).all())
    assert sums.count_K.tolist() == (case.weight_KU > 0).sum(-1).tolist()
    assert float(sums.weight) == pytest.approx(float(case.weight_KU.sum()))


def test_a_new_term_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Added to ``TERMS``, it is minimised with the others, and its gradient is autograd's."""

    def squares(log_p_SD: Tensor, q_SD: Tensor, target_S: Tensor) -> Tensor:
        return (log_p_SD.exp() - q_SD).square().sum(-1)

    monkeypatch.setitem(reference.TERMS, "squares", squares)
    case = Case()
    sums, d_hidden, _ = case.run({"squares": 2.0, "ce": 0.5}, implementation="reference")
    hidden = case.hidden_KUH.clone().requires_grad_()
    p_KUD = (hidden @ case.matrix_DH.T).softmax(-1)
    q_UD = torch.stack([head_reference(case.head).sampling(y) for y in case.last_hidden_UH])[:, case.ids]
    squares_KU = (p_KUD - q_UD).square().sum(-1)
    ((case.weight_KU * squares_KU).sum() * 2.0 * 2.5).backward()
    counted = case.weight_KU > 0
    assert sums.terms_K["squares"].tolist() == pytest.approx((squares_KU.detach() * counted).sum(-1).tolist())
    alone = case.run({"ce": 0.5}, implementation="reference")[1]
    assert hidden.grad is not None
    torch.testing.assert_close(d_hidden - alone, hidden.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunk_bytes", [1, 4 * K * len(DRAFT_IDS) * 2, 1 << 30])
def test_chunks_change_nothing(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    expected, d_hidden, d_matrix = case.run(EVERY_LOSS)
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_bytes)
    found, chunked_d_hidden, chunked_d_matrix = case.run(EVERY_LOSS)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(chunked_d_hidden, d_hidden, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(chunked_d_matrix, d_matrix, rtol=1e-10, atol=1e-14)


def test_only_what_needs_a_gradient_gets_one() -> None:
    case = Case()
    hidden = case.hidden_KUH.clone().requires_grad_()
    draft_loss(
        hidden, case.matrix_DH, case.teacher(), case.targets(), case.weight_KU, LossConfig(EVERY_LOSS)
    ).loss.backward()
    torch.testing.assert_close(hidden.grad, case.run(EVERY_LOSS)[1] / 2.5)
    matrix = case.matrix_DH.clone().requires_grad_()
    draft_loss(
        case.hidden_KUH, matrix, case.teacher(), case.targets(), case.weight_KU, LossConfig(EVERY_LOSS)
    ).loss.backward()
    torch.testing.assert_close(matrix.grad, case.run(EVERY_LOSS)[2] / 2.5)


def test_without_gradients_no_product_is_made_for_them() -> None:
    case, flops = Case(), []
    for asked in (True, False):
        hidden = case.hidden_KUH.clone().requires_grad_()
        with torch.set_grad_enabled(asked), FlopCounterMode(display=False) as counter:
            draft_loss(hidden, case.matrix_DH, case.teacher(), case.targets(), case.weight_KU, LossConfig({"ce": 1.0}))
        flops.append(counter.get_total_flops())
    assert flops[0] - flops[1] == 2 * hidden.numel() * len(case.matrix_DH)


def test_a_drafter_equal_to_its_teacher_has_no_distance_left() -> None:
    case = Case("llama", tuple(range(VOCAB)))
    normed_UH = case.head.post_norm(case.last_hidden_UH)
    case.hidden_KUH, case.matrix_DH = normed_UH.expand(K, -1, -1).clone(), case.head.lm_head_weight
    sums, d_hidden, _ = case.run({"kl": 1.0, "tv": 1.0, "lk": 1.0})
    for name in ("kl", "tv", "lk"):
        assert sums.terms_K[name].tolist() == pytest.approx([0.0] * K, abs=1e-5)
    case.run({"kl": 1.0})
    assert case.run({"kl": 1.0})[1].abs().max() < 1e-5
    assert bool(torch.isfinite(d_hidden).all())


def test_mass_outside_the_draft_vocabulary_cannot_be_won() -> None:
    """tv is at least the target's mass outside, whatever the drafter says: nothing is renormalised."""
    case = Case()
    outside = [v for v in range(VOCAB) if v not in case.ids]
    floor = sum(float(head_reference(case.head).sampling(y)[outside].sum()) for y in case.last_hidden_UH)
    case.weight_KU = torch.ones(K, U)
    # The best drafter there is: the target's distribution inside, normalised.
    head = case.head
    case.hidden_KUH, case.matrix_DH = (
        head.post_norm(case.last_hidden_UH).expand(K, -1, -1).clone(),
        head.lm_head_weight[case.ids],
    )
    sums, _, _ = case.run({"tv": 1.0})
    assert floor > 0.5
    assert sums.terms_K["tv"].tolist() == pytest.approx([floor] * K, rel=1e-5)


def test_a_token_outside_the_draft_vocabulary_has_no_ce_and_is_never_hit() -> None:
    case = Case()
    case.weight_KU = torch.zeros(K, U)
    case.weight_KU[:, 1] = 1.0
    sums, d_hidden, d_matrix = case.run({"ce": 1.0})
    assert float(sums.loss.detach()) == 0 and float(d_hidden.abs().max()) == 0 and float(d_matrix.abs().max()) == 0
    assert sums.hits_K.tolist() == [0] * K
    assert sums.count_K.tolist() == [1] * K  # it still counts in the mean


def test_hits_count_the_argmax() -> None:
    case = Case()
    case.matrix_DH = torch.nn.functional.one_hot(torch.arange(len(case.ids)), HIDDEN).double()
    case.hidden_KUH = torch.zeros(K, U, HIDDEN, dtype=torch.float64)
    for u, target in enumerate(case.targets().tolist()):
        case.hidden_KUH[0, u, max(target, 0)] = 5.0
        case.hidden_KUH[1, u, (target + 1) % len(case.ids)] = 5.0
    case.weight_KU = torch.tensor([[1.0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    assert case.run({"ce": 1.0})[0].hits_K.tolist() == [3, 0, 0]


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_extreme_logits_stay_finite(scale: float) -> None:
    case = Case()
    case.hidden_KUH = case.hidden_KUH * scale
    sums, d_hidden, d_matrix = case.run(EVERY_LOSS)
    assert math.isfinite(float(sums.loss.detach()))
    assert bool(torch.isfinite(d_hidden).all()) and bool(torch.isfinite(d_matrix).all())


def test_autocast_computes_products_in_bfloat16_and_sums_in_float32() -> None:
    case = Case()
    case.head = TargetHead(
        case.head.math, *(w.float() for w in (case.head.embed_weight, case.head.norm_weight, case.head.lm_head_weight))
    )
    for name in ("hidden_KUH", "matrix_DH", "last_hidden_UH"):
        setattr(case, name, getattr(case, name).float())
    exact = case.run(EVERY_LOSS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = case.run(EVERY_LOSS)
    for found, wanted in zip(rounded[1:], exact[1:], strict=True):
        assert found.dtype == torch.float32
        assert 1e-6 < (found - wanted).norm() / wanted.norm() < 0.03
    assert rounded[0].loss.dtype == torch.float32
    assert float(rounded[0].loss.detach()) == pytest.approx(float(exact[0].loss.detach()), rel=0.02)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_teachers_distribution_keeps_its_true_mass(family: str) -> None:
    case = Case(family)
    expected = torch.stack([head_reference(case.head).sampling(y) for y in case.last_hidden_UH])
    for normalised in (True, False):
        found = case.teacher(normalised).log_probs(slice(1, 4)).exp().double()
        torch.testing.assert_close(found, expected[1:4, case.ids], rtol=1e-10, atol=1e-14)
    full = Teacher(case.head, case.last_hidden_UH, None, None).log_probs(slice(0, U)).exp().double()
    torch.testing.assert_close(full, expected, rtol=1e-10, atol=1e-14)
