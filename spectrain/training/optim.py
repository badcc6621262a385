"""Optimisers and the learning-rate schedule.

AdamW is torch's. Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) is ours because torch's runs its
Newton–Schulz iteration in bfloat16 only, which a CPU without bfloat16 units emulates ten times slower than float32. It
takes matrices between hidden features, whose singular values an update should level; where a row belongs to a token
(embeddings, codebooks, output matrices) or there is one row only, AdamW stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from spectrain.config.trainer_schema import TrainerConfig
from spectrain.drafters.drafter import Drafter

# Quintic iteration with slope 3.4445 at 0: pushes all singular values into about [0.7, 1.2] in five steps.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_MOMENTUM = 0.95


def orthogonalise(matrix: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix, roughly: UV' of the singular value decomposition, by five Newton–Schulz steps."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


class Muon(Optimizer):
    """Nesterov momentum, orthogonalised, times 0.2·sqrt(longer side): AdamW's rates carry over (Liu et al. 2025,
    arXiv:2502.16982).
    """

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - _MOMENTUM)
                update = orthogonalise(parameter.grad.lerp(momentum, _MOMENTUM))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def build_optimizers(drafter: Drafter, config: TrainerConfig) -> list[Optimizer]:
    """One optimiser, or Muon for the drafter's hidden matrices and AdamW for the rest. Matrices decay, vectors do
    not.
    """
    trained = [p for p in drafter.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    optimizers: list[Optimizer] = []
    if config.optimizer == "muon":
        hidden = [p for p in drafter.hidden_matrices() if p.requires_grad]
        chosen = {id(p) for p in hidden}
        matrices = [p for p in matrices if id(p) not in chosen]
        if hidden:
            optimizers.append(Muon(hidden, config.muon_learning_rate, config.weight_decay))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if groups:
        optimizers.append(AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def lr_factor(step: int, total_steps: int, config: TrainerConfig) -> float:
    """What the learning rates are multiplied by at optimiser step ``step`` (from 0): warm-up, then cosine, WSD or
    constant.
    """
    warmup = max(1, round(config.warmup_fraction * total_steps)) if config.warmup_fraction else 0
    if step < warmup:
        return (step + 1) / warmup
    final = config.final_lr_fraction
    progress = (step - warmup) / max(1, total_steps - warmup)
    if config.schedule == "cosine":
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    if config.schedule == "wsd":
        decay_from = 1 - config.decay_fraction * total_steps / max(1, total_steps - warmup)
        return (
            1.0 if progress < decay_from else final + (1 - final) * max(0.0, 1 - progress) / max(1e-9, 1 - decay_from)
        )
    return 1.0


def set_learning_rates(optimizers: list[Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
