"""What ``test_triton_loss.py`` runs in a process of its own, in Triton's interpreter: the kernel against the plain
losses in float64.
"""

from __future__ import annotations

import pytest
import torch
from drafter_tools import DRAFT_IDS, VOCAB
from test_losses import EVERY_LOSS, Case
from torch import Tensor
from training_step import Text, TrainingStep

from spectrain.drafters.losses import triton_terms
from spectrain.drafters.losses.reference import TERMS
from spectrain.drafters.losses.terms import Outcome, TeacherProbs
from spectrain.target.head import TargetHead

WEIGHTS = (*({name: 1.3} for name in EVERY_LOSS), EVERY_LOSS, {"ce": 0.1, "tv": 0.9})


def single(case: Case) -> Case:
    """The same in float32."""
    head = case.head
    weights = (head.embed_weight, head.norm_weight, head.lm_head_weight)
    case.head = TargetHead(head.math, *(w.float() for w in weights))
    for name in ("hidden_KUH", "matrix_DH", "last_hidden_UH", "weight_KU"):
        setattr(case, name, getattr(case, name).float())
    return case


@pytest.mark.parametrize("weights", WEIGHTS, ids="+".join)
@pytest.mark.parametrize("ids", [DRAFT_IDS, tuple(range(VOCAB))], ids=["reduced", "full"])
def test_values_and_gradients_of_a_whole_loss(ids: tuple[int, ...], weights: dict[str, float]) -> None:
    total, terms, d_hidden, d_matrix = Case("gemma2", ids).reference(weights)
    sums, found_d_hidden, found_d_matrix = single(Case("gemma2", ids)).run(weights, implementation="triton")
    assert float(sums.loss.detach()) == pytest.approx(float(total), rel=1e-5)
    for name, values in terms.items():
        assert sums.terms_K[name].tolist() == pytest.approx(values, rel=1e-4), name
    torch.testing.assert_close(found_d_hidden.double(), d_hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found_d_matrix.double(), d_matrix, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", WEIGHTS, ids="+".join)
def test_rows_longer_than_a_block(
    weights: dict[str, float], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks, the last one not full; one target outside the draft vocabulary, one student that counts nothing."""
    monkeypatch.setattr(triton_terms, "_BLOCK", 64)
    generator = torch.Generator().manual_seed(0)
    logits_ckD = (3 * torch.randn(4, 2, 150, generator=generator)).to(dtype)
    q_cD = 0.8 * torch.randn(4, 150, generator=generator).mul(2).softmax(-1)
    target_c = torch.tensor([5, 149, -1, int(logits_ckD[3, 1].argmax())])
    weight_ck = torch.rand(4, 2, generator=generator)
    weight_ck[1, 0] = 0.0

    x_RD = logits_ckD.double().flatten(0, 1).requires_grad_()
    target_R = target_c.repeat_interleave(2)
    log_p_RD, q_RD = x_RD.log_softmax(-1), q_cD.double().repeat_interleave(2, 0)
    terms = {name: TERMS[name](log_p_RD, q_RD, target_R) for name in EVERY_LOSS}
    loss_R = sum((w * terms[name] for name, w in weights.items()), torch.zeros(8, dtype=torch.float64))
    loss = (loss_R * weight_ck.double().flatten()).sum()
    loss.backward()

    outcome = Outcome.empty((4, 2), q_cD)
    found = triton_terms.terms_and_gradient(
        logits_ckD, TeacherProbs.of(q_cD, "kl" in weights), target_c, weight_ck, weights, outcome
    )
    assert float(found) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert x_RD.grad is not None and logits_ckD.dtype == dtype
    rounding = 1e-5 if dtype == torch.float32 else 8e-3  # the interpreter cuts off
    torch.testing.assert_close(logits_ckD.double().flatten(0, 1), x_RD.grad, rtol=rounding, atol=rounding / 10)
    counted_ck = weight_ck > 0
    for index, (name, term_R) in enumerate(terms.items()):
        if name != "kl" or "kl" in weights:
            torch.testing.assert_close(
                outcome.terms_5ck[index].double(), term_R.detach().view(4, 2) * counted_ck, rtol=1e-4, atol=1e-6
            )
    torch.testing.assert_close(1 - outcome.overlap_ck.double(), terms["tv"].detach().view(4, 2), rtol=1e-5, atol=1e-6)
    assert outcome.terms_5ck[4].tolist() == _hits(x_RD.detach(), target_R, counted_ck)
    assert outcome.terms_5ck[4].sum() > 0


def _hits(x_RD: Tensor, target_R: Tensor, counted_ck: Tensor) -> list[list[float]]:
    hits_ck = (x_RD.argmax(-1) == target_R).view(4, 2) & counted_ck
    return hits_ck.float().tolist()


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_extreme_logits_stay_finite(scale: float) -> None:
    case = single(Case())
    case.hidden_KUH = case.hidden_KUH * scale
    sums, d_hidden, d_matrix = case.run(EVERY_LOSS, implementation="triton")
    assert all(bool(torch.isfinite(x).all()) for x in (sums.loss, d_hidden, d_matrix))


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "dflash2"])
def test_drafters_train_the_same(kind: str) -> None:
    """With the biases that a sequential head adds, and candidates."""
    blocks = ("drafter.block.block_size=8", "drafter.block.anchors=16", "drafter.dspark.markov_rank=8")
    found = []
    for implementation in ("triton", "reference"):
        step = TrainingStep(
            (
                f"drafter={kind}",
                *(blocks if kind.startswith("d") else ()),
                "trainer.precision=float32",
                f"drafter.loss.implementation={implementation}",
            ),
            text=Text(64, 2),
        )
        losses = step.forward()
        losses.loss.backward()
        found.append([losses.loss.detach(), *(p.grad for p in step.drafter.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 2
    for mine, plain in zip(*found, strict=True):
        assert float((mine - plain).norm()) <= 1e-4 * float(plain.norm()) + 1e-9
